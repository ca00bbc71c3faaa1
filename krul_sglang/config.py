"""The options of krul: names, defaults, accepted values and what they do. No other place has defaults."""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from krul_backend.codec.pairs.selectors import SELECTORS
from krul_backend.errors import ConfigError
from krul_backend.memory import format_bytes, memory_limit_bytes, parse_bytes
from krul_backend.planner import PLANNERS
from krul_backend.strategy import SUBSPACE, Precision
from krul_backend.tiers.common.eviction import POLICIES

ENV_PREFIX = "KRUL_"
CONFIG_FILE_VARIABLE = "KRUL_CONFIG"
FLAG = "--unified-cache-external-linker-config"

DAEMON_MARK = "*daemon*"
"""Begins the description of each option that belongs to the daemon."""

DEFAULT_HOST_MEMORY_SHARE = 0.25
"""Part of the memory limit (cgroup, else physical) that ``host_memory = "auto"`` takes."""

DEFAULT_QUERY_MEMORY_SHARE = 0.02
"""Part of a device's memory that ``query_memory = "auto"`` takes."""
MIN_QUERY_MEMORY = 512 << 20

AUTO = "auto"
FAST_COPIES = (AUTO, "never")

PRECISIONS = tuple(precision.value for precision in Precision if precision is not Precision.INT2)
"""int8 loses next to nothing without bases, int4 little. Two bits ruin answers: they are there to compare."""

ATTENTION_STRATEGIES = (SUBSPACE, "krul")
"""Strategies that look at a conversation's own attention."""


def _parse_size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("not a size")
    num_bytes = parse_bytes(value)
    if num_bytes <= 0:
        raise ValueError("not positive")
    return num_bytes


