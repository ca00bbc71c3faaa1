"""The tiers that keep encoded segments: host memory, SSD, and a Mooncake cluster.

They take and return manifests, checksums and blocks of bytes; none knows what the bytes mean. ``store`` makes
one store of them, and is their only caller.
"""
