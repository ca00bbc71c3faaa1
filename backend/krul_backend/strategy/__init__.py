"""Strategies: which layers share their KV, and at which precision each is stored."""