def _auto_or(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    """Parses ``"auto"`` as None, and everything else by ``parse``."""

    def parse_or_auto(value: object) -> Any:
        is_auto = isinstance(value, str) and value.strip().lower() == "auto"
        return None if is_auto else parse(value)

    return parse_or_auto


def _number(low: float, high: float, *, is_above: bool = False) -> Callable[[object], float]:
    """Parses a finite number in ``[low, high]``, or with ``is_above`` in ``(low, high]``."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError("not a number")
        number = float(value)
        if not low <= number <= high or math.isinf(number) or (is_above and number == low):
            raise ValueError("out of range")
        return number

    return parse


def _whole_number(low: int, high: float = math.inf) -> Callable[[object], int]:
    """Parses a whole number in ``[low, high]``."""

    def parse(value: object) -> int:
        number = _number(low, high)(value)
        if not number.is_integer():
            raise ValueError("not a whole number")
        return int(number)

    return parse


# How values are parsed, and what is accepted, in words.
_SHARE = _number(0.0, 1.0, is_above=True), "a number in (0, 1]"
_UNIT_INTERVAL = _number(0.0, 1.0), "a number in [0, 1]"
_POSITIVE = _number(0.0, math.inf, is_above=True), "a positive number"
_PORT = _whole_number(0, 65535), "a port number, or 0"


def _parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not text")
    return value.strip()


def _parse_path(value: object) -> str:
    if not _parse_text(value):
        raise ValueError("not a path")
    return str(value)


def _parse_settings(value: object) -> str:
    """``"key=value,key=value"``, also given as an object; kept as text, which every source can carry."""
    if isinstance(value, Mapping):
        value = ",".join(f"{key}={value[key]}" for key in value)
    text = _parse_text(value)
    if text and any("=" not in part for part in text.split(",")):
        raise ValueError("not a list of settings")
    return text


def _parse_switch(value: object) -> bool:
    switches = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.strip().lower() not in switches:
        raise ValueError("not a switch")
    return switches[value.strip().lower()]


_SWITCH = _parse_switch, "true or false"


def _option(default: Any, parse: Callable[[object], Any], accepted: str, description: str) -> Any:
    metadata = {"parse": parse, "accepted": accepted, "description": description}
    return field(default=default, metadata=metadata)


def _choice(default: str, names: Collection[str], description: str) -> Any:
    """An option that takes one of ``names``."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError("unknown")
        return value

    return _option(default, parse, "one of " + ", ".join(names), description)


@dataclass(frozen=True)
class KrulConfig:
    """The options of krul, with their defaults.

    Sources, later ones win: the TOML file named by ``KRUL_CONFIG``, environment variables ``KRUL_<KEY>``,
    the JSON object of SGLang's ``--unified-cache-external-linker-config``.
    """

    host_memory: int | None = _option(
        None,
        _auto_or(_parse_size),
        '"auto", or a positive size such as 8589934592, "8GiB" or "500MB"',
        "*daemon* Host memory in bytes for stored KV, shared by all tensor-parallel ranks of this server. "
        f'"auto" takes {DEFAULT_HOST_MEMORY_SHARE:.0%} of the memory limit (cgroup, else physical). Set a '
        "size where other programs need the memory, or where more conversations should stay.",
    )
    endpoint: str = _option(
        "",
        _parse_text,
        "the runtime directory of a running krul-backend, or empty",
        "Runtime directory of a running daemon to join. Empty: the server starts a daemon of its own, which "
        "ends with it. Set it to share stored KV between the servers of a host, or to keep it while a server "
        "restarts. Options marked *daemon* belong to the joined daemon and are refused here.",
    )
    ssd_dir: str = _option(
        "",
        _parse_text,
        "a path, several between commas, or empty",
        "*daemon* Directory on a local disk; of several disks one on each. KV that leaves host memory is "
        "written there, and survives a restart. Empty: no SSD tier.",
    )
    ssd_capacity: int | None = _option(
        None,
        _auto_or(_parse_size),
        '"auto", or a positive size such as "200GiB"',
        '*daemon* Most bytes that all files in ssd_dir take. "auto" takes half of what is free on its disks.',
    )
    ssd_timeout: float = _option(
        1.0,
        *_POSITIVE,
        "*daemon* Seconds after which a read from disk is given up and the KV is recomputed. Raise it for a "
        "slow or busy disk.",
    )
    ssd_queue: int = _option(
        256 << 20,
        _parse_size,
        'a positive size such as 268435456 or "1GiB"',
        "*daemon* Bytes of stored turns that wait at once to be written to ssd_dir; they stay in host memory "
        "until they are written. What does not fit is offered again when there is room, and lost to the disk "
        "only if it leaves host memory before. Raise it for bursts of turns on a slow disk, up to a part of "
        "host_memory.",
    )
    mooncake: str = _option(
        "",
        _parse_settings,
        'settings such as "master_address=10.0.0.1:50051,local_hostname=10.0.0.2", or empty',
        "*daemon* Settings of a Mooncake Store cluster, through which hosts share stored KV; needs "
        "`krul-sglang[mooncake]`. With `replicas=2` each segment lies on two hosts and outlives one. "
        "All settings: [tiers.md](tiers.md#the-mooncake-tier). Empty: no cluster.",
    )
    bucket: str = _option(
        "",
        _parse_settings,
        'settings such as "url=s3://my-kv/krul", or empty',
        "*daemon* Settings of a bucket (S3, GCS, Azure, or a directory that hosts share), in which stored KV "
        "outlives hosts; needs `krul-sglang[bucket]`. Keys and endpoint come from the environment. All "
        "settings: [tiers.md](tiers.md#buckets). Empty: no bucket.",
    )
    eviction: str = _choice(
        "value",
        POLICIES,
        '*daemon* What leaves a full tier first. "value" weighs the time that a segment saves against its '
        'bytes and the time since its last use; "lru" looks at the last use only.',
    )
    tenant_quota: float = _option(
        1.0,
        *_SHARE,
        "*daemon* Largest share of host memory that one tenant (`cache_salt`, `extra_key`) may take. Lower "
        "it where one tenant must not push the others out.",
    )
    metrics_port: int = _option(
        0, *_PORT, "*daemon* Local port on which the daemon serves Prometheus metrics; 0: none."
    )
    hints_port: int = _option(
        0,
        *_PORT,
        "*daemon* Local port on which the daemon takes hints of applications about their conversations "
        "(docs/agents.md), from whoever has the token in its runtime directory, and serves its web page "
        "(docs/serving.md); 0: none. Requests carry hints without it.",
    )

    strategy: str = _choice(
        "none",
        (*SELECTORS, SUBSPACE),
        'Which layers share their KV. "none" shares nothing, and at native precision loses nothing. '
        '"subspace" stores groups of layers in bases of the model, as small as error_budget allows; they '
        "are learned at a model's first start, unless `krul-sglang learn` did it before. The others put r_l "
        "of the layers into pairs, as in the papers.",
    )
    precision: str = _choice(
        "native",
        PRECISIONS,
        'Precision of stored vectors; "native" is the element type of the KV pool. Lower precision takes '
        'less memory and changes answers. The strategy "subspace" ignores it.',
    )
    r_l: float = _option(
        0.5,
        *_UNIT_INTERVAL,
        "Share of all layers that the sharing strategies put into pairs. More saves memory and loses "
        "accuracy.",
    )
    gamma: float = _option(
        0.6,
        *_UNIT_INTERVAL,
        'For "krul": a layer may share only if at least this share of its attention goes to the first and '
        "the last tenth of the tokens that it sees. Lower it if too few layers are shared.",
    )
    error_budget: float = _option(
        0.01,
        *_POSITIVE,
        'For the strategy "subspace": the damage allowed to a conversation over all its turns, as the mean '
        "KL divergence of next-token distributions in nats. More saves memory and changes answers more.",
    )
    probe_share: float = _option(
        0.05,
        *_UNIT_INTERVAL,
        'For the strategy "subspace": share of turns after which an idle server measures how much '
        "compression changes the model's answers, to keep the budget true. 0 stops measuring.",
    )
    relearn: bool = _option(
        True,
        *_SWITCH,
        'For the strategy "subspace": learn the bases again, in a process beside the server, when much text '
        "is unlike what they were learned from. Recent turns are then learned from, too, but not those of "
        "requests with `cache_salt` or `extra_key`. Bases hold means and covariances over thousands of "
        "tokens, but no text. Set it to false where clients must have no influence on each other, or no "
        "cores are to spare.",
    )
    fast_copies: str = _choice(
        AUTO,
        FAST_COPIES,
        "For strategies that compress: turns are stored as they are at first, and encoded when the server is "
        'idle or memory asks for room. "auto" keeps the exact copy beside the encoded one until something '
        'else needs its memory, and restores from it as long as it is there. "never" drops it at once.',
    )
    truncation_reuse: bool = _option(
        False,
        *_SWITCH,
        "Restore the turns that a client kept when it dropped the oldest ones, with keys turned to their new "
        "positions. Their KV was computed when the dropped turns were before them, so answers differ from "
        "those of a server that computes the shorter prompt.",
    )
    query_rows: int = _option(
        64,
        _whole_number(16, 1024),
        "a whole number from 16 to 1024",
        'Query vectors that "subspace" and "krul" keep of each turn, half of them of the prompt; fewer, down '
        "to 16, if otherwise query_memory would not do for 96 requests at a time.",
    )
    query_memory: int | None = _option(
        None,
        _auto_or(_parse_size),
        '"auto", or a positive size such as 536870912 or "512MiB"',
        "Device memory in bytes for those query vectors, per rank. Requests for which it has no room are not "
        "recorded: raise it where many requests run at a time. "
        f'"auto" takes {DEFAULT_QUERY_MEMORY_SHARE:.0%} of the device\'s memory (on a CPU: of the memory '
        "limit), but no less than 512 MiB.",
    )

    planner: str = _choice(
        "local-search",
        PLANNERS,
        "How each layer of a returning prefix is split into a head that is recomputed and a tail that is "
        'loaded. "local-search" looks for the split that ends first by the costs measured on this machine. '
        '"full-load" loads all that is stored: choose it where restored KV must be to the bit what was '
        'stored. "pyramid" is the plan of the Krul paper.',
    )
    store_full_tail: bool = _option(
        False,
        *_SWITCH,
        "Store every token in every layer. Otherwise tokens that the planner would recompute when the "
        "conversation returns are left out, which takes less memory. Set it where memory is plentiful and "
        "costs vary, or where many conversations share long prefixes.",
    )
    max_head_tokens: int | None = _option(
        None,
        _auto_or(_whole_number(0)),
        '"auto", or a whole number that is not negative',
        "Most tokens that are recomputed for the requests of one batch together; other requests of the batch "
        'wait for them. "auto" takes as many as the server prefills at once (--chunked-prefill-size). Raise '
        "it where long conversations return and decoding may pause.",
    )
    load_timeout: float | None = _option(
        None,
        _auto_or(_POSITIVE[0]),
        '"auto", or a positive number',
        "A load that stands still for its planned time and this many seconds is given up, and what is "
        'missing is computed. "auto" takes a twentieth of the time that computing all of it takes. Raise it '
        "where a disk or a network may pause for longer, and loads should be waited for all the same.",
    )

    link_mbs: float = _option(
        0.0,
        _number(0.0, 1e9),
        "a number that is not negative",
        "For measurements, never for serving: loads into the device pool take as long as through a bus or a "
        "network of so many megabytes (1e6 bytes) per second; 0: as fast as they are.",
    )

    cache_dir: str = _option(
        "~/.cache/krul-sglang",
        _parse_path,
        "a path",
        "Directory that keeps between runs what was learned of a model (the bases that its KV is compressed "
        "in) and what was measured on this machine.",
    )

    @property
    def is_lossless(self) -> bool:
        """Whether compression loses nothing: what is stored is the KV of the pool, to the bit."""
        return self.strategy == "none" and self.precision == Precision.NATIVE.value

    @property
    def needs_attention(self) -> bool:
        """Whether the strategy looks at a conversation's own attention."""
        return self.strategy in ATTENTION_STRATEGIES

    def host_memory_bytes(self, *, num_ranks: int) -> int:
        """Bytes of host memory for one rank when ``num_ranks`` share this host.

        Raises:
            ConfigError: if the budget is larger than the memory limit of this machine or cgroup.
        """
        limit = memory_limit_bytes()
        total = self.host_memory
        if total is None:
            total = int(limit * DEFAULT_HOST_MEMORY_SHARE)
        if total > limit:
            raise ConfigError(
                f"host_memory = {format_bytes(total)} is larger than the memory of this machine or cgroup "
                f'({format_bytes(limit)}); choose less, or "auto"'
            )
        return total // num_ranks

    def query_memory_bytes(self, device_bytes: int) -> int:
        """``query_memory``; if that is "auto", a part of the ``device_bytes`` that a device has.

        Of whole GiB, which are the same on all ranks, so that all record the same requests.
        """
        if self.query_memory is not None:
            return self.query_memory
        return max(MIN_QUERY_MEMORY, int((device_bytes >> 30 << 30) * DEFAULT_QUERY_MEMORY_SHARE))

    def head_token_limit(self, prefill_tokens: int) -> int:
        """``max_head_tokens``; if that is "auto", the ``prefill_tokens`` that the server computes at once."""
        return prefill_tokens if self.max_head_tokens is None else self.max_head_tokens

    @property
    def ssd_dirs(self) -> list[Path]:
        """The directories of ``ssd_dir``."""
        return [Path(name.strip()).expanduser() for name in self.ssd_dir.split(",") if name.strip()]

    def as_dict(self) -> dict[str, Any]:
        """Plain values that ``from_mapping`` accepts again."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        for name in ("host_memory", "ssd_capacity", "query_memory", "max_head_tokens", "load_timeout"):
            if values[name] is None:
                values[name] = "auto"
        return values

    def check_endpoint(self) -> None:
        """Check that no option of a daemon is given when a running daemon is joined.

        Raises:
            ConfigError: names the options that differ from their defaults.
        """
        if not self.endpoint:
            return
        given = [
            option.name
            for option in fields(self)
            if option.metadata["description"].startswith(DAEMON_MARK)
            and getattr(self, option.name) != option.default
        ]
        if given:
            raise ConfigError(
                f"endpoint = {self.endpoint!r} joins a daemon that has its own {', '.join(given)}: "
                "give these to krul-backend serve"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], source: str) -> KrulConfig:
        """The defaults, overridden by ``values``, which come from ``source``.

        Raises:
            ConfigError: names the key, what was given, what is accepted, and ``source``.
        """
        return cls(**_parse_values(values, source))

    @classmethod
    def load(
        cls, flag_values: Mapping[str, object] | None, env: Mapping[str, str] | None = None
    ) -> KrulConfig:
        """Merge file, environment and flag.

        ``flag_values`` is the decoded JSON object of the flag, None when the flag is absent; ``env``
        defaults to the process environment.

        Raises:
            ConfigError: on an unreadable file, an unknown key or a bad value, whichever comes first.
        """
        env = os.environ if env is None else env
        merged: dict[str, Any] = {}
        path = env.get(CONFIG_FILE_VARIABLE)
        if path is not None:
            merged.update(_parse_values(_read_toml(path), f"{CONFIG_FILE_VARIABLE}={path}"))
        for name in sorted(env):
            if name.startswith(ENV_PREFIX) and name != CONFIG_FILE_VARIABLE:
                key = name.removeprefix(ENV_PREFIX).lower()
                merged.update(_parse_values({key: env[name]}, f"environment variable {name}"))
        if flag_values is not None:
            merged.update(_parse_values(flag_values, FLAG))
        return cls(**merged)


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{CONFIG_FILE_VARIABLE}={path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{CONFIG_FILE_VARIABLE}={path}: is not TOML: {error}") from error


def _parse_values(values: Mapping[str, object], source: str) -> dict[str, Any]:
    options = {option.name: option for option in fields(KrulConfig)}
    parsed = {}
    for key, value in values.items():
        option = options.get(key)
        if option is None:
            close = difflib.get_close_matches(key, options, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{source}: unknown key {key!r}{hint} (accepted: {', '.join(options)})")
        try:
            parsed[key] = option.metadata["parse"](value)
        except ValueError as error:
            accepted = option.metadata["accepted"]
            raise ConfigError(f"{source}: {key} = {value!r} is not accepted: give {accepted}") from error
    return parsed
