"""Proves how early a restore can end: the measure of the planner that serves."""
