"""Describes how the layers of a segment are stored: alone, in pairs or in groups, and how precisely.

Plain values without tensors. Codecs store by them, and the engine asks them what is lost and what decoding
costs.
"""

from krul_backend.strategy.strategy import (
    SUBSPACE,
    LayerCosts,
    LayerGroups,
    Pair,
    Precision,
    StoredAs,
    Strategy,
)
