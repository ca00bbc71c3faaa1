"""Stores what the bases cannot keep layer by layer, in as few bits as its limit allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.units import UnitPlan
from krul_backend.strategy import Precision, Strategy

COARSE = (Precision.INT4, Precision.INT8)
"""The precisions that ``coarse_plan`` tries, the one with the fewest bits first."""


def coarse_plan(
    limit: float,
    run: TokenRun,
    attention: torch.Tensor,
    codec: ModelCodecs,
    subspace: SubspaceCodec,
    pause: Callable[[], None],
) -> tuple[Strategy, float] | None:
    """Find the fewest bits with which a run is expected to lose at most ``limit`` nats per predicted token.

    Returns them, with what it loses then by the costs of errors in ``subspace``; None if all lose too much.
    ``attention [L, Hkv, run.num_tokens]``: see ``GroupBasis.token_worth``. ``pause`` is called before each
    layer, which it may hold up.
    """
    at, end = {"start_token": run.start_token, "num_tokens": run.num_tokens}, run.start_token + run.num_tokens
    # Of fp8, int8 takes no fewer bytes.
    tried = COARSE if codec.native.model.shape.dtype.itemsize > 1 else COARSE[:1]
    for precision in tried if limit > 0 else ():
        strategy = Strategy.from_pairs(codec.num_layers, (), precision)

        def errors(layer: int, strategy: Strategy = strategy) -> LayerKV:
            pause()
            alone = [run.start_token if each == layer else end for each in range(codec.num_layers)]
            encoded = codec.of(strategy).encode(replace(run, head_ends=alone), UnitPlan(strategy))
            decoder = codec.of(strategy).open(encoded.params, **at)
            found, true = decoder.decode(layer, dict(encoded.blocks), 0, run.num_tokens), run.read(layer)
            lost = [a.float() - b.float() for a, b in ((found.k, true.k), (found.v, true.v))]
            # A value that is no number may be outside of the sample: it spoils all of them.
            return LayerKV(*(part + 0 * part.sum() for part in lost))

        damage = subspace.sample(errors, **at, attention=attention, are_errors=True).all_lost
        if damage <= limit:
            return strategy, damage
    return None
