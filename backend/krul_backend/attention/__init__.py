"""Attention statistics: how similar two layers attend, and which attend to the beginning and the end only."""
