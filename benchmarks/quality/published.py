"""Rows of other work: what each stores of a segment, written from its description, and the bits that takes.

Codes of work that codes them are counted at the length that an ideal coder needs for them, with tables
learned from text that is not scored. Tables and bases are not counted. Both favour these rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from benchmarks.quality.methods import Method, Stored, StoreTurn, Turn
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.pairs.vector_format import dequantize, quantize, scale_and_offset
from krul_backend.codec.rotary import RotaryTable

_SCALE_BITS = 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of 4-bit floats."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """``values`` fp32 and their ``codes`` below 256, both as the input was, ``[S, H, D]``; ``bits`` of a code
    that is not coded further, and ``scale_bits`` of all scales together."""

    values: Tensor
    codes: Tensor
    bits: float
    scale_bits: float


Quantize = Callable[[int, bool, Tensor], Quantized]
"""``(layer, is_key, x [S, H, D] fp32)``."""


def grouped(bits: int, group: int) -> Quantize:
    """Keys with a scale and an offset per channel of ``group`` tokens, values with those per token of so many
    channels: the layout of KIVI (Liu et al. 2024), whose groups are of 32."""

    def apply(layer: int, is_key: bool, x: Tensor) -> Quantized:
        dim = 0 if is_key else 2
        parts = torch.split(x, group, dim)
        found = [(part, *scale_and_offset(part, bits, dim)) for part in parts]
        codes = [quantize(part, scale, offset, bits) for part, scale, offset in found]
        values = [dequantize(code, *of_part[1:]) for code, of_part in zip(codes, found, strict=True)]
        num_scales = sum(2 * scale.numel() for _, scale, _ in found)
        return Quantized(torch.cat(values, dim), torch.cat(codes, dim), bits, _SCALE_BITS * num_scales)

    return apply


def nvfp4(layer: int, is_key: bool, x: Tensor) -> Quantized:
    """4-bit floats (E2M1) in blocks of 16 channels, each with a scale in E4M3, and one fp32 scale for all."""
    blocks = x.reshape(*x.shape[:2], -1, 16)
    largest = blocks.abs().amax(-1, keepdim=True)
    of_all = (largest.max() / (_E2M1[-1] * torch.finfo(torch.float8_e4m3fn).max)).clamp(min=1e-30)
    scales = (largest / (_E2M1[-1] * of_all)).to(torch.float8_e4m3fn).float() * of_all
    scaled = blocks / scales.clamp(min=1e-30)
    levels = torch.tensor(_E2M1, device=x.device)
    middles = (levels[1:] + levels[:-1]) / 2
    index = torch.bucketize(scaled.abs().contiguous(), middles)
    values = levels[index] * scaled.sign() * scales
    codes = index + len(_E2M1) * (scaled < 0)
    return Quantized(values.flatten(2), codes.to(torch.uint8).flatten(2), 4, 8 * scales.numel() + 32)


def cachegen(num_layers: int) -> Quantize:
    """Codes with one scale per token and layer over all channels, as LMCache ships CacheGen (Liu et al. 2024)
    for Llama-3.1-8B: 32 levels for keys of the first third of the layers and values of the first two, 16 for
    the others. They are then coded by tables per layer and channel."""

    def apply(layer: int, is_key: bool, x: Tensor) -> Quantized:
        num_fine = round(10 / 32 * num_layers) if is_key else 2
        bits = 5 if layer < num_fine else 4
        most = 2 ** (bits - 1) - 1
        scales = x.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
        codes = (x / scales * most).round_()
        values = codes / most * scales
        return Quantized(values, (codes + most).to(torch.uint8), bits, _SCALE_BITS * len(x))

    return apply


class CodeTables:
    """Bits of each code, by layer, kind and channel: from how often it occurs in text to learn from."""

    def __init__(self, apply: Quantize, histories: Sequence[Sequence[LayerKV]]) -> None:
        self._bits: dict[tuple[int, bool], Tensor] = {}
        for layer in range(len(histories[0])):
            for is_key in (True, False):
                found = [apply(layer, is_key, _of(kv[layer], is_key)).codes.flatten(1) for kv in histories]
                codes = torch.cat(found).long()
                counts = torch.full((codes.shape[1], int(codes.max()) + 2), 0.5)
                counts.scatter_add_(1, codes.T, torch.ones(codes.T.shape))
                self._bits[layer, is_key] = -(counts / counts.sum(1, keepdim=True)).log2()

    def num_bits(self, layer: int, is_key: bool, codes: Tensor) -> float:
        """Of all ``codes [S, H, D]``."""
        bits = self._bits[layer, is_key].to(codes.device)
        index = codes.flatten(1).T.long().clamp(max=bits.shape[1] - 1)
        return float(bits.gather(1, index).double().sum())


@dataclass(frozen=True)
class LayerByLayer(Method):
    """Quantizes each layer's keys and values, with rotary embedding; ``tables`` code what comes out of it.

    The first ``exact_first`` tokens of a conversation and its last ``exact_last`` stay as they are.
    """

    name: str
    family: str
    apply: Quantize = field(repr=False)
    exact_first: int = 0
    exact_last: int = 0
    tables: CodeTables | None = field(default=None, repr=False)

    def start(self) -> StoreTurn:
        return self._store

    def _store(self, turn: Turn) -> Stored:
        lossy, num_bytes = _split(turn, self.exact_first, self.exact_last)
        layers = []
        for layer, kv in enumerate(turn.segment):
            parts = []
            for is_key in (True, False):
                stored = (kv.k if is_key else kv.v).clone()
                if lossy.start < lossy.stop:
                    made = self.apply(layer, is_key, _of(kv, is_key)[lossy])
                    stored[lossy] = made.values.to(stored.dtype)
                    num_bytes += self._num_bits(layer, is_key, made) / 8
                parts.append(stored)
            layers.append(LayerKV(*parts))
        return Stored(tuple(layers), round(num_bytes))

    def _num_bits(self, layer: int, is_key: bool, made: Quantized) -> float:
        if self.tables is None:
            return made.bits * made.codes.numel() + made.scale_bits
        return self.tables.num_bits(layer, is_key, made.codes) + made.scale_bits


@dataclass(frozen=True, eq=False)
class Components:
    """Principal components of all layers' keys, or values: ``mean [C]``, ``basis [C, C]``, and of each
    component the standard ``deviation [C]``."""

    mean: Tensor
    basis: Tensor
    deviation: Tensor

    @classmethod
    def learn(cls, vectors: Tensor) -> Components:
        """From ``vectors [N, C]`` fp32."""
        mean = vectors.mean(0)
        covariance = torch.cov(vectors.T)
        variance, basis = torch.linalg.eigh(covariance)
        return cls(mean, basis, variance.clamp(min=0).sqrt())

    def quantize(self, x: Tensor, step: float) -> tuple[Tensor, float]:
        """``x [N, C]`` rounded to whole steps of each component, and the bits that takes: of an ideal coder
        that takes coefficients for Laplacian, with the learned deviations."""
        codes = ((x - self.mean) @ self.basis / step).round()
        # of a Laplacian's rounded value k: 1 - exp(-r) if it is 0, else exp(-2 r |k|) sinh(r)
        rate = (step / (2**0.5 * self.deviation.clamp(min=1e-3 * step))).double()
        magnitudes = codes.abs().double()
        of_zero = -torch.log2(-torch.expm1(-rate)).expand_as(codes)
        of_others = (2 * rate * magnitudes - torch.sinh(rate.clamp(max=300)).log()) / math.log(2)
        bits = torch.where(codes == 0, of_zero, of_others)
        return codes * step @ self.basis.T + self.mean, float(bits.sum())


@dataclass(frozen=True)
class AllLayers(Method):
    """Principal components over all layers, uniform steps, exact first tokens, as KVTC has them (Staniszewski
    and Lancucki 2025). Keys are taken without rotary embedding.

    ``step``: in parts of the mean standard deviation of a channel. One step for all components is what its
    search for bits per component comes to for a coder of any fraction of bits. KVTC keeps the last 128 tokens
    exact, too; of a thousand tokens these would take more bytes than all others.
    """

    name: str
    keys: Components = field(repr=False)
    values: Components = field(repr=False)
    rotary: RotaryTable = field(repr=False)
    step: float
    family: str = "all layers"
    exact_first: int = 4

    def start(self) -> StoreTurn:
        return self._store

    def _store(self, turn: Turn) -> Stored:
        lossy, num_bytes = _split(turn, self.exact_first, 0)
        if lossy.start >= lossy.stop:
            return Stored(turn.segment, round(num_bytes))
        positions = torch.arange(turn.start_token + lossy.start, turn.start_token + lossy.stop)
        segment = [LayerKV(kv.k[lossy], kv.v[lossy]) for kv in turn.segment]
        made = []
        for components, of_layers in (
            (self.keys, [self.rotary.unrotate(kv.k, positions) for kv in segment]),
            (self.values, [kv.v.float() for kv in segment]),
        ):
            step = self.step * float(components.deviation.square().mean().sqrt())
            values, num_bits = components.quantize(torch.cat([x.flatten(1) for x in of_layers], 1), step)
            num_bytes += num_bits / 8
            made.append(values.view(len(values), len(segment), *of_layers[0].shape[1:]).unbind(1))
        layers = []
        for kv, keys, of_values in zip(turn.segment, *made, strict=True):
            stored = LayerKV(kv.k.clone(), kv.v.clone())
            stored.k[lossy] = self.rotary.rotate(keys, positions).to(kv.k.dtype)
            stored.v[lossy] = of_values.to(kv.v.dtype)
            layers.append(stored)
        return Stored(tuple(layers), round(num_bytes))


def learn_components(
    histories: Sequence[Sequence[LayerKV]], rotary: RotaryTable
) -> tuple[Components, Components]:
    """Those of keys and of values."""
    keys, values = [], []
    for kv in histories:
        positions = torch.arange(len(kv[0].k))
        keys.append(torch.cat([rotary.unrotate(each.k, positions).flatten(1) for each in kv], 1))
        values.append(torch.cat([each.v.float().flatten(1) for each in kv], 1))
    return Components.learn(torch.cat(keys)), Components.learn(torch.cat(values))


COMPONENT_STEPS = (0.5, 1.0, 1.5)


def published_methods(
    num_layers: int,
    rotary: RotaryTable,
    learn: Callable[[], Sequence[Sequence[LayerKV]]],
    wanted: Callable[[str], bool],
) -> Iterator[Method]:
    """The rows whose names are ``wanted``. ``learn`` gives histories to learn tables and bases from; it is
    asked at most once, by rows that need them."""
    learned = cache(learn)
    for bits in (2, 4):
        if wanted(name := f"kivi{bits}"):
            yield LayerByLayer(name, "kivi", grouped(bits, 32), exact_last=128)
    if wanted("nvfp4"):
        yield LayerByLayer("nvfp4", "nvfp4", nvfp4)
    coded: dict[str, tuple[Quantize, int]] = {
        "int8 coded": (grouped(8, 64), 4),
        "int4 coded": (grouped(4, 64), 4),
        "cachegen": (cachegen(num_layers), 0),
    }
    for name, (apply, exact_first) in coded.items():
        if wanted(name):
            yield LayerByLayer(name, name, apply, exact_first, tables=CodeTables(apply, learned()))
    steps = {f"all-layers {step}": step for step in COMPONENT_STEPS}
    if any(map(wanted, steps)):
        keys, values = learn_components(learned(), rotary)
        for name, step in steps.items():
            if wanted(name):
                yield AllLayers(name, keys, values, rotary, step)


def _of(kv: LayerKV, is_key: bool) -> Tensor:
    return (kv.k if is_key else kv.v).float()


def _split(turn: Turn, exact_first: int, exact_last: int) -> tuple[slice, float]:
    """The turn's tokens that are not exact, and the bytes of those that are."""
    num_tokens = len(turn.segment[0].k)
    start = min(max(0, exact_first - turn.start_token), num_tokens)
    end = min(max(start, turn.history_tokens - exact_last - turn.start_token), num_tokens)
    token_bytes = sum(part[0].nbytes for kv in turn.segment for part in (kv.k, kv.v))
    return slice(start, end), float(token_bytes * (num_tokens - (end - start)))
