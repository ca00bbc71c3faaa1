"""Measurements; each program writes one JSON, from which the tables in the README are generated."""
