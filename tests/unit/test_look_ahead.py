"""Which waiting requests are looked up before a scheduling round tries to admit them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from krul_sglang.adapter import look_ahead
from krul_sglang.adapter.look_ahead import MAX_LOOKED_UP_AHEAD, LookAhead, _PathEnd

POOL_TOKENS = 1000


class Returning:
    """Remembers the order of those that wait, as ``ReturningRequests`` does."""

    queue: tuple[str, ...] = ()
    waits = reads = ""
    num_given_back = 0

    def is_worth_waiting(self, rid: str, num_others: int, *, in_turn: bool) -> bool:
        return num_others > 0 and (rid in self.waits or (in_turn and rid in self.reads))

    def give_copies_back(self) -> None:
        self.num_given_back += 1

    @contextmanager
    def looking_ahead(self) -> Iterator[list[str]]:
        queue: list[str] = []
        yield queue
        self.queue = tuple(queue)


class Queue:
    """Requests that note when they are looked up."""

    def __init__(self) -> None:
        self.looked_up: list[str] = []
        self.released: list[str] = []
        self.cache = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(size=POOL_TOKENS), page_size=4
        )
        self.offloader = SimpleNamespace(encoder=SimpleNamespace(lacks_room=False))
        self.returning = Returning()
        linker: Any = SimpleNamespace(
            returning=self.returning, end_lease=self.released.append, offloader=self.offloader, agreement=self
        )
        self.look_ahead = LookAhead(self.cache, linker)

    def request(self, rid: str, num_tokens: int) -> Any:
        def look_up(cache: Any, *, cow_mamba: bool) -> None:
            assert cache is self.cache
            self.looked_up.append(rid)

        ids = list(range(num_tokens))
        return SimpleNamespace(
            rid=rid, origin_input_ids=ids[:-1], output_ids=ids[-1:], init_next_round_input=look_up
        )

    def gather(self, values: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
        """With a rank that finds only the last one worth waiting."""
        assert values.shape == torch.Size(shape)
        return [values, torch.eye(len(values), dtype=torch.float64)[-1] * self.other_waits]

    def held_back(self, rids: str, num_running: int, other_waits: float = 0.0) -> str:
        """Which of these waiting requests a round passes over."""
        self.looked_up.clear()
        self.other_waits = other_waits
        queue = [self.request(rid, 100) for rid in rids]
        return "".join(req.rid for req in self.look_ahead.hold_back(queue, num_running))

    def stored(self, token_ids: Sequence[int]) -> None:
        """A turn of pages of 4 tokens has been stored."""
        self.look_ahead.note_stored(np.asarray(token_ids, dtype=np.int64))

    def round(self, *sizes: tuple[str, int]) -> Sequence[str]:
        """A scheduling round that leaves these requests waiting; returns which are looked up."""
        self.looked_up.clear()
        self.look_ahead.look_up([self.request(rid, num_tokens) for rid, num_tokens in sizes])
        return tuple(self.looked_up)


def test_each_is_looked_up_once_in_the_order_of_the_queue() -> None:
    queue = Queue()
    waiting = [(name, 100) for name in "abcde"]
    assert queue.round(*waiting[:4]) == ("a", "b", "c", "d")
    assert queue.round(*waiting[:4]) == ()
    queue.offloader.encoder.lacks_room = True
    assert queue.round(*waiting) == ("e",)
    assert queue.returning.num_given_back == 1


def test_the_next_four_are_looked_up_again_when_the_queue_moves() -> None:
    queue = Queue()
    waiting = [(name, 100) for name in "abcdefgh"]
    queue.round(*waiting[:7])
    assert queue.round(*waiting[1:]) == ("b", "c", "d", "e", "h")
    assert queue.round(*waiting[1:]) == ()
    assert queue.round(*waiting[6:]) == ("g", "h")
    assert queue.round(*waiting[7:]) == ("h",)


def test_a_prompt_that_goes_on_from_a_turn_is_looked_up_again_when_that_is_stored() -> None:
    queue = Queue()
    waiting = [("a", 100), ("b", 3), ("c", 9), ("d", 8)]
    queue.round(*waiting)
    queue.stored(list(range(8)))
    assert queue.round(*waiting) == ("a", "c")
    assert queue.released == ["a", "c"]
    assert queue.round(*waiting) == ()
    # Other tokens, or the same ones elsewhere.
    queue.stored([0, 1, 2, 3, 4, 5, 6, 8])
    queue.stored([9, 0, 1, 2, 3, 4, 5, 6])
    assert queue.round(*waiting) == ()
    assert queue.released == ["a", "c"]


def test_twice_as_many_as_left_the_queue_are_looked_up_again() -> None:
    queue = Queue()
    waiting = [(name, 10) for name in "abcdefghijkl"]
    queue.round(*waiting)
    assert queue.round(*waiting[3:]) == ("d", "e", "f", "g", "h", "i")
    assert queue.round(*waiting[3:]) == ()
    assert queue.round(("x", 10), *waiting[3:]) == ("x", "d", "e", "f")


def test_many_that_leave_at_once_do_not_make_the_others_unknown() -> None:
    queue = Queue()
    waiting = [(str(number), 1) for number in range(100)]
    for _ in range(100 // MAX_LOOKED_UP_AHEAD + 1):
        queue.round(*waiting)
    for num_left in range(10, 100, 10):
        again = queue.round(*waiting[num_left:])
        assert again == tuple(name for name, _ in waiting[num_left : num_left + MAX_LOOKED_UP_AHEAD // 2])
        assert queue.round(*waiting[num_left:]) == ()


def test_many_that_go_on_from_a_stored_turn_are_looked_up_in_several_rounds() -> None:
    queue = Queue()
    waiting = [("other", 3), *((str(number), 20) for number in range(MAX_LOOKED_UP_AHEAD + 4))]
    for _ in range(2):
        queue.round(*waiting)
    queue.stored(list(range(16)))
    names = tuple(name for name, _ in waiting[1:])
    assert queue.round(*waiting) == names[:MAX_LOOKED_UP_AHEAD]
    # None keeps a lease that is too short.
    assert tuple(queue.released) == names
    assert queue.round(*waiting) == names[MAX_LOOKED_UP_AHEAD:]
    assert queue.round(*waiting) == ()


def test_a_page_of_one_token_does_not_say_that_a_prompt_goes_on() -> None:
    end = _PathEnd.of(np.arange(100, dtype=np.int64), page_size=1)
    assert end.is_passed_by(list(range(120)))
    assert not end.is_passed_by([*range(90), 0, *range(91, 120)])


def test_the_window_is_what_the_device_pool_could_hold() -> None:
    queue = Queue()
    assert queue.round(("a", 600), ("b", 400), ("c", 1), ("d", 1)) == ("a", "b")
    assert queue.round(("a", 600), ("b", 400), ("d", 1), ("e", 1)) == ()
    assert queue.round(("b", 400), ("c", 1), ("d", 1)) == ("b", "c", "d")
    # The next one is looked up, whatever its length.
    assert queue.round(("e", POOL_TOKENS + 1), ("f", 1)) == ("e",)


def test_many_that_come_at_once_are_looked_up_in_several_rounds() -> None:
    queue = Queue()
    waiting = [(str(number), 1) for number in range(2 * MAX_LOOKED_UP_AHEAD + 1)]
    names = tuple(name for name, _ in waiting)
    assert queue.round(*waiting) == names[:MAX_LOOKED_UP_AHEAD]
    assert queue.round(*waiting) == names[MAX_LOOKED_UP_AHEAD:-1]
    assert queue.round(*waiting) == names[-1:]
    assert queue.round(*waiting) == ()


def test_few_long_prompts_are_looked_up_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_ahead, "MAX_LOOKED_UP_TOKENS", 250)
    queue = Queue()
    waiting = [("a", 300), ("b", 100), ("c", 100), ("d", 100), ("e", 10)]
    assert queue.round(*waiting) == ("a",)
    assert queue.round(*waiting) == ("b", "c")
    assert queue.round(*waiting) == ("d", "e")
    assert queue.round(*waiting) == ()


def test_one_that_has_left_the_window_is_forgotten() -> None:
    queue = Queue()
    assert queue.round(("a", 100)) == ("a",)
    assert queue.round() == ()
    # It was retracted, and waits again.
    assert queue.round(("a", 100)) == ("a",)


def test_what_is_read_for_a_request_holds_it_back_while_others_can_go_on() -> None:
    queue = Queue()
    queue.returning.waits = "ac"
    assert queue.held_back("", 3) == ""
    assert queue.held_back("a", 0) == ""
    assert queue.looked_up == [], "nobody would wait with it"
    assert queue.held_back("a", 1) == "a"
    assert queue.looked_up == ["a"]
    assert queue.held_back("abc", 0) == "ac"
    assert queue.held_back("ac", 0) == "c", "one of them has to go on"
    assert queue.held_back("ac", 1) == "ac"
    assert queue.held_back("ab", 1, other_waits=1.0) == "ab", "all ranks do what one of them wants"
    queue.returning.waits, queue.returning.reads = "a", "abc"
    assert queue.held_back("dbec", 1) == "c", "those that read while they are loaded do so in turn"
    assert queue.held_back("bac", 0) == "ac"
