"""What a group of layers must be in the pool after it was decoded there: the sums of its basis, in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import split_vectors
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.coded_tail import CodedTail
from krul_backend.codec.subspace.decoder import SubspaceDecoder
from krul_backend.codec.subspace.quantizer import SHRINK
from krul_backend.codec.subspace.restore import GroupRestore, GroupTarget, check_written
from krul_backend.device import Device
from tests.support.codec_builders import rotary_table
from tests.support.subspace_builders import make_bases, make_layers

Begin = Callable[[Sequence[Sequence[GroupTarget]], Device], Sequence[GroupRestore]]
"""As ``begin_groups``."""

TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 2**-7,
    torch.bfloat16: 2**-6,
    torch.float8_e4m3fn: 2**-4 + 2**-6,
    torch.float8_e5m2: 2**-3 + 2**-6,
}
"""Of the largest element: sums in another order, coefficients in bf16, and rounding to the pool's type.
Triton's interpreter cuts bits off where a GPU rounds: 2**-7 of a coefficient, and as much of an element in
bf16. A GPU is off by half of this."""


@dataclass(frozen=True)
class GroupCase:
    """A segment of one group of two layers, and tokens ``[first_token, end_token)`` of it; all by default.

    Layers before the last one are wanted from ``head_tokens`` later on. ``rotary_dim`` 0: keys are not
    rotated.
    """

    shape: LayerShape
    rank: int = 20
    decay: float = 0.85
    rotary_dim: int = 0
    is_neox: bool = True
    start_token: int = 0
    num_tokens: int = 90
    num_first_tokens: int = 1
    first_token: int = 0
    end_token: int | None = None
    head_tokens: int = 0
    max_damage: float = 0.05


def check_group(case: GroupCase, begin: Begin, device: Device, num_layers: int = 2) -> None:
    check_groups([case], begin, device, num_layers)


def check_groups(cases: Sequence[GroupCase], begin: Begin, device: Device, num_layers: int = 2) -> None:
    """Decode and write a group of random KV of several segments into random slots; compare all slots of all
    layers. The cases have the same bases."""
    check_wave([cases], begin, device, num_layers)


def check_wave(
    groups: Sequence[Sequence[GroupCase]], begin: Begin, device: Device, num_layers: int = 2
) -> None:
    """The same of several groups, each with bases and slots of its own, which are decoded together."""
    prepared = [PreparedGroup(cases, device, num_layers) for cases in groups]
    begun = begin([each.targets for each in prepared], device)
    for each, group in zip(prepared, begun, strict=True):
        group.write(each.buffers)
    check_written(begun)
    for each, group in zip(prepared, begun, strict=True):
        each.check(type(group) is GroupRestore)


class PreparedGroup:
    """Tails of one group, where they go, and what must be there then."""

    def __init__(self, cases: Sequence[GroupCase], device: Device, num_layers: int) -> None:
        shape = cases[0].shape
        self._cases = cases
        self._encoded = [encode_case(case, device, num_layers) for case in cases]
        ends = [case.num_tokens if case.end_token is None else case.end_token for case in cases]
        sizes = [end - case.first_token for case, end in zip(cases, ends, strict=True)]
        self._num_slots = sum(sizes) + 9
        generator = torch.Generator().manual_seed(self._num_slots)
        order = torch.randperm(self._num_slots, generator=generator)
        self._slots = torch.split(order, [*sizes, 9])[:-1]
        k_size, v_size = (
            (self._num_slots, shape.num_kv_heads, dim) for dim in (shape.k_head_dim, shape.v_head_dim)
        )
        self.buffers = [
            tuple(torch.full(size, 7.0).to(device.torch_device, shape.dtype) for size in (k_size, v_size))
            for _ in range(num_layers)
        ]
        self.targets, self._expected = [], []
        for case, (decoder, block, _), end, of_case in zip(
            cases, self._encoded, ends, self._slots, strict=True
        ):
            tail_bytes = block[decoder.tail_start(0, case.first_token) :].cpu()
            host = device.host_empty(tail_bytes.shape, torch.uint8).copy_(tail_bytes)
            firsts = [min(end, case.first_token + case.head_tokens)] * (num_layers - 1) + [case.first_token]
            tail = decoder.tail(0, host, case.first_token, end)
            self.targets.append(GroupTarget(tail, firsts, of_case.to(device.torch_device)))
            self._expected.append(exact_rows(decoder.tail(0, tail_bytes, case.first_token, case.num_tokens)))

    def check(self, is_on_host: bool) -> None:
        """Compare all slots of all layers."""
        # On the host small coefficients are multiplied in bf16 in every pool.
        dtype = self._cases[0].shape.dtype
        tolerance = 2**-7 if is_on_host and dtype.itemsize > 1 else TOLERANCE[dtype]
        for layer, of_layer in enumerate(self.buffers):
            is_untouched = torch.ones(self._num_slots, dtype=torch.bool)
            for case, target, rows, (_, _, layers), of_case in zip(
                self._cases, self.targets, self._expected, self._encoded, self._slots, strict=True
            ):
                written = of_case[target.first_tokens[layer] - case.first_token :]
                is_untouched[written] = False
                _check_rows(target, layer, of_layer, written, rows[layer], layers[layer], tolerance)
            for buffer in of_layer:
                assert bool((buffer.cpu().float()[is_untouched] == 7).all())


def _check_rows(
    target: GroupTarget,
    layer: int,
    buffers: tuple[torch.Tensor, torch.Tensor],
    written: torch.Tensor,
    expected: LayerKV,
    encoded: LayerKV,
    tolerance: float,
) -> None:
    """Compare the slots ``written`` of a tail with the rows ``expected`` of it, and its first tokens with
    those of the segment that was ``encoded``."""
    tail, first = target.tail, target.first_tokens[layer]
    encoded_parts = encoded.k.double(), encoded.v.double()
    for buffer, rows, true in zip(buffers, (expected.k, expected.v), encoded_parts, strict=True):
        found, wanted = (
            buffer.cpu().double()[written],
            rows[first - tail.first_token : tail.end_token - tail.first_token],
        )
        # Tokens that are stored as in the pool are there to the bit.
        num_stored = max(0, tail.segment.num_first_tokens - first)
        assert torch.equal(found[:num_stored], true[first : tail.end_token][:num_stored])
        torch.testing.assert_close(
            found[num_stored:],
            wanted[num_stored:],
            rtol=0,
            # Of the whole segment: a tail may have few numbers, all of them small.
            atol=float(true.abs().max()) * tolerance,
        )


def encode_case(
    case: GroupCase, device: Device, num_layers: int = 2
) -> tuple[SubspaceDecoder, torch.Tensor, Sequence[LayerKV]]:
    """The decoder of a case, on ``device``, the group's whole block and the KV that it was encoded from."""
    bases = make_bases(case.shape.of_numbers, [num_layers], rank=case.rank, decay=case.decay)
    rotary = rotary_table(case.rotary_dim, 32_768, case.is_neox) if case.rotary_dim > 0 else None
    layers = make_layers(bases, case.num_tokens, rotary, start_token=case.start_token)
    codec = SubspaceCodec(bases.to(device.torch_device), rotary, num_first_tokens=case.num_first_tokens)
    layers = [LayerKV(kv.k.to(case.shape.dtype), kv.v.to(case.shape.dtype)) for kv in layers]
    of_pool = [LayerKV(kv.k.to(device.torch_device), kv.v.to(device.torch_device)) for kv in layers]
    encoded = codec.encode(
        of_pool.__getitem__,
        start_token=case.start_token,
        num_tokens=case.num_tokens,
        attention=_attention(case, num_layers),
        max_damage=case.max_damage,
    )
    decoder = codec.open(encoded.params, start_token=case.start_token, num_tokens=case.num_tokens)
    return decoder, encoded.blocks[0], layers


