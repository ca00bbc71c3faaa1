"""Predicts one layer's keys and values from another layer's of the same tokens."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from krul_backend.atomic_file import replacing
from krul_backend.codec.interface import LayerKV, LayerShape
from krul_backend.codec.rotary import RotaryTable
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import Pair, Precision

_NOISE_SHARE = {
    Precision.NATIVE: 1e-6,
    Precision.INT8: 3e-5,
    Precision.INT4: 8e-3,
    Precision.INT2: 0.2,
    Precision.INT0: 0.9,
}
"""Variance of the coding error over that of the element: ``(4.7 / (2^bits - 1))^2 / 12`` for codes over the
range of 64 normally distributed numbers, which is 4.7 standard deviations on average."""

_SMALLEST_SHARE = 1e-6


@dataclass(frozen=True, eq=False)
class LayerMap:
    """A linear map between two layers: ``target = source @ weight + bias``, all heads of K and V together.

    A token's vector has ``C = num_kv_heads * (k_head_dim + v_head_dim)`` elements: the keys of all heads,
    without rotary embedding where it can be taken off, then the values. ``weight [C, C]`` and ``bias [C]``
    are fp32.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    @cached_property
    def digest(self) -> str:
        """Identifies these numbers: what was encoded with a map can be decoded only with the same one."""
        numbers = torch.cat([self.weight.flatten(), self.bias]).cpu().numpy().astype("<f4").tobytes()
        return hashlib.sha256(numbers).hexdigest()[:32]

    def predict(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict the target layer's ``k [..., H, Dk]`` and ``v [..., H, Dv]`` from the source's, fp32."""
        weight, bias = self.weight.to(k.device), self.bias.to(k.device)
        source = torch.cat([k.flatten(-2), v.flatten(-2)], dim=-1)
        target = source @ weight + bias
        k_width = k.shape[-2] * k.shape[-1]
        return target[..., :k_width].reshape(k.shape), target[..., k_width:].reshape(v.shape)


class LayerMapFitter:
    """Fits the map of one pair of layers by ridge regression, from running sums over tokens.

    Costs ``2 C^2`` float64 numbers of memory and as many multiplications per token.
    """

    def __init__(self, shape: LayerShape, rotary: RotaryTable | None) -> None:
        self._rotary = rotary
        width = shape.num_kv_heads * (shape.k_head_dim + shape.v_head_dim)
        self._gram = torch.zeros(width + 1, width + 1, dtype=torch.float64)
        self._cross = torch.zeros(width + 1, width, dtype=torch.float64)

    @property
    def num_tokens(self) -> int:
        """Tokens seen so far."""
        return int(self._gram[-1, -1])

    def add(self, source: LayerKV, target: LayerKV, *, start_token: int) -> None:
        """Add the KV of both layers, tokens ``[start_token, start_token + T)`` of a conversation."""
        x, y = self._vectors(source, start_token), self._vectors(target, start_token)
        x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype, device=x.device)], dim=1)
        # Products in fp32, sums in float64: T tokens at a time lose nothing that the fit could see.
        # Both or none: an error leaves the sums as they were.
        gram, cross = (x.t() @ x).cpu(), (x.t() @ y).cpu()
        self._gram += gram
        self._cross += cross

    def fit(self, precision: Precision) -> LayerMap:
        """The map with the least squared error for a source layer that is stored at ``precision``.

        Noise of the source that is independent of it adds its variance to the diagonal of the regression's
        matrix (errors in variables); without that, maps multiply the noise of coarse codes.

        Raises:
            ValueError: no tokens were added.
        """
        if self.num_tokens == 0:
            raise ValueError("a map cannot be fitted to no tokens")
        means = self._gram[-1, :-1] / self.num_tokens
        y_means = self._cross[-1] / self.num_tokens
        # Sums of products of centred vectors.
        gram = self._gram[:-1, :-1] - self.num_tokens * means.outer(means)
        cross = self._cross[:-1] - self.num_tokens * means.outer(y_means)
        variances = gram.diagonal()
        noise = _NOISE_SHARE[precision] * variances
        # Elements that depend on each other, or never change, leave the matrix singular.
        ridge = noise + _SMALLEST_SHARE * variances.mean() + torch.finfo(torch.float64).tiny
        weight = torch.linalg.solve(gram + torch.diag(ridge), cross)
        # Half precision is enough for a prediction, and is what a map takes on disk.
        weight = weight.half().double()
        return LayerMap(weight.float(), (y_means - means @ weight).float())

    def _vectors(self, kv: LayerKV, start_token: int) -> torch.Tensor:
        """fp32 ``[T, C]``."""
        k = kv.k.float()
        if self._rotary is not None:
            k = self._rotary.unrotate(k, torch.arange(start_token, start_token + len(k), device=k.device))
        return torch.cat([k.flatten(1), kv.v.float().flatten(1)], dim=1)


LayerMaps = Mapping[tuple[Pair, Precision], LayerMap]
"""Maps of a model's pairs ``(i, j)``, from the lower layer ``i`` at a precision to ``j``; of one rank."""


def save_layer_maps(path: Path, maps: LayerMaps) -> None:
    """Write ``maps`` to ``path``, replaced as a whole."""
    arrays = {}
    for ((i, j), precision), layer_map in maps.items():
        arrays[f"weight_{i}_{j}_{precision.value}"] = layer_map.weight.cpu().half().numpy()
        arrays[f"bias_{i}_{j}_{precision.value}"] = layer_map.bias.cpu().numpy()
    with replacing(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def load_layer_maps(path: Path) -> dict[tuple[Pair, Precision], LayerMap]:
    """What ``save_layer_maps`` wrote, with the same digests.

    Raises:
        CodecError: the file holds anything else.
        OSError: it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            maps = {}
            for name in arrays.files:
                kind, i, j, precision = name.split("_")
                if kind == "weight":
                    weight = torch.from_numpy(arrays[name]).float()
                    bias = torch.from_numpy(arrays[f"bias_{i}_{j}_{precision}"])
                    maps[(int(i), int(j)), Precision(precision)] = LayerMap(weight, bias)
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise CodecError(f"{path} holds no layer maps: {error}") from error
    return maps
