"""What of a returning conversation is recomputed and what is loaded, and how long that takes."""
