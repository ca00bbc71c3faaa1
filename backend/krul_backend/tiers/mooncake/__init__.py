"""The Mooncake tier: segments as objects of a Mooncake Store that all daemons of a cluster share."""
