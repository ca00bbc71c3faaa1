"""Builders, doubles, and processes that several tests use."""
