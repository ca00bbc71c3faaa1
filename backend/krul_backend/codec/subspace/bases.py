"""The bases of a model, the subspace that each group of consecutive layers is stored in; and their files.

Older bases are kept beside the current file: what was stored in them can be decoded on.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from krul_backend.atomic_file import replacing
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.device import Device
from krul_backend.errors import CodecError
from krul_backend.strategy import LayerGroups

_MOST_OLDER = 3
"""Files of older bases; the one that was written first goes."""

_DIGEST_CHARACTERS = 64


FORMAT = "krul-bases"
FORMAT_VERSION = 2

LEAST_ATTENTION = 1e-8
"""Attention below this counts as this much, since its logarithm is taken."""

SHIFT_SUMS = 128
"""The number of sums that a group's channels are added up in, to estimate what the errors that tokens have in
common cost. In one group that estimate is off by a tenth or so."""


@dataclass(frozen=True, eq=False)
class GroupBasis:
    """The transform of one group of layers. All tensors are fp32, on one device.

    A token's KV of the group is one vector ``[D]``: for each layer its keys without rotary embedding, then
    its values, heads one after the other. ``coefficients = (vector - mean) @ encoder``, and ``vector = mean
    + coefficients @ decoder``.

    The coefficients are in the metric of the model's output: an error ``e`` in the coefficients of a token
    that draws average attention is expected to cost ``|e|^2 / 2`` nats per predicted token. They are
    uncorrelated over the text that the basis was learned from, those with the largest variance first. Of
    the ``D`` coefficients the first ``R`` are kept, because leaving out the others costs next to nothing in
    that text. In another vector it costs ``|(vector - mean) @ outside|^2 / 2`` nats. If all tokens of a
    conversation are off by the same ``e [D]``, that is expected to cost ``e^2 @ shift_costs / 2`` nats.

    ``first_layer``, ``end_layer``: the layers ``[first, end)``. ``mean [D]``, ``encoder [D, R]``,
    ``decoder [R, D]``, ``outside [D, any]``, ``shift_costs [D]``. ``magnitudes [R]``: the mean of each
    coefficient's absolute value. ``attention_slopes``, ``attention_levels`` ``[layers, Hkv]`` and
    ``attention_means``: how a token's worth follows from the attention that it draws; see ``token_worth``.
    """

    first_layer: int
    end_layer: int
    mean: torch.Tensor
    encoder: torch.Tensor
    decoder: torch.Tensor
    outside: torch.Tensor
    shift_costs: torch.Tensor
    magnitudes: torch.Tensor
    attention_means: torch.Tensor
    attention_slopes: torch.Tensor
    attention_levels: torch.Tensor

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    @property
    def rank(self) -> int:
        """The number R of coefficients."""
        return self.encoder.shape[1]

    @property
    def deviations(self) -> torch.Tensor:
        """``[R]``: of normal numbers with these mean magnitudes, about which coefficients are as wide."""
        return self.magnitudes * math.sqrt(math.pi / 2)

    @cached_property
    def scatter_costs(self) -> torch.Tensor:
        """``[R]``: ``e^2`` times this is ``shift_costs`` of an error ``e`` in one coefficient alone."""
        return self.decoder.square() @ self.shift_costs

    @cached_property
    def shift_weights(self) -> torch.Tensor:
        """``[D]``: the root of each channel's shift cost, with a random sign."""
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, self.shift_costs.shape, generator=generator).to(self.shift_costs) * 2 - 1
        return self.shift_costs.sqrt() * signs

    @cached_property
    def shift_places(self) -> torch.Tensor:
        """``[D]``: the sum that each channel belongs to. Those that cost most are in different ones."""
        return self.shift_costs.argsort(descending=True).argsort() % SHIFT_SUMS

    def shift_sums(self, vectors: torch.Tensor) -> torch.Tensor:
        """Add up channels of ``vectors [n, D]`` with random signs, so that the squares of the sums ``[n,
        128]`` add up to about ``vectors^2 @ shift_costs``. Sums are many times faster to work with."""
        sums = vectors.new_zeros(len(vectors), SHIFT_SUMS)
        return sums.index_add_(1, self.shift_places, vectors * self.shift_weights)

    def token_worth(self, attention: torch.Tensor) -> torch.Tensor:
        """Estimate what errors in each token's KV cost, relative to the average token: fp32 ``[T]``.

        A worth of 2 says that the same error is expected to cost twice as much as in an average token.
        ``attention [layers of the group, Hkv, T]``: the mean share of its attention that a query spends on
        the token, summed over the query heads of the KV head. The worth is ``sum(levels * (attention /
        means) ** slopes)`` over layers and heads.
        """
        lines = (self.attention_means, self.attention_slopes, self.attention_levels)
        return _worth_of_heads(attention, *lines).sum(dim=(0, 1))


