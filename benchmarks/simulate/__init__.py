"""Restores on published hardware, computed and not measured: who wins where, and by how much."""
