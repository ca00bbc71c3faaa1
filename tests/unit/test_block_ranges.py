"""Blocks in ranges that are counted from their ends: their checksums, and what a trim keeps of them."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from krul_backend.errors import ManifestError
from krul_backend.segment import MIN_RANGE_BYTES, SegmentManifest, range_bytes_for, tail_num_bytes
from krul_backend.tiers.common.interface import (
    CHECKSUM_BYTES,
    block_checksum,
    block_checksums,
    checked_checksums,
    checksum_of_tail,
    checksums_of,
    tail_is_right,
)
from tests.support.store_builders import make_manifest, shorten_ranges

sizes = st.integers(0, 400)
ranges = st.integers(1, 450)


def block_of(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def ranges_of(block: np.ndarray, range_bytes: int) -> list[bytes]:
    """The ranges of a block, cut off its end one after another."""
    data, found = block.tobytes(), []
    while data:
        found.append(data[-range_bytes:])
        data = data[:-range_bytes]
    return found[::-1]


@given(num_bytes=sizes, range_bytes=ranges)
def test_each_range_has_its_own_checksum(num_bytes: int, range_bytes: int) -> None:
    """XXH3 of each range, big endian, in the order of the bytes; a block of no bytes has none."""
    block = block_of(num_bytes)
    digests = [xxhash.xxh3_64_intdigest(part) for part in ranges_of(block, range_bytes)]
    wanted = b"".join(digest.to_bytes(CHECKSUM_BYTES, "big") for digest in digests)
    assert block_checksum(block, range_bytes) == wanted


@given(num_bytes=sizes, dropped=sizes, range_bytes=ranges)
def test_ranges_keep_their_checksums_when_whole_ones_before_them_go(
    num_bytes: int, dropped: int, range_bytes: int
) -> None:
    block = block_of(num_bytes)
    checksum = block_checksum(block, range_bytes)
    kept = tail_num_bytes(num_bytes, max(0, num_bytes - dropped), range_bytes)
    tail = block[num_bytes - kept :]
    assert checksum_of_tail(checksum, kept, range_bytes) == block_checksum(tail, range_bytes)


@given(num_bytes=sizes, wanted=sizes, range_bytes=ranges)
def test_a_tail_is_the_fewest_whole_ranges_with_what_is_wanted(
    num_bytes: int, wanted: int, range_bytes: int
) -> None:
    wanted = min(wanted, num_bytes)
    kept = tail_num_bytes(num_bytes, wanted, range_bytes)
    assert wanted <= kept <= num_bytes
    assert kept == num_bytes or kept % range_bytes == 0
    assert kept < wanted + range_bytes


@given(
    num_bytes=st.integers(1, 400),
    wanted=sizes,
    range_bytes=ranges,
    at=st.integers(0, 399),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_is_found_exactly_in_the_ranges_that_are_read(
    num_bytes: int, wanted: int, range_bytes: int, at: int, bit: int
) -> None:
    block = block_of(num_bytes)
    checksum = block_checksum(block, range_bytes)
    wanted, at = min(wanted, num_bytes), at % num_bytes
    assert tail_is_right(block, checksum, wanted, range_bytes)
    block[at] ^= 1 << bit
    is_read = at >= num_bytes - tail_num_bytes(num_bytes, wanted, range_bytes)
    assert tail_is_right(block, checksum, wanted, range_bytes) == (not is_read)


@given(num_bytes=sizes, range_bytes=ranges, num_more=st.integers(-3, 3))
def test_checksums_of_other_lengths_are_wrong(num_bytes: int, range_bytes: int, num_more: int) -> None:
    """What somebody sent with a block need not fit it: then the block is not taken for right."""
    block = block_of(num_bytes)
    checksum = block_checksum(block, range_bytes)
    other = checksum + bytes(num_more) if num_more > 0 else checksum[: len(checksum) + num_more]
    if len(other) < len(checksum):
        assert not tail_is_right(block, other, num_bytes, range_bytes)
    with pytest.raises(ManifestError) if len(other) != len(checksum) else nullcontext():
        assert checked_checksums([other], [num_bytes], range_bytes) == (other,)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_checksums_of_other_numbers_of_blocks_are_refused(number: int) -> None:
    with pytest.raises(ManifestError, match=f"checksums of {number} blocks for 2 layers"):
        checked_checksums([bytes(CHECKSUM_BYTES)] * number, [9, 9], 9)


@given(st.lists(st.integers(0, 1 << 34), max_size=4))
def test_default_ranges_are_powers_of_two_and_not_too_many(layer_num_bytes: list[int]) -> None:
    range_bytes = range_bytes_for(layer_num_bytes)
    assert range_bytes.bit_count() == 1
    assert range_bytes >= MIN_RANGE_BYTES == 16 << 10
    assert max(layer_num_bytes, default=0) <= 64 * range_bytes
    # They are no longer than needed.
    assert range_bytes == MIN_RANGE_BYTES or max(layer_num_bytes) > 64 * range_bytes // 2


def test_writers_and_manifests_choose_the_same_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        blocks = [block_of(num_bytes) for num_bytes in (3 << 20, 100_000, 7)]
        manifest = make_manifest("c", 0, 2, tuple(block.nbytes for block in blocks))
        assert block_checksums(blocks) == block_checksums(blocks, manifest.range_bytes)
        checked_checksums(block_checksums(blocks), manifest.layer_num_bytes, manifest.range_bytes)
        assert manifest.header.range_bytes == manifest.range_bytes
        shorten_ranges(monkeypatch, 2048)


def test_ranges_of_no_bytes_are_refused() -> None:
    with pytest.raises(ManifestError, match="ranges of -1 bytes"):
        make_manifest("c", 0, 2, (100, 60), range_bytes=-1)


# Trimmed manifests

TOKEN_BYTES = 7
NUM_TOKENS = 20


def whole(range_bytes: int) -> SegmentManifest:
    """Tokens 8 to 28 in two layers; each token takes as many bytes, and the second has more at its front."""
    num_bytes = NUM_TOKENS * TOKEN_BYTES
    return make_manifest("c", 2, 7, (num_bytes, num_bytes + 11), range_bytes=range_bytes)


firsts = st.tuples(st.integers(8, 28), st.integers(8, 28))


def tail_of(first_tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((28 - first) * TOKEN_BYTES for first in first_tokens)


@given(range_bytes=ranges, steps=st.lists(firsts, min_size=1, max_size=4))
def test_a_trimmed_manifest_says_what_is_left(range_bytes: int, steps: list[tuple[int, int]]) -> None:
    """After any trims each layer has the tokens that were last needed, in whole ranges."""
    manifest = whole(range_bytes)
    blocks = [block_of(num_bytes, seed) for seed, num_bytes in enumerate(manifest.layer_num_bytes)]
    checksums = block_checksums(blocks, range_bytes)
    for step in steps:
        before, manifest = manifest, manifest.trimmed(step, tail_of(step))
        assert checksums_of(manifest, checksums_of(before, checksums)) == checksums_of(manifest, checksums)
        for layer, (first, kept) in enumerate(
            zip(manifest.layer_first_token, manifest.layer_num_bytes, strict=True)
        ):
            old_first, old = before.layer_first_token[layer], before.layer_num_bytes[layer]
            assert first in (old_first, step[layer])
            assert first >= old_first
            assert first <= max(step[layer], old_first), "what is needed is there"
            wanted = tail_num_bytes(old, (28 - max(step[layer], old_first)) * TOKEN_BYTES, range_bytes)
            assert kept == (wanted if step[layer] > old_first else old)
            tail = blocks[layer][blocks[layer].nbytes - kept :]
            assert checksums_of(manifest, checksums)[layer] == block_checksum(tail, range_bytes)
    unchanged = {field.name for field in dataclasses.fields(manifest)} - {
        "layer_first_token",
        "layer_num_bytes",
    }
    first = whole(range_bytes)
    assert all(
        np.array_equal(getattr(manifest, name), getattr(first, name))
        if name == "token_ids"
        else getattr(manifest, name) == getattr(first, name)
        for name in unchanged
    )


@given(range_bytes=ranges, step=firsts)
def test_a_manifest_of_which_nothing_can_go_is_itself(range_bytes: int, step: tuple[int, int]) -> None:
    manifest = whole(range_bytes)
    assert manifest.trimmed((8, 0), (10_000, 10_000)) is manifest
    trimmed = manifest.trimmed(step, tail_of(step))
    assert trimmed.trimmed(step, tail_of(step)) is trimmed
    assert (trimmed is manifest) == (trimmed.num_bytes == manifest.num_bytes)