def encode_drawn(
    codec: SubspaceCodec, num_tokens: int, device: Device, max_damage: float = 0.01
) -> tuple[SubspaceDecoder, torch.Tensor]:
    """The decoder and the page-locked block of random KV in the first group of a codec's bases."""
    layers = codec.draw(num_tokens)
    encoded = codec.encode(
        layers.__getitem__, start_token=0, num_tokens=num_tokens, attention=None, max_damage=max_damage
    )
    block = device.host_empty(encoded.blocks[0].shape, torch.uint8).copy_(encoded.blocks[0])
    return codec.open(encoded.params, start_token=0, num_tokens=num_tokens), block


def exact_rows(tail: CodedTail) -> list[LayerKV]:
    """The KV of the tokens of a tail from its first one on, in fp64 on the host. Its block is on the host."""
    first_row = tail.first_token - 64 * tail.first_record
    basis, rotary = tail.transform.basis, tail.transform.rotary
    vectors = basis.mean.cpu().double() + tail.step * (
        exact_values(tail).double()[first_row:] @ basis.decoder.cpu().double()
    )
    rows = split_vectors(vectors, tail.transform.shape, len(basis.layers))
    if rotary is None:
        return rows
    first = tail.segment.start_token + tail.first_token
    return [LayerKV(_rotated(kv.k, rotary, first), kv.v) for kv in rows]


def exact_values(tail: CodedTail) -> torch.Tensor:
    """The coefficients of all tokens of a tail's records, in steps: fp32 ``[T, R]``."""
    num_tokens = tail.segment.num_tokens - 64 * tail.first_record
    values = np.empty((num_tokens, len(tail.scales)), np.float32)
    records = tail.block[tail.num_raw_bytes :].numpy()
    tail.coder.decode(records, tail.record_num_bytes, tail.scales, values, shrink=SHRINK)
    return torch.from_numpy(values)


def _rotated(keys: torch.Tensor, rotary: RotaryTable, first: int) -> torch.Tensor:
    """Keys fp64 ``[T, H, D]`` with their rotary embedding, from position ``first`` on."""
    cos, sin = (table[first : first + len(keys)].double()[:, None] for table in (rotary.cos, rotary.sin))
    half = rotary.rotary_dim // 2
    one, other = (
        (slice(half), slice(half, 2 * half))
        if rotary.is_neox
        else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    turned = keys.clone()
    turned[..., one] = keys[..., one] * cos - keys[..., other] * sin
    turned[..., other] = keys[..., other] * cos + keys[..., one] * sin
    return turned


def _attention(case: GroupCase, num_layers: int) -> torch.Tensor:
    """What tokens draw: very different, so that their steps are."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand(num_layers, case.shape.num_kv_heads, case.num_tokens, generator=generator)
    return 0.1 * drawn**8
