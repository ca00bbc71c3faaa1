"""Stores quantized transform coefficients without loss, in few bytes, and reads them fast on one core.

Integer levels, one scale per coefficient and one shift per token enter, bytes come out, and back. Records of
64 tokens decode alone, so the tail of a block from any record on is a block. ``coders.py`` has the contract.
"""
