"""The interface of planners: the problem that one is given, and the plan that it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from krul_backend.planner.costs import RestoreCosts


@dataclass(frozen=True, eq=False)
class StoredRun:
    """Tokens ``[first_token, end_token)`` of a conversation as one segment stores them; absolute positions.

    Per layer ``l``: ``layer_token_bytes[l]`` are the bytes of a token in its block, ``decode_token_s[l]`` the
    seconds to decode a token of it into the pool, ``last_use[l] >= l`` the last layer that needs its block
    (the other one of a pair, or itself), ``stored_from[l]`` in ``[first_token, end_token]`` the first token
    from which the layer can be loaded; what is before it was left out when it was stored.
    """

    tier: str
    first_token: int
    end_token: int
    layer_token_bytes: tuple[float, ...]
    decode_token_s: tuple[float, ...]
    last_use: tuple[int, ...]
    stored_from: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RestoreProblem:
    """A request whose prefix ``[0, total_tokens)`` is to be in the pool before its ``new_tokens``.

    ::

        [0, device_tokens)            already in the pool
        [device_tokens, h_l)          recomputed in layer l: the head
        [h_l, total_tokens)           loaded in layer l: the tail
        then new_tokens               computed by the engine's own forward

    ``runs`` follow each other from ``device_tokens`` to ``total_tokens`` without a gap. All of these are
    multiples of ``page_size``, and heads must end at such. A block is loaded in one copy, in the turn of its
    own layer, from the head of the layer that needs it last (``StoredRun.last_use``) on; rows ``[h_l, ...)``
    of layer ``l`` are decoded.

    ``max_head_tokens``: a head must not have more tokens than this; None for no limit. ``max_lengths``: how
    many different ``h_l > device_tokens`` there may be in a plan (each costs a cut of the hidden states).
    """

    num_layers: int
    page_size: int
    device_tokens: int
    total_tokens: int
    new_tokens: int
    runs: tuple[StoredRun, ...]
    costs: RestoreCosts
    max_head_tokens: int | None = None
    max_lengths: int = 8

    @property
    def recompute_s(self) -> float:
        """Seconds until the request's last layer if the engine computes everything and nothing is loaded."""
        num_tokens = self.total_tokens - self.device_tokens + self.new_tokens
        return self.num_layers * self.costs.own.layer_s(num_tokens, self.device_tokens)

    @property
    def is_serial(self) -> bool:
        """True if heads, loads and the forward run one after another: see ``RestoreCosts.serial_tiers``."""
        return bool(self.runs) and all(run.tier in self.costs.serial_tiers for run in self.runs)

    @property
    def own_layer_s(self) -> float:
        """Seconds of one layer of the request's own forward after a restore."""
        return self.costs.own.layer_s(self.new_tokens, self.total_tokens)


@dataclass(frozen=True)
class RestorePlan:
    """``head_ends[l]``: the token before which layer ``l`` is recomputed and from which on it is loaded.

    Never growing from layer to layer, because a token's hidden state in a layer needs the layer before it;
    multiples of the page size, between ``device_tokens`` and ``total_tokens``, and never before the first
    token that is stored. ``end_s``: predicted seconds from the start to the end of the request's last layer.
    ``is_recompute``: nothing is loaded and no head is recomputed; the engine computes the whole prefix
    itself, with the new tokens (``head_ends`` are then all ``total_tokens``).
    """

    head_ends: tuple[int, ...]
    end_s: float
    is_recompute: bool = False

    @classmethod
    def recompute(cls, problem: RestoreProblem) -> RestorePlan:
        """Nothing is restored."""
        return cls((problem.total_tokens,) * problem.num_layers, problem.recompute_s, is_recompute=True)


class RestorePlanner(ABC):
    """Splits each layer of a prefix into a head and a tail. Deterministic: equal problems, equal plans."""

    name: ClassVar[str]

    @abstractmethod
    def plan(self, problem: RestoreProblem) -> RestorePlan:
        """The plan of this kind for ``problem``; recompute if it has no other that is allowed."""
