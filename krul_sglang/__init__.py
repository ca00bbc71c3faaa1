"""krul-sglang: a KV cache tier for multi-turn conversations on SGLang."""

__version__ = "0.1.0"
