"""Methods of restoring a conversation's KV, measured side by side on models with random weights."""
