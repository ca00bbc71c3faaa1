"""What a run compares, and under which load."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from demo.environment import without_cwd
from krul_backend.errors import KrulError
from krul_backend.memory import parse_bytes
from krul_backend.strategy.strategy import SUBSPACE
from krul_sglang.config import KrulConfig

SERVERS = ("recompute", "device", "native", "compressed", "full-load")
KRUL_SERVERS = ("native", "compressed", "full-load")
VARIANTS = {"lru": {"eviction": "lru"}, "no-prefetch": {}, "hints": {}}
"""What follows a ``+`` in the name of a krul server, as in ``native+lru+no-prefetch``, with its options.

Each request to one with ``hints`` names its conversation and says that it returns after the think time.
"""
SPECULATIVE = "speculative"
"""Follows a ``+`` in the name of any server: it drafts as ``--speculative`` says."""
ALGORITHMS = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3")
CLIENTS = ("krul", "bench_serving", "divergence")

COMPRESSED_OPTIONS = {"strategy": SUBSPACE}
"""Groups of layers in bases of the model, which are learned before if they are not there."""


class ServingBenchmarkError(KrulError):
    """Options that measure nothing, conversations that cannot be used, or a server that failed."""


@dataclass(frozen=True)
class Configuration:
    """The settings of a run. Lengths are in tokens.

    Args:
        servers: names of ``SERVERS`` to compare; those of ``KRUL_SERVERS`` may be followed by ``VARIANTS``.
        at_once: so many servers run at the same time, one group after the other; None runs all of them.
        client: what asks them; a name of ``CLIENTS``.
        conversations: a ShareGPT or OpenAI file; ``data``: a folder of recorded sessions. With neither,
            conversations are generated.
        history_tokens: lengths of the first prompts of generated conversations, which take turns with them;
            of recorded ones prompts up to the longest of these are taken.
        turn_tokens: about so many tokens has each later message of a generated conversation; None asks a
            short question. Recorded sessions are cut into such messages, whole; None takes their prompts.
        users: conversations. ``rounds``: turns of each.
        rate: mean arrivals per second of the turns of a round; None sends one request at a time.
        rotates: each conversation asks its next turn as soon as the last was answered and thought about, so
            that turns of all of them always wait; a server plays all turns before another one begins.
        think_time_s: least time between the answer to a turn and the next turn of the conversation.
        speculative: one of ``ALGORITHMS``, for servers that speculate; ``draft_model``: the draft's folder,
            None the model itself with STANDALONE, and random weights with EAGLE and EAGLE3.
        settles: whether a server finishes what it does after its answers before another one is asked.
        device_tokens: of the small pool; None is 1.25 times the longest conversation.
        host_memory: of each krul server; None holds everything. ``ssd``: capacity of an SSD tier, if any.
        host_share, ssd_share: the same as shares of what all conversations take uncompressed, where the
            size itself is not given.
        ssd_read_mbs: what the SSD tier reads at most, in 1e6 bytes per second; None as fast as the disk.
        krul_options: of every krul server; ``compressed_options``: of ``compressed`` on top.
        dtype: SGLang's; None is float32 without a GPU, and else the model's own.
    """

    model_path: str
    servers: tuple[str, ...] = SERVERS
    at_once: int | None = None
    client: str = "krul"
    conversations: Path | None = None
    data: Path | None = None
    history_tokens: tuple[int, ...] = (1000,)
    turn_tokens: int | None = None
    users: int = 5
    rounds: int = 4
    rate: float | None = None
    rotates: bool = False
    think_time_s: float = 0.0
    settles: bool = True
    speculative: str | None = None
    draft_model: Path | None = None
    device_tokens: int | None = None
    host_memory: str | None = None
    host_share: float | None = None
    ssd: str | None = None
    ssd_share: float | None = None
    ssd_read_mbs: float | None = None
    krul_options: dict[str, Any] = field(default_factory=dict)
    compressed_options: dict[str, Any] = field(default_factory=COMPRESSED_OPTIONS.copy)
    max_tokens: int = 16
    page_size: int = 16
    dtype: str | None = None
    server_args: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        _check_servers(self.servers)
        if self.speculative not in (None, *ALGORITHMS):
            raise ServingBenchmarkError(
                f"--speculative: no {self.speculative!r}; accepted are {', '.join(ALGORITHMS)}"
            )
        if (self.speculative is None) == any(has_variant(name, SPECULATIVE) for name in self.servers):
            raise ServingBenchmarkError(f"--speculative names what servers of +{SPECULATIVE} do, give both")
        if self.client not in CLIENTS:
            raise ServingBenchmarkError(f"--client: no {self.client!r}; accepted are {', '.join(CLIENTS)}")
        if self.conversations is not None and self.data is not None:
            raise ServingBenchmarkError("give --conversations or --data, not both")
        if self.client == "bench_serving" and self.think_time_s:
            raise ServingBenchmarkError("bench_serving does not think: leave --think-time out")
        if self.client == "divergence" and (
            self.rate is not None or self.think_time_s or not self.settles or len(self.servers) < 2
        ):
            raise ServingBenchmarkError(
                "divergence compares two or more servers, one request at a time: leave --rate, --think-time "
                "and --no-settle out"
            )
        if (self.rotates or self.at_once is not None) and self.client != "krul":
            raise ServingBenchmarkError(f"--client {self.client}: leave --rotate and --at-once out")
        if self.rotates and (self.rate is not None or self.servers[0] != self.reference):
            raise ServingBenchmarkError("--rotate: leave --rate out, and name 'device' first, if at all")
        if self.reference not in self.groups[0]:
            raise ServingBenchmarkError(
                f"{self.reference!r} has to be in the first group of --at-once servers"
            )
        if self.rounds < 2:
            raise ServingBenchmarkError(f"--rounds {self.rounds}: turns return from the second round on")
        positive = {
            "--history": min(self.history_tokens, default=0),
            "--turn-tokens": self.turn_tokens,
            "--users": self.users,
            "--rate": self.rate,
            "--at-once": self.at_once,
            "--host-share": self.host_share,
            "--ssd-share": self.ssd_share,
            "--device-tokens": self.device_tokens,
            "--ssd-read-mbs": self.ssd_read_mbs,
            "--max-tokens": self.max_tokens,
            "--page-size": self.page_size,
        }
        for option, value in positive.items():
            if value is not None and not value > 0:
                raise ServingBenchmarkError(f"{option} {value} is not possible; expected more than 0")
        if any(has_variant(name, "hints") for name in self.servers) and not self.think_time_s:
            raise ServingBenchmarkError("+hints says when a conversation returns: give it a --think-time")
        if self.think_time_s < 0:
            raise ServingBenchmarkError(f"--think-time {self.think_time_s} is not possible")
        if self.ssd_read_mbs is not None and self.ssd is None and self.ssd_share is None:
            raise ServingBenchmarkError(
                f"--ssd-read-mbs {self.ssd_read_mbs:g} without an SSD tier: give --ssd its capacity"
            )
        for option, size in (("--host-memory", self.host_memory), ("--ssd", self.ssd)):
            try:
                parse_bytes("1" if size is None else size)
            except ValueError as error:
                raise ServingBenchmarkError(f"{option}: {error}") from None
        for name in (*KRUL_SERVERS, *self.krul_servers):
            KrulConfig.from_mapping(self.options_of(name), f"options of {name!r}")

    @property
    def krul_servers(self) -> tuple[str, ...]:
        return tuple(name for name in self.servers if is_krul(name))

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The servers that run at the same time, group after group."""
        size = len(self.servers) if self.at_once is None else max(1, self.at_once)
        return tuple(self.servers[first : first + size] for first in range(0, len(self.servers), size))

    @property
    def longest_history_tokens(self) -> int:
        return max(self.history_tokens)

    @property
    def reference(self) -> str:
        """The server whose answers are in the prompts, and that answers are compared with."""
        return "device" if "device" in self.servers else self.servers[0]

    def options_of(self, name: str) -> dict[str, Any]:
        """Options of a krul server, but for its folders and its host memory."""
        base, *variants = name.split("+")
        own = {"native": {}, "compressed": self.compressed_options, "full-load": {"planner": "full-load"}}
        options = {**self.krul_options, **own[base]}
        for variant in variants:
            options |= VARIANTS.get(variant, {})
        return options

    def error_budget_of(self, name: str) -> float | None:
        """What turns may lose on a server, in nats per predicted token; None where nothing is to be lost."""
        if not is_krul(name) or self.options_of(name).get("strategy") != SUBSPACE:
            return None
        return KrulConfig.from_mapping(self.options_of(name), f"options of {name!r}").error_budget

    def to_json(self) -> dict[str, Any]:
        names = ("model_path", "conversations", "data", "draft_model")
        paths = {name: getattr(self, name) for name in names}
        return {
            **asdict(self),
            **{name: None if path is None else without_cwd(str(path)) for name, path in paths.items()},
        }


def is_krul(name: str) -> bool:
    """Whether the server of this name has krul."""
    return name.split("+")[0] in KRUL_SERVERS


def has_variant(name: str, variant: str) -> bool:
    """Whether a server's name has this one of ``VARIANTS``."""
    return variant in name.split("+")[1:]


def of_kind(base: str, name: str) -> str:
    """The server ``base`` that drafts if the server of this name does: what it is compared with."""
    return f"{base}+{SPECULATIVE}" if has_variant(name, SPECULATIVE) else base


def _check_servers(names: Collection[str]) -> None:
    for name in names:
        base, *variants = name.removesuffix(f"+{SPECULATIVE}").split("+")
        if base not in SERVERS or (variants and not is_krul(name)) or not VARIANTS.keys() >= {*variants}:
            raise ServingBenchmarkError(
                f"--configurations: no {name!r}; accepted are {', '.join(SERVERS)}; "
                f"{', '.join(KRUL_SERVERS)} also followed by +{' or +'.join(VARIANTS)}"
            )
    if not names or len(set(names)) < len(names):
        raise ServingBenchmarkError("--configurations: give one or more names, each once")
