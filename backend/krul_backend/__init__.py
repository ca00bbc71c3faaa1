"""Tensors, bytes and files of krul-sglang. Never imports sglang."""
