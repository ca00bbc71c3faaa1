"""The reference model: a small Llama trained here to recall facts from earlier turns."""
