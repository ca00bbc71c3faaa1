"""Looks waiting requests up before a scheduling round tries to admit them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from krul_backend.segment import TokenIds
from krul_sglang.adapter.linker import KrulLinker

MAX_LOOKED_UP_AHEAD = 16
"""Requests that are looked up ahead in one scheduling round: running ones wait for it."""
MAX_LOOKED_UP_TOKENS = 1 << 16
"""Tokens of their prompts, or one prompt: a lookup goes through all pages."""

NUM_LOOKED_UP_AGAIN = 4
"""Requests at the front of the queue that are looked up again when it moves, or twice as many as have left it
if that is more, up to half of ``MAX_LOOKED_UP_AHEAD``: there may be room by now, or what was on the device is
not there any more."""

_PATH_END_TOKENS = 16
"""So many tokens, or a page if that is more, say whether a prompt goes on from a stored path."""


class _PathEnd(NamedTuple):
    """The length of a stored path of whole pages, and its last tokens: to tell prompts that continue it."""

    num_tokens: int
    last_tokens: list[int]

    @classmethod
    def of(cls, token_ids: TokenIds, page_size: int) -> _PathEnd:
        return cls(len(token_ids), token_ids[-max(page_size, _PATH_END_TOKENS) :].tolist())

    def is_passed_by(self, token_ids: Sequence[int]) -> bool:
        """Return True if a prompt has these tokens at their place: then it most likely continues the path."""
        begin = self.num_tokens - len(self.last_tokens)
        return list(token_ids[begin : self.num_tokens]) == self.last_tokens


class LookAhead:
    """Looks up the requests that wait next, so that what is stored of them is in DRAM in time.

    SGLang looks up itself only those that it tries to admit: none while a batch is full. The window is what
    the device pool could hold. Each is looked up once, again when the turn before it has been stored, and
    again when it has come to the front; if many have come at once, some of them in each round.
    All this depends on nothing that may differ between ranks, because they look up together.
    ``num_held_back`` requests were passed over for a while.
    """

    def __init__(self, cache: Any, linker: KrulLinker) -> None:
        self._cache = cache
        self._linker = linker
        self._stored_ends: tuple[_PathEnd, ...] = ()
        self._held_back: frozenset[str] = frozenset()
        self.num_held_back = 0

    def note_stored(self, token_ids: TokenIds) -> None:
        """Note that a turn is stored: what waits and goes on from it is looked up again."""
        self._stored_ends += (_PathEnd.of(token_ids, self._cache.page_size),)

    def hold_back(self, queue: Sequence[Any], num_running: int) -> list[Any]:
        """Return those of ``queue``, SGLang's waiting requests, that the next round should pass over: what
        they want is being read into DRAM, and others would lose more by waiting for it with them.

        ``num_running`` requests run. Somebody can always go on. All ranks return the same.
        """
        num_others = num_running + len(queue) - 1
        if not queue or not num_others:
            return []
        self.look_up(queue)
        window, is_worth = self._window(queue), self._linker.returning.is_worth_waiting
        mine, in_turn = list[bool](), False
        for req in window:
            mine.append(is_worth(req.rid, num_others, in_turn=in_turn))
            # One reads while it is loaded: a second one in its forward would wait for both.
            in_turn |= not mine[-1] and is_worth(req.rid, num_others, in_turn=True)
        of_ranks = self._linker.agreement.gather(torch.tensor(mine, dtype=torch.float64), (len(window),))
        assert of_ranks is not None
        waits_anywhere = torch.stack(of_ranks).amax(0).tolist()
        held_back = [req for req, waits in zip(window, waits_anywhere, strict=True) if waits]
        if not num_running and len(held_back) == len(queue):
            # Nobody else can go on: the first one is read while it is loaded.
            del held_back[0]
        before, self._held_back = self._held_back, frozenset(req.rid for req in held_back)
        self.num_held_back += len(self._held_back - before)
        return held_back

    def look_up(self, queue: Iterable[Any]) -> None:
        """Look up requests of ``queue``, SGLang's waiting ones, the next one first."""
        window = self._window(queue)
        returning = self._linker.returning
        if self._linker.offloader.encoder.lacks_room:
            returning.give_copies_back()
        before = returning.queue
        num_again = _num_looked_up_again(before, window)
        known = frozenset(before)
        stored, self._stored_ends = self._stored_ends, ()
        num_lookups = num_looked_up = 0
        with returning.looking_ahead() as seen:
            for req in window:
                is_known = req.rid in known
                if any(end.is_passed_by(req.origin_input_ids) for end in stored):
                    # The store is asked anew, not only whether what it had is in DRAM by now.
                    self._linker.end_lease(req.rid)
                    is_known = False
                if not is_known or len(seen) < num_again:
                    num_looked_up += _num_tokens(req)
                    has_time = not num_lookups or num_looked_up <= MAX_LOOKED_UP_TOKENS
                    if has_time and num_lookups < MAX_LOOKED_UP_AHEAD:
                        num_lookups += 1
                        req.init_next_round_input(self._cache, cow_mamba=False)
                    elif not is_known:
                        # It is not known in the next round either, and looked up then.
                        continue
                seen.append(req.rid)

    def _window(self, queue: Iterable[Any]) -> list[Any]:
        """The first requests of the queue that the device pool could hold together; at least one."""
        pool_tokens = self._cache.token_to_kv_pool_allocator.size
        window: list[Any] = []
        num_tokens = 0
        for req in queue:
            num_tokens += _num_tokens(req)
            if window and num_tokens > pool_tokens:
                break
            window.append(req)
        return window


def _num_tokens(req: Any) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)


def _num_looked_up_again(before: tuple[str, ...], window: Sequence[Any]) -> int:
    """The number of requests at the front that are looked up again: none if the first one is the same as in
    the last round, else twice as many as have left since then, within bounds.

    ``before``: the ids of what was in the window in the last round.
    """
    if not window or before[:1] == (window[0].rid,):
        return 0
    num_left = before.index(window[0].rid) if window[0].rid in before else 0
    return min(max(2 * num_left, NUM_LOOKED_UP_AGAIN), MAX_LOOKED_UP_AHEAD // 2)
