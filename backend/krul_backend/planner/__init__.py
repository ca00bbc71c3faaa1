"""Decides, layer by layer, which part of a prefix is recomputed and which is loaded.

Measured costs and the sizes of a prefix enter; the token up to which each layer recomputes comes out.
Numbers only: no torch, no engine. The engine calls it for each returning prefix, and to leave out of a
segment what no plan loads.
"""
