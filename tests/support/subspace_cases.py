"""Segments of the subspace codec before and after, for its tests."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import orjson
import torch

from krul_backend.codec.coefficients.scales import BAND, unpack_offsets
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import ModelBases, group_vectors
from krul_backend.codec.subspace.codec import EncodedSegment, SubspaceCodec
from krul_backend.codec.subspace.decoder import SubspaceDecoder
from tests.support.codec_builders import rotary_table
from tests.support.subspace_builders import make_bases, make_layers


@dataclass(frozen=True, eq=False)
class Case:
    """A segment before and after."""

    codec: SubspaceCodec
    rotary: RotaryTable | None
    layers: Sequence[LayerKV]
    start_token: int
    encoded: EncodedSegment
    decoder: SubspaceDecoder

    @property
    def bases(self) -> ModelBases:
        return self.codec.bases

    @property
    def num_tokens(self) -> int:
        return len(self.layers[0].k)

    def decode(self, group: int, first_token: int = 0) -> list[LayerKV]:
        layer = self.bases.groups[group].first_layer
        block = self.encoded.blocks[group][self.decoder.tail_start(layer, first_token) :]
        return self.decoder.decode(group, block, first_token)

    def coefficients(self, group: int, layers: Sequence[LayerKV]) -> torch.Tensor:
        """fp64 ``[T, R]`` of the KV of a group's layers."""
        positions = torch.arange(self.start_token, self.start_token + self.num_tokens)
        bare = [
            kv if self.rotary is None else LayerKV(self.rotary.unrotate(kv.k, positions), kv.v)
            for kv in layers
        ]
        basis = self.bases.groups[group]
        return (group_vectors(bare).double() - basis.mean.double()) @ basis.encoder.double()

    def num_kept(self, group: int) -> int:
        """How many coefficients are stored, those of bands between them that are all zero included."""
        packed = np.frombuffer(b64decode(self.encoded.params["groups"][group]["offsets"]), np.uint8)
        rank = self.bases.groups[group].rank
        bands = unpack_offsets(packed, rank).nonzero()[0]
        return min(int(bands.max(initial=0) + 1) * BAND, rank)

    def errors(self, group: int) -> torch.Tensor:
        """What was lost of each coefficient, fp64 ``[T, R]``."""
        layers = self.bases.groups[group].layers
        true = [self.layers[layer] for layer in layers]
        return self.coefficients(group, self.decode(group)) - self.coefficients(group, true)


def make_case(
    bases: ModelBases,
    *,
    num_tokens: int = 150,
    start_token: int = 0,
    with_rotary: bool = True,
    max_damage: float = 0.1,
    attention: torch.Tensor | None = None,
    num_first_tokens: int = 1,
    layers: Sequence[LayerKV] | None = None,
) -> Case:
    rotary = rotary_table(bases.shape.k_head_dim) if with_rotary else None
    codec = SubspaceCodec(bases, rotary, num_first_tokens=num_first_tokens)
    if layers is None:
        layers = make_layers(bases, num_tokens, rotary, start_token=start_token)
    encoded = codec.encode(
        layers.__getitem__,
        start_token=start_token,
        num_tokens=num_tokens,
        attention=attention,
        max_damage=max_damage,
    )
    # What is stored is JSON.
    params = orjson.loads(orjson.dumps(encoded.params))
    decoder = codec.open(params, start_token=start_token, num_tokens=num_tokens)
    return Case(codec, rotary, layers, start_token, encoded, decoder)


@cache
def standard_bases() -> ModelBases:
    return make_bases(LayerShape(2, 32, 32, torch.float32), [2, 1], rank=20)


@cache
def standard_case() -> Case:
    return make_case(standard_bases())
