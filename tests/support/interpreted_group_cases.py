"""The kernels for groups of layers in triton's interpreter, on the CPU.

Not collected by itself: ``test_group_restore`` runs it in a process of its own, because triton decides when
it is imported whether it interprets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

from krul_backend.codec.coefficients.coders import EncodedLevels, RansCoder
from krul_backend.codec.layout import LayerShape
from krul_backend.codec.subspace.coded_tail import CodedTail, GroupTransform, KeptMemory, SegmentTokens
from krul_backend.codec.subspace.restore import GroupRestore, GroupTarget, begin_groups, check_written
from krul_backend.codec.subspace.triton_group_restore import TritonGroupRestore, begin_wave
from krul_backend.device import Device
from krul_backend.errors import CodecError
from tests.support.group_restore_cases import (
    TOLERANCE,
    GroupCase,
    PreparedGroup,
    check_group,
    check_groups,
    check_wave,
    encode_case,
    exact_values,
)
from tests.support.present import present

NUM_EXAMPLES = int(os.environ.get("DAMAGED_EXAMPLES", "5"))
"""Of damaged records: each takes a second."""

FP32 = LayerShape(2, 16, 8, torch.float32)
BF16 = replace(FP32, dtype=torch.bfloat16)


class InterpretedDevice(Device):
    """A CPU that claims to run kernels: the interpreter does."""

    runs_triton = True


CPU = InterpretedDevice(torch.device("cpu"))


@pytest.fixture(autouse=True, scope="module")
def products_of_bf16() -> Iterator[None]:
    """Multiplies bf16 as what it means: the interpreter of triton 3.8 takes its bits for whole numbers."""
    create_dot = InterpreterBuilder.create_dot

    def as_fp32(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = _convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return TensorHandle(data.reshape(handle.data.shape), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, as_fp32(a), as_fp32(b), *rest)

    InterpreterBuilder.create_dot = dot
    yield
    InterpreterBuilder.create_dot = create_dot


# ---- the coder ----


def coded_tail(data: np.ndarray, sizes: np.ndarray, scales: np.ndarray, num_tokens: int) -> CodedTail:
    """A tail of records alone: the basis is not needed for its coefficients."""
    unused = cast(Any, None)
    transform = GroupTransform(unused, unused, unused, None, FP32, KeptMemory())
    segment = SegmentTokens(0, num_tokens, 0)
    block = torch.from_numpy(data)
    return CodedTail(0, num_tokens, block, 0, sizes, scales, 1.0, RansCoder(), transform, segment)


def encoded_levels(
    num_tokens: int, num_coefficients: int, seed: int, spread: float
) -> tuple[EncodedLevels, np.ndarray]:
    """Levels whose spread may be far from what their scales say, so that many are escaped."""
    generator = np.random.default_rng(seed)
    scales = generator.integers(0, 48, num_coefficients).astype(np.uint8)
    levels = generator.laplace(size=(num_tokens, num_coefficients)) * np.exp2((scales - 21.0) / 4) * spread
    levels = np.clip(np.rint(levels), -32768, 32767).astype(np.int16)
    levels[:, scales == 0] = 0
    shifts = generator.integers(-8, 8, num_tokens).astype(np.int8)
    return RansCoder().encode(levels, scales, shifts), scales


def decoded(*tails: CodedTail) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The values fp32 ``[T, coded]`` that the kernel wrote of each tail, and which records are damaged."""
    targets = [GroupTarget(tail, [tail.first_token], torch.arange(tail.num_tokens)) for tail in tails]
    (begun,) = begin_wave([targets], CPU)
    on_device = present(begun.on_device)
    values = []
    for table in on_device.of_tails:
        num_records = -(-int(table["num_rows"]) // 64)
        parts = []
        for room, first, num_values in (
            (on_device.exact, table["exact_at"], table["num_exact"]),
            (on_device.rest, table["rest_at"], table["num_coded"] - table["num_exact"]),
        ):
            of_tail = room[64 * int(first) :][: num_records * int(num_values) * 64]
            parts.append(of_tail.view(num_records, int(num_values), 64).float())
        of_tokens = torch.cat(parts, dim=1).transpose(1, 2).reshape(num_records * 64, -1)
        values.append(of_tokens[: int(table["num_rows"])])
    return values, on_device.damaged != 0


@pytest.mark.parametrize("num_tokens", [1, 7, 15, 16, 17, 63, 64, 65, 100])
@pytest.mark.parametrize("spread", [0.5, 20.0])
def test_values_are_those_of_the_coder_to_the_bit(num_tokens: int, spread: float) -> None:
    encoded, scales = encoded_levels(num_tokens, 9, num_tokens, spread)
    tail = coded_tail(encoded.data, encoded.record_num_bytes, scales, num_tokens)
    (values,), damaged = decoded(tail)
    assert torch.equal(values, exact_values(tail)[:, torch.from_numpy(scales) != 0])
    assert not bool(damaged.any())


def test_of_a_tail_no_more_than_what_is_wanted_is_decoded() -> None:
    encoded, scales = encoded_levels(200, 4, 0, 1.0)
    tail = coded_tail(encoded.data, encoded.record_num_bytes, scales, 200)
    (values,), damaged = decoded(replace(tail, end_token=100))
    assert len(damaged) == 2
    assert torch.equal(values, exact_values(tail)[:100, torch.from_numpy(scales) != 0])


@settings(max_examples=NUM_EXAMPLES, deadline=None, database=None, derandomize=True)
@given(seed=st.integers(0, 1000), kind=st.sampled_from(["flip", "random", "cut", "moved"]))
def test_damage_is_what_the_coder_calls_damage(seed: int, kind: str) -> None:
    """Whatever lies around the records: nothing else is read."""
    generator = np.random.default_rng(seed)
    num_tokens = int(generator.integers(65, 129))
    encoded, scales = encoded_levels(num_tokens, 5, seed, 2.0)
    data, sizes = encoded.data.copy(), encoded.record_num_bytes.copy()
    if kind == "flip":
        data[generator.integers(len(data))] ^= np.uint8(1 << generator.integers(8))
    elif kind == "random":
        data = generator.integers(0, 256, len(data), np.uint8)
    elif kind == "cut":
        data, sizes[1] = data[:-4], sizes[1] - 4
    else:
        sizes += np.array([4, -4], np.int64).astype(np.uint32)
    ends = np.cumsum(sizes, dtype=np.int64)
    found = []
    for filling in (0x00, 0xFF, 0x81):
        around = np.full(len(data) + 2048, filling, np.uint8)
        around[1024:-1024] = data
        tail = replace(coded_tail(around, sizes, scales, num_tokens), num_raw_bytes=1024)
        found.append(decoded(tail))
    for (values,), damaged in found:
        assert torch.equal(damaged, found[0][1])
        for record, is_damaged in enumerate(damaged.tolist()):
            rows = slice(64 * record, min(num_tokens, 64 * record + 64))
            out = np.empty((rows.stop - rows.start, len(scales)), np.float32)
            alone = data[ends[record] - sizes[record] : ends[record]]
            try:
                RansCoder().decode(alone, sizes[record : record + 1], scales, out, shrink=0.04)
            except CodecError:
                assert is_damaged
                continue
            assert not is_damaged
            assert torch.equal(values[rows], torch.from_numpy(out[:, scales != 0]))


def test_tails_are_decoded_together() -> None:
    """Each has scales of its own, and records where the ones before it end."""
    tails = []
    for seed, num_tokens in enumerate((70, 1, 200, 64)):
        encoded, scales = encoded_levels(num_tokens, 3 + seed, seed, 1.0)
        tails.append(coded_tail(encoded.data, encoded.record_num_bytes, scales, num_tokens))
    values, damaged = decoded(*tails)
    assert len(damaged) == 2 + 1 + 4 + 1
    assert not bool(damaged.any())
    for tail, of_tail in zip(tails, values, strict=True):
        assert torch.equal(of_tail, exact_values(tail)[:, torch.from_numpy(tail.scales) != 0])


@pytest.mark.parametrize("before", [[], [70, 1]])
def test_damage_is_an_error_when_it_is_asked_for(before: list[int]) -> None:
    """Whichever tails were decoded before."""
    targets = []
    for num_tokens in before:
        decoder, block, _ = encode_case(GroupCase(FP32, num_tokens=num_tokens), CPU)
        tail = decoder.tail(0, block, 0, num_tokens)
        targets.append(GroupTarget(tail, [0, 0], torch.arange(70, 70 + num_tokens)))
    decoder, block, _ = encode_case(GroupCase(FP32, num_tokens=140), CPU)
    damaged = block[decoder.tail_start(0, 70) :].clone()
    damaged[decoder.tail_start(0, 128) - decoder.tail_start(0, 70) + 9] ^= 4
    targets.append(GroupTarget(decoder.tail(0, damaged, 70, 140), [70, 70], torch.arange(70)))
    (begun,) = begin_groups([targets], CPU)
    buffers = [(torch.zeros(200, 2, 16), torch.zeros(200, 2, 8)) for _ in range(2)]
    begun.write(buffers)
    with pytest.raises(CodecError, match="1 of the records of 1 groups are damaged"):
        check_written([begun])
    # Other records are not touched by it.
    good = decoder.decode(0, block[decoder.tail_start(0, 70) :], 70)[1]
    torch.testing.assert_close(buffers[1][0][:58], good.k[:58], rtol=0, atol=0.05)


# ---- the product, and where it goes ----


def begin(groups: Sequence[Sequence[GroupTarget]], device: Device) -> list[GroupRestore]:
    begun = begin_groups(groups, device)
    assert all(isinstance(group, TritonGroupRestore) for group in begun)
    return begun


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rank", [20, 80])
def test_every_dtype(dtype: torch.dtype, rank: int) -> None:
    """Small coefficients are multiplied in bf16, unless the pool is in fp32."""
    shape, seen = LayerShape(2, 32, 16, dtype), []

    def begin_parts(groups: Sequence[Sequence[GroupTarget]], device: Device) -> list[GroupRestore]:
        begun = begin(groups, device)
        on_device = present(cast(TritonGroupRestore, begun[0]).on_device)
        seen.extend((table["num_exact"], table["num_coded"]) for table in on_device.of_tails)
        return begun

    case = GroupCase(shape, rank, decay=0.95, rotary_dim=32, num_tokens=16, max_damage=0.01)
    check_group(case, begin_parts, CPU)
    ((num_exact, num_coded),) = seen
    # What fp8 rounds away from KV lies outside of the bases, and leaves little to lose for large steps.
    assert num_exact == num_coded if dtype.itemsize in (1, 4) else num_exact < num_coded


@pytest.mark.parametrize(
    ("k_head_dim", "v_head_dim", "rotary_dim"),
    [(64, 64, 64), (128, 128, 128), (256, 256, 256), (80, 96, 32), (33, 31, 20), (5, 3, 0), (64, 512, 64)],
)
@pytest.mark.parametrize("is_neox", [True, False])
def test_every_head(k_head_dim: int, v_head_dim: int, rotary_dim: int, is_neox: bool) -> None:
    shape = LayerShape(3, k_head_dim, v_head_dim, torch.float32)
    case = GroupCase(shape, 8, rotary_dim=rotary_dim, is_neox=is_neox, start_token=700, num_tokens=20)
    check_group(case, begin, CPU)


@pytest.mark.parametrize(
    ("first_token", "end_token", "head_tokens"),
    [(0, 200, 0), (0, 200, 5), (3, 199, 61), (63, 64, 0), (64, 130, 70), (100, 101, 1), (199, 200, 1)],
)
def test_any_tail_up_to_any_token(first_token: int, end_token: int, head_tokens: int) -> None:
    """Also where the last layer alone has a tail."""
    case = GroupCase(
        FP32,
        6,
        rotary_dim=16,
        start_token=2,
        num_tokens=200,
        num_first_tokens=7,
        first_token=first_token,
        end_token=end_token,
        head_tokens=head_tokens,
    )
    check_group(case, begin, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_tails_of_several_segments_at_once(dtype: torch.dtype) -> None:
    """Of any lengths, from any tokens on; with first tokens that are stored as in the pool, or without."""
    shape = replace(FP32, dtype=dtype)
    ranges = [(90, 0, 90, 0), (200, 70, 131, 5), (64, 0, 64, 64), (30, 29, 30, 0), (150, 128, 150, 3)]
    cases = [
        GroupCase(
            shape,
            6,
            rotary_dim=16,
            start_token=100 * number,
            num_tokens=num_tokens,
            first_token=first,
            end_token=end,
            head_tokens=head,
            num_first_tokens=number,
            max_damage=0.02 * (number + 1),
        )
        for number, (num_tokens, first, end, head) in enumerate(ranges)
    ]
    check_groups(cases, begin, CPU)


def wave_of(shape: LayerShape) -> list[list[GroupCase]]:
    """Groups, each with bases of its own, and slots; their tails, of several segments, lie side by side."""

    def case(rank: int, number: int, **sizes: int) -> GroupCase:
        start = 100 * number
        return GroupCase(shape, rank, rotary_dim=16, start_token=start, num_first_tokens=number, **sizes)

    return [
        [case(6, 0, num_tokens=90), case(6, 1, num_tokens=130, first_token=70, head_tokens=5)],
        [case(11, 2, num_tokens=70)],
        [case(3, 0, num_tokens=40, first_token=3), case(3, 1, num_tokens=64), case(3, 3, num_tokens=5)],
    ]


def test_groups_are_decoded_in_one_wave() -> None:
    check_wave(wave_of(FP32), begin, CPU)


def test_a_wave_is_to_the_bit_what_each_group_is_alone() -> None:
    together, alone = ([PreparedGroup(cases, CPU, 2) for cases in wave_of(BF16)] for _ in range(2))
    for group, each in zip(begin([each.targets for each in together], CPU), together, strict=True):
        group.write(each.buffers)
    for each, expected in zip(together, alone, strict=True):
        begin([expected.targets], CPU)[0].write(expected.buffers)
        for of_layer, of_expected in zip(each.buffers, expected.buffers, strict=True):
            assert all(map(torch.equal, of_layer, of_expected))


def test_damage_in_any_group_of_a_wave_is_found_once() -> None:
    groups, buffers = [], []
    for number in range(3):
        decoder, block, _ = encode_case(GroupCase(FP32, num_tokens=70), CPU)
        block = block.clone()
        if number == 1:
            block[-6] ^= 4
        groups.append([GroupTarget(decoder.tail(0, block, 0, 70), [0, 0], torch.arange(70))])
        buffers.append([(torch.zeros(70, 2, 16), torch.zeros(70, 2, 8)) for _ in range(2)])
    begun = begin(groups, CPU)
    for group, of_group in zip(begun, buffers, strict=True):
        group.write(of_group)
    with pytest.raises(CodecError, match="1 of the records of 3 groups are damaged"):
        check_written(begun)


@pytest.mark.parametrize("num_first_tokens", [0, 1, 40])
def test_first_tokens_are_exact(num_first_tokens: int) -> None:
    check_group(GroupCase(BF16, 6, num_tokens=40, num_first_tokens=num_first_tokens), begin, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_so_large_a_step_that_nothing_is_coded_the_mean_remains(dtype: torch.dtype) -> None:
    check_group(GroupCase(replace(FP32, dtype=dtype), num_tokens=70, max_damage=1e6), begin, CPU)


@settings(max_examples=6, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_any_shape_and_any_range(data: st.DataObject) -> None:
    k_head_dim = data.draw(st.integers(1, 40), "k_head_dim")
    shape = LayerShape(
        data.draw(st.integers(1, 3), "heads"),
        k_head_dim,
        data.draw(st.integers(1, 40), "v_head_dim"),
        data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), "dtype"),
    )
    num_tokens = data.draw(st.integers(1, 140), "tokens")
    first_token = data.draw(st.integers(0, num_tokens - 1), "first")
    case = GroupCase(
        shape,
        data.draw(st.integers(1, 12), "rank"),
        rotary_dim=2 * data.draw(st.integers(0, k_head_dim // 2), "rotary pairs"),
        is_neox=data.draw(st.booleans(), "neox"),
        start_token=data.draw(st.sampled_from([0, 1, 1000]), "start"),
        num_tokens=num_tokens,
        num_first_tokens=data.draw(st.integers(0, 5), "first tokens"),
        first_token=first_token,
        end_token=data.draw(st.integers(first_token + 1, num_tokens), "end"),
        head_tokens=data.draw(st.integers(0, 50), "head"),
    )
    check_group(case, begin, CPU)
