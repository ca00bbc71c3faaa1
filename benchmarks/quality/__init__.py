"""What compressing a conversation's KV does to the answers that follow it."""
