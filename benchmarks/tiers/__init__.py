"""The tiers measured: bytes against memcpy and the bare disk, words against the clock."""
