"""Places where encoded segments lie: host memory, SSD, and a Mooncake cluster.

Manifests, checksums and byte blocks enter and leave; nothing here knows what the bytes mean. ``store`` makes
one store of them; nobody else calls them.
"""