def _worth_of_heads(
    attention: torch.Tensor, means: torch.Tensor, slopes: torch.Tensor, levels: torch.Tensor
) -> torch.Tensor:
    relative = attention.clamp_min(LEAST_ATTENTION).log() - means[..., None]
    return (relative * slopes[..., None]).exp() * levels[..., None]


_TENSORS = tuple(field.name for field in fields(GroupBasis) if field.name not in ("first_layer", "end_layer"))
"""In this order they are in the digest."""


@dataclass(frozen=True, eq=False)
class ModelBases:
    """The bases of all groups of one model on one rank, in the order of their layers. They never change.

    ``damage_factor``: the true cost of errors of the tokens' own divided by what the metric expects, measured
    on text that the bases were not learned from.

    Raises:
        CodecError: groups that do not follow each other from layer 0 on, or tensors of other shapes.
    """

    shape: LayerShape
    groups: tuple[GroupBasis, ...]
    damage_factor: float = 1.0

    def __post_init__(self) -> None:
        expected_first = 0
        for group in self.groups:
            if group.first_layer != expected_first or group.end_layer <= group.first_layer:
                raise CodecError(f"a group begins at layer {group.first_layer}, not at {expected_first}")
            expected_first = group.end_layer
            _check_shapes(group, self.shape)
        if not self.groups:
            raise CodecError("bases of a model have at least one group")
        if not 0 < self.damage_factor < math.inf:
            raise CodecError(f"a damage factor of {self.damage_factor} is no positive number")

    @property
    def num_layers(self) -> int:
        return self.groups[-1].end_layer

    @cached_property
    def looks_at_attention(self) -> bool:
        """Whether tokens are weighed by the attention that they draw. Bases of latent KV, which are learned
        without attention, weigh all alike."""
        return any(bool(group.attention_slopes.any()) for group in self.groups)

    @cached_property
    def _attention_lines(self) -> tuple[torch.Tensor, ...]:
        names = ("attention_means", "attention_slopes", "attention_levels")
        return tuple(torch.cat([getattr(group, name) for group in self.groups]) for name in names)

    def token_worth(self, attention: torch.Tensor) -> torch.Tensor:
        """``GroupBasis.token_worth`` of each group, ``attention [L, Hkv, T]``: fp32 ``[groups, T]``."""
        of_layers = _worth_of_heads(attention, *self._attention_lines).sum(1)
        worth = of_layers.new_zeros(len(self.groups), of_layers.shape[1])
        return worth.index_add_(0, self._group_of_layers, of_layers)

    @cached_property
    def _group_of_layers(self) -> torch.Tensor:
        numbers = [number for number, group in enumerate(self.groups) for _ in group.layers]
        return Device.of(self.groups[0].mean).from_list(numbers)

    @property
    def layer_groups(self) -> LayerGroups:
        """The groups of layers."""
        return LayerGroups(tuple(group.end_layer for group in self.groups))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decoding depends on, but the pool's element type: equal digests decode
        each other's blocks for pools of one type."""
        # The same for every type.
        header = {**self._header(), "dtype": "bfloat16"}
        digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        for group in self.groups:
            for name in _TENSORS:
                digest.update(getattr(group, name).cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def working_bytes(self) -> int:
        """About the memory that they take where they are used: as they are, and once more in bf16."""
        as_they_are: int = sum(getattr(group, name).nbytes for group in self.groups for name in _TENSORS)
        return as_they_are * 3 // 2

    def to(self, device: torch.device) -> ModelBases:
        """The same bases on another device."""
        groups = (
            GroupBasis(
                group.first_layer,
                group.end_layer,
                **{name: getattr(group, name).to(device) for name in _TENSORS},
            )
            for group in self.groups
        )
        return ModelBases(self.shape, tuple(groups), self.damage_factor)

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        tensors = {
            f"{index}.{name}": getattr(group, name).cpu().contiguous()
            for index, group in enumerate(self.groups)
            for name in _TENSORS
        }
        metadata = {"krul": json.dumps({**self._header(), "digest": self.digest})}
        with replacing(path) as file:
            file.write(safetensors.torch.save(tensors, metadata))

    @classmethod
    def load(cls, path: Path) -> ModelBases:
        """Read what ``save`` wrote, onto the CPU.

        Raises:
            CodecError: no such file, not a file of bases, one of another version, or a damaged one.
        """
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("krul", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise CodecError(f"no bases in {path}: {error}") from error
        try:
            bases = cls._from_parts(path, header, tensors)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CodecError(f"{path} is no file of bases, or a damaged one: {error!r}") from error
        if bases.digest != header.get("digest"):
            raise CodecError(f"the bases in {path} are damaged: their digest is another one")
        return bases

    @classmethod
    def _from_parts(
        cls, path: Path, header: dict[str, object], tensors: dict[str, torch.Tensor]
    ) -> ModelBases:
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}")
        if header["version"] != FORMAT_VERSION:
            raise CodecError(
                f"the bases in {path} have version {header['version']!r:.80}, and this program reads version "
                f"{FORMAT_VERSION}: learn them again"
            )
        heads, k_dim, v_dim = (int(str(size)) for size in (header["heads"], header["k_dim"], header["v_dim"]))
        shape = LayerShape(heads, k_dim, v_dim, getattr(torch, str(header["dtype"])))
        ends = [0, *(int(end) for end in header["group_ends"])]  # type: ignore[attr-defined]
        groups = (
            GroupBasis(first, end, **{name: tensors[f"{index}.{name}"] for name in _TENSORS})
            for index, (first, end) in enumerate(pairwise(ends))
        )
        return cls(shape, tuple(groups), float(str(header["damage_factor"])))

    def _header(self) -> dict[str, object]:
        shape = self.shape
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "heads": shape.num_kv_heads,
            "k_dim": shape.k_head_dim,
            "v_dim": shape.v_head_dim,
            "dtype": str(shape.dtype).removeprefix("torch."),
            "group_ends": [group.end_layer for group in self.groups],
            "damage_factor": self.damage_factor,
        }


