from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.layout import BlockLayout, Section
from krul_backend.errors import CodecError

RECORD = (
    Section("codes", torch.uint8, (2, 3), per_token=True),
    Section("scale", torch.float16, (2,), per_token=False),
    Section("norm", torch.float32, (2, 1), per_token=True),
)
TRAILER = (Section("rows", torch.bfloat16, (3, 4), per_token=False),)


@pytest.mark.parametrize(
    ("num_tokens", "records"),
    # Of n tokens: 6 n bytes of codes, 4 of scale, 8 n of norms, each up to the next multiple of 16.
    [(1, 48), (3, 32 + 16 + 32), (8, 48 + 16 + 64), (9, 128 + 48), (19, 256 + 32 + 16 + 32)],
)
def test_bytes_are_counted_exactly(num_tokens: int, records: int) -> None:
    layout = BlockLayout(RECORD, TRAILER, 8, num_tokens)
    assert layout.records_num_bytes == records
    assert layout.num_bytes == records + 32
    assert layout.new_block(torch.device("cpu")).numel() == layout.num_bytes


@settings(max_examples=100)
@given(group_size=st.integers(1, 70), num_tokens=st.integers(1, 2500), data=st.data())
def test_runs_and_byte_ranges_cover_what_is_asked_for(
    group_size: int, num_tokens: int, data: st.DataObject
) -> None:
    layout = BlockLayout(RECORD, TRAILER, group_size, num_tokens)
    first = data.draw(st.integers(0, num_tokens - 1))
    end = data.draw(st.integers(first + 1, num_tokens))
    runs = list(layout.runs(first, end))
    assert runs[0].first_token == first // group_size * group_size
    assert runs[-1].end_token == min(-(-end // group_size) * group_size, num_tokens)
    for run, following in itertools.pairwise(runs):
        assert run.end_token == following.first_token
    assert all(run.num_groups * run.group_tokens <= max(1024, group_size) for run in runs)
    block = layout.new_block(torch.device("cpu"))
    for run in runs:
        for view in layout.record_views(block, run).values():
            view.fill_(1)
    touched = block.nonzero().flatten()
    span = layout.byte_range(first, end)
    assert span.start <= int(touched[0])
    assert int(touched[-1]) < span.stop <= layout.records_num_bytes
    assert layout.byte_range(0, num_tokens) == range(layout.records_num_bytes)


def test_views_share_the_block_and_do_not_overlap() -> None:
    layout = BlockLayout(RECORD, TRAILER, 4, 11)
    block = layout.check(layout.new_block(torch.device("cpu")), 0)
    every = []
    for run in layout.runs(0, 11):
        every += layout.record_views(block, run).values()
    every += layout.trailer_views(block).values()
    for view in every:
        assert not view.any()
        view.fill_(1)
    assert [tuple(view.shape) for view in every[:3]] == [(2, 4, 2, 3), (2, 2), (2, 4, 2, 1)]
    assert tuple(every[-1].shape) == (3, 4)


def test_sections_start_at_aligned_bytes() -> None:
    layout = BlockLayout(RECORD, (), 5, 5)
    assert layout.group_record.byte_offsets() == {"codes": 0, "scale": 32, "norm": 48}
    assert layout.group_record.num_bytes == 96


def test_a_block_may_lack_its_leading_groups_and_nothing_else() -> None:
    layout = BlockLayout(RECORD, TRAILER, 4, 11)
    block = torch.arange(layout.num_bytes, dtype=torch.int64).to(torch.uint8)
    second_group = layout.byte_range(4, 5).start
    tail = layout.check(block[second_group:], first_token=6)
    (run,) = layout.runs(4, 8)
    assert torch.equal(
        layout.record_views(tail, run)["codes"], layout.record_views(layout.check(block, 0), run)["codes"]
    )
    assert torch.equal(layout.trailer_views(tail)["rows"].view(torch.uint8).flatten()[:24], block[-32:-8])
    with pytest.raises(CodecError, match="may be missing"):
        layout.check(block[second_group:], first_token=3)
    for wrong in (block[1:], block[:-16], torch.cat([block, block[:16]]), block[second_group + 16 :]):
        with pytest.raises(CodecError, match=f"has {layout.num_bytes} bytes"):
            layout.check(wrong, first_token=10)
    with pytest.raises(CodecError, match="uint8"):
        layout.check(block.float(), 0)
    with pytest.raises(CodecError, match="uint8"):
        layout.check(block.view(1, -1), 0)


def test_an_unaligned_block_is_read_all_the_same() -> None:
    layout = BlockLayout(RECORD, TRAILER, 4, 4)
    shifted = torch.arange(layout.num_bytes + 1, dtype=torch.int64).to(torch.uint8)[1:]
    (run,) = layout.runs(0, 4)
    views = layout.record_views(layout.check(shifted, 0), run)
    assert views["codes"].flatten().tolist() == list(range(1, 25))
