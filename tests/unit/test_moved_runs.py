"""Stored runs are found wherever a prompt has them, and only by those who may see them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.layout import LayerShape
from krul_backend.codec.rotary import RotaryTable
from krul_sglang.engine.common.moved_runs import WINDOW_EVERY, WINDOW_TOKENS, MovedRun, RunIndex, moved_key
from krul_sglang.engine.restore import load_batch
from krul_sglang.engine.restore.load_batch import MovedKeys
from tests.support.engine_builders import TensorPool
from tests.support.present import present


def text(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, num_tokens).astype(np.int64)


def keys(name: str, num_pages: int) -> list[str]:
    return [f"{name}-{page}" for page in range(num_pages)]


@settings(max_examples=60)
@given(
    page_size=st.sampled_from([1, 16, 64]),
    system=st.integers(0, 100),
    dropped=st.integers(1, 500),
    seed=st.integers(0, 10_000),
)
def test_a_truncated_prompt_finds_the_turns_that_it_kept(
    page_size: int, system: int, dropped: int, seed: int
) -> None:
    index = RunIndex(page_size)
    whole = text(seed, 2000)
    num_pages = len(whole) // page_size
    index.add("", keys("a", num_pages), whole, range(num_pages))
    kept = whole[system + dropped :]
    found = present(index.find("", np.concatenate([text(seed + 1, 7), kept])))
    assert found.stored_at % page_size == 0
    assert found.prior_key == (f"a-{found.stored_at // page_size - 1}" if found.stored_at else None)
    # The same tokens at both places.
    assert found.offset - 7 == found.stored_at - system - dropped
    assert found.offset + page_size <= found.end <= 7 + len(kept)
    # Windows lie 32 tokens apart on average; a gap of ten times that is very rare.
    assert found.offset < 10 * WINDOW_EVERY + page_size


def test_only_whole_pages_that_were_stored_are_found() -> None:
    index = RunIndex(16)
    whole = text(1, 1600)
    index.add("", keys("a", 100), whole, range(40, 60))
    assert index.find("", whole[: 39 * 16]) is None
    assert index.find("", whole[61 * 16 :]) is None
    found = present(index.find("", whole))
    assert 40 <= found.stored_at // 16 < 60
    assert found.offset == found.stored_at


def test_namespaces_do_not_find_each_others_runs() -> None:
    index = RunIndex(16)
    whole = text(2, 800)
    index.add("a tenant", keys("a", 50), whole, range(50))
    assert index.find("another", whole) is None
    assert index.find("", whole) is None
    assert index.find("a tenant", whole) is not None
    index.clear()
    assert index.find("a tenant", whole) is None


def test_the_place_that_shares_most_is_taken() -> None:
    index = RunIndex(16)
    first, second = text(3, 1600), text(4, 1600)
    mixed = np.concatenate([first[:300], second[200:1500]])
    index.add("", keys("a", 100), first, range(100))
    index.add("", keys("b", 100), second, range(100))
    found = present(index.find("", mixed))
    assert found.prior_key is not None
    assert found.prior_key.startswith("b-")
    assert found.offset - 300 == found.stored_at - 200
    assert found.end == len(mixed)


def test_a_run_ends_within_the_first_window_that_differs() -> None:
    index = RunIndex(16)
    whole = text(9, 3200)
    index.add("", keys("a", 200), whole, range(200))
    found = present(index.find("", np.concatenate([whole[400:1600], text(10, 1600)])))
    assert 1200 <= found.end < 1200 + 10 * WINDOW_EVERY


def test_a_run_does_not_go_from_pages_of_text_on_to_those_after_a_moved_run() -> None:
    index = RunIndex(16)
    whole = text(11, 1600)
    named = [*keys("a", 30), *keys("moved", 70)]
    index.add("", named, whole, range(100), moved_from=30)
    found = present(index.find("", whole))
    assert found.stored_at >= 30 * 16
    assert found.prior_key is not None
    assert found.prior_key.startswith("moved-") or found.prior_key == moved_key("a-29", "")
    # Where fewer of those are left, the pages of the text alone are the longer run.
    found = present(index.find("", whole[: 40 * 16]))
    assert found.stored_at < 30 * 16
    assert found.prior_key is None or found.prior_key.startswith("a-")


def test_windows_are_bounded_and_the_oldest_leave() -> None:
    index = RunIndex(16, max_windows=100)
    for seed in range(20):
        index.add("", keys(str(seed), 100), text(seed, 1600), range(100))
        assert len(index) <= 100
    assert index.find("", text(0, 1600)) is None
    assert index.find("", text(19, 1600)) is not None


def test_windows_that_are_stored_again_lead_to_the_later_place() -> None:
    index = RunIndex(16)
    whole = text(5, 1600)
    index.add("", keys("first", 100), whole, range(100))
    num_windows = len(index)
    index.add("", keys("again", 100), whole, range(100))
    assert len(index) == num_windows
    found = present(index.find("", whole))
    assert found.prior_key is not None
    assert found.prior_key.startswith("again-")


@pytest.mark.parametrize("num_tokens", [0, 1, WINDOW_TOKENS - 1, WINDOW_TOKENS])
def test_short_texts_are_no_error(num_tokens: int) -> None:
    index = RunIndex(1)
    index.add("", keys("a", num_tokens), text(6, num_tokens), range(num_tokens))
    assert len(index) <= 1
    assert index.find("", text(7, num_tokens)) is None


def test_the_pages_of_a_moved_run_are_counted_in_the_prompt() -> None:
    run = MovedRun(105, -300, keys("a", 10), text(8, 160), first_token=96)
    # Tokens 96 to 105 are computed; ten pages end at token 265, within the eleventh page of the prompt.
    assert run.num_pages(10, 16) == 10
    assert run.num_pages(1, 16) == 1
    assert run.num_pages(0, 16) == 0


def test_keys_after_a_moved_run_are_no_keys_of_text() -> None:
    assert moved_key("ab", "") != moved_key("cd", "")
    assert moved_key("ab", "") == moved_key("ab", "a tenant")
    assert moved_key(None, "a tenant") != moved_key(None, "another")
    assert len(moved_key(None, "")) == 64


def test_keys_are_turned_piece_by_piece_in_their_slots_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_batch, "_ROTATED_AT_ONCE", 5)
    pool: Any = TensorPool(LayerShape(2, 8, 8, torch.bfloat16), num_layers=2, num_slots=40)
    angles = torch.arange(64)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    rotary = RotaryTable(angles.cos(), angles.sin(), is_neox=True)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:13]
    keys, values = (buffer.clone() for buffer in pool.buffers(1))
    MovedKeys(rotary, shift=-20).rotate(pool, 1, slots, first_token=7)
    wanted = keys.clone()
    wanted[slots] = rotary.move(keys[slots].float(), torch.arange(27, 40), torch.arange(7, 20)).to(keys.dtype)
    assert not torch.equal(wanted, keys)
    assert torch.equal(pool.buffers(1)[0], wanted)
    assert torch.equal(pool.buffers(1)[1], values)
