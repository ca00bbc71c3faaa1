"""Describes the restores that ``/server_info`` shows: plans, and when each stream worked on which layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

RESTORES = "krul_restores"
"""Where ``/server_info`` has the last restores, in each of ``internal_states``."""


class Part(Struct, frozen=True, array_like=True):
    """A stream worked on ``layer`` in ``[begin_s, end_s)``, seconds from the start of the restore."""

    layer: int
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class TracedRequest(Struct, frozen=True):
    """One request of a restore; ``head_ends`` are positions in its prompt, see ``RestorePlan``."""

    rid: str
    device_tokens: int
    restored_tokens: int
    head_ends: tuple[int, ...]
    planned_s: float

    def head_tokens(self, layer: int) -> int:
        return self.head_ends[layer] - self.device_tokens

    def tail_tokens(self, layer: int) -> int:
        return self.restored_tokens - self.head_tokens(layer)


class TracedRestore(Struct, frozen=True):
    """The requests of one batch whose prefixes were restored together.

    ``index`` counts the restores in one answer of a server, ``rank`` is the data-parallel rank. ``is_mixed``:
    other requests, with nothing to restore, shared the forward. ``was_rescued``: the load failed or stopped,
    and the engine computed everything. The compute stream has ``heads``, then ``waits`` and ``own`` layers of
    the request's own forward by turns; ``own`` is empty after a rescue.
    """

    index: int
    rank: int
    requests: tuple[TracedRequest, ...]
    is_mixed: bool
    was_rescued: bool
    end_s: float
    loads: tuple[Part, ...]
    heads: tuple[Part, ...]
    waits: tuple[Part, ...]
    own: tuple[Part, ...]

    @classmethod
    def parse(cls, value: Mapping[str, Any], *, index: int, rank: int) -> TracedRestore:
        """From ``RestoreTrace.as_dict``.

        Raises:
            KeyError, TypeError, ValueError: another version of krul wrote it.
        """
        streams = value["streams"]
        named = {"loads": "load", "heads": "head", "waits": "wait", "own": "own"}
        parts = {name: streams[stream] for name, stream in named.items()}
        restore = msgspec.convert({**value, **parts, "index": index, "rank": rank}, cls)
        num_layers = {len(request.head_ends) for request in restore.requests}
        if len(num_layers) != 1 or 0 in num_layers:
            raise ValueError(f"requests with {sorted(num_layers)} layers")
        return restore

    @property
    def rids(self) -> list[str]:
        return [request.rid for request in self.requests]

    @property
    def num_layers(self) -> int:
        return len(self.requests[0].head_ends)

    @property
    def prefix_tokens(self) -> int:
        """Tokens that came back, heads and tails together, of all requests."""
        return sum(request.restored_tokens for request in self.requests)

    @property
    def planned_s(self) -> float:
        """When all should have ended: each plan counts what was planned for the batch before it."""
        return max(request.planned_s for request in self.requests)

    def head_tokens(self, layer: int) -> int:
        """Tokens that were to be recomputed in ``layer``."""
        return sum(request.head_tokens(layer) for request in self.requests)

    def tail_tokens(self, layer: int) -> int:
        """Tokens that were to be loaded in ``layer``."""
        return self.prefix_tokens - self.head_tokens(layer)

    @property
    def load_busy(self) -> float:
        """Share of the time in which the load stream worked."""
        return self._share(*self.loads)

    @property
    def compute_busy(self) -> float:
        """Share of the time in which the compute stream worked, as far as it is known after a rescue."""
        return self._share(*self.heads, *self.own)

    def _share(self, *parts: Part) -> float:
        return sum(part.seconds for part in parts) / self.end_s if self.end_s > 0 else 0.0