def _check_shapes(group: GroupBasis, shape: LayerShape) -> None:
    dim = len(group.layers) * vector_size(shape)
    rank = group.rank
    expected = {
        "mean": (dim,),
        "encoder": (dim, rank),
        "decoder": (rank, dim),
        "outside": (dim, group.outside.shape[-1]),
        "shift_costs": (dim,),
        "magnitudes": (rank,),
        "attention_means": (len(group.layers), shape.num_kv_heads),
        "attention_slopes": (len(group.layers), shape.num_kv_heads),
        "attention_levels": (len(group.layers), shape.num_kv_heads),
    }
    for name, expected_shape in expected.items():
        tensor = getattr(group, name)
        if tensor.shape != expected_shape or tensor.dtype is not torch.float32:
            raise CodecError(
                f"{name} of layers {group.first_layer} to {group.end_layer - 1} is {tensor.dtype} "
                f"{tuple(tensor.shape)}, not float32 {expected_shape}"
            )


def vector_size(shape: LayerShape) -> int:
    """Elements of one token's keys and values in one layer."""
    return shape.num_kv_heads * (shape.k_head_dim + shape.v_head_dim)


def group_vectors(layers: Sequence[LayerKV]) -> torch.Tensor:
    """One vector per token of a group: fp32 ``[T, D]``. ``layers``: keys without rotary embedding."""
    parts = [part.flatten(1).float() for kv in layers for part in (kv.k, kv.v)]
    return torch.cat(parts, dim=1)


def split_vectors(vectors: torch.Tensor, shape: LayerShape, num_layers: int) -> list[LayerKV]:
    """Inverse of ``group_vectors``: views ``[T, Hkv, head_dim]`` of ``vectors [T, D]``, layer by layer."""
    k_size, v_size = (shape.num_kv_heads * dim for dim in (shape.k_head_dim, shape.v_head_dim))
    parts = torch.split(vectors, [k_size, v_size] * num_layers, dim=1)
    return [
        LayerKV(
            k.reshape(len(k), shape.num_kv_heads, shape.k_head_dim),
            v.reshape(len(v), shape.num_kv_heads, shape.v_head_dim),
        )
        for k, v in zip(parts[::2], parts[1::2], strict=True)
    ]


def older_path(path: Path, digest: str) -> Path:
    """Return where bases of this digest are kept after newer ones have taken their place in ``path``."""
    return path.with_name(f"{path.stem}-{digest}{path.suffix}")


def write_older(path: Path, digest: str, content: bytes) -> Path:
    """Keep the bytes of a file of bases beside the current one, ``path``. Returns where.

    Raises:
        OSError: it cannot be written.
    """
    older = older_path(path, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(older) as file:
        file.write(content)
    pattern = older_path(path, "[0-9a-f]" * _DIGEST_CHARACTERS).name
    kept = sorted(path.parent.glob(pattern), key=lambda each: each.stat().st_mtime_ns)
    for surplus in kept[:-_MOST_OLDER]:
        surplus.unlink(missing_ok=True)
    return older


def replace_bases(path: Path, bases: ModelBases) -> None:
    """Write ``bases`` to the current file, ``path``; those that were there become older ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        before = ModelBases.load(path).digest
    except CodecError:
        # There were none, or damaged ones.
        before = bases.digest
    if before != bases.digest:
        write_older(path, before, path.read_bytes())
    bases.save(path)
