"""Stores: where segments live, behind one interface."""
