"""Measurements; each program writes one JSON, from which ``pages`` writes the tables in the documentation."""
