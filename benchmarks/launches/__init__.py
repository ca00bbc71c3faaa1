"""Counts kernels, copies and waits of the host per operation of the engine."""
