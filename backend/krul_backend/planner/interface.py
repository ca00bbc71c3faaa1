"""Defines planners: the costs and the problem that they are given, and the plan that they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ComputeCost:
    """Seconds for one layer: ``launch_s + token_s * n + context_s * n * (p + n / 2) + past_s * p``.

    ``n`` tokens are computed after ``p`` that are in the pool: a token sees ``p`` and, on average, half of
    the others, and the KV of ``p`` is read, however few tokens there are. All numbers are non-negative.
    """

    launch_s: float
    token_s: float
    context_s: float
    past_s: float = 0.0

    def layer_s(self, num_tokens: int, num_past: int) -> float:
        """Seconds for one layer; nothing for no tokens."""
        if num_tokens == 0:
            return 0.0
        context = num_tokens * (num_past + num_tokens / 2)
        fixed_s = self.launch_s + self.past_s * num_past
        return fixed_s + self.token_s * num_tokens + self.context_s * context


@dataclass(frozen=True)
class TierCost:
    """Seconds to bring ``n > 0`` bytes of one layer of one segment: ``latency_s + byte_s * n``."""

    latency_s: float
    byte_s: float

    def load_s(self, num_bytes: float) -> float:
        """Seconds for one copy; nothing for no bytes."""
        return self.latency_s + self.byte_s * num_bytes if num_bytes > 0 else 0.0


@dataclass(frozen=True)
class DecodeCost:
    """Seconds to decode a layer: ``token_s`` for each token, ``segment_s`` for each segment with any, and
    ``latency_s`` once for all segments of a restore."""

    latency_s: float
    token_s: float
    segment_s: float = 0.0

    def times(self, factor: float) -> DecodeCost:
        return DecodeCost(factor * self.latency_s, factor * self.token_s, factor * self.segment_s)


NO_DECODING = DecodeCost(0.0, 0.0)


@dataclass(frozen=True)
class RestoreCosts:
    """All that a plan depends on beside what is stored.

    ``head``: a layer of the separate forward that recomputes heads. ``own``: a layer of the engine's own
    forward, which computes the new tokens, and the whole prefix when nothing is restored. ``tiers``: by
    name. ``overhead_s``: seconds that a restore takes beyond its pipeline, whatever the plan: threads that
    start, streams that get in each other's way. ``serial_tiers``: on a CPU, tiers from which a load takes the
    cores of the forward, which therefore waits until all of it has landed. ``decode_scale``: how many times
    as long decoding takes as the runs say.
    """

    head: ComputeCost
    own: ComputeCost
    tiers: Mapping[str, TierCost]
    overhead_s: float = 0.0
    serial_tiers: tuple[str, ...] = ()
    decode_scale: float = 1.0


@dataclass(frozen=True, eq=False)
class StoredRun:
    """Tokens ``[first_token, end_token)`` of a conversation as one segment stores them; absolute positions.

    Per layer ``l``: ``layer_token_bytes[l]`` are the bytes of a token in its block, ``decode[l]`` what it
    costs to decode into the pool, ``last_use[l] >= l`` the last layer that needs its block (the other one of
    a pair, or itself), ``stored_from[l]`` in ``[first_token, end_token]`` the first token from which the
    layer can be loaded; what is before it was left out when it was stored. ``tier`` may lack the tokens
    before ``front_end[l]``: then they are brought from ``front_tier`` first.
    """

    tier: str
    first_token: int
    end_token: int
    layer_token_bytes: tuple[float, ...]
    decode: tuple[DecodeCost, ...]
    last_use: tuple[int, ...]
    stored_from: tuple[int, ...]
    front_tier: str | None = None
    front_end: tuple[int, ...] = ()


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
    ``compute_delay_s`` and ``load_delay_s``: so long each stream works for other requests of the batch first.
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
    compute_delay_s: float = 0.0
    load_delay_s: float = 0.0

    @property
    def recompute_s(self) -> float:
        """Seconds until the request's last layer if the engine computes everything and nothing is loaded."""
        num_tokens = self.total_tokens - self.device_tokens + self.new_tokens
        own_s = self.num_layers * self.costs.own.layer_s(num_tokens, self.device_tokens)
        return self.compute_delay_s + own_s

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

    name: str

    @abstractmethod
    def plan(self, problem: RestoreProblem) -> RestorePlan:
        """The plan of this kind for ``problem``; recompute if it has no other that is allowed."""
