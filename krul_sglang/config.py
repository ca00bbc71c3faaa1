"""The configuration of krul: the only place for defaults."""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from krul_backend.errors import ConfigError
from krul_backend.memory import format_bytes, memory_limit_bytes, parse_bytes
from krul_backend.planner.planners import PLANNER_NAMES
from krul_backend.strategy.registry import SELECTOR_NAMES
from krul_backend.strategy.strategy import Precision
from krul_backend.tiers.common.policy_registry import POLICIES

ENV_PREFIX = "KRUL_"
CONFIG_FILE_VARIABLE = "KRUL_CONFIG"
FLAG = "--unified-cache-external-linker-config"

DAEMON_MARK = "*daemon*"
"""How the description of an option begins that is the daemon's."""

DEFAULT_HOST_MEMORY_SHARE = 0.25
"""Part of the memory limit (cgroup, else physical) that ``host_memory = "auto"`` takes."""


ESTIMATORS = ("sampled", "heterogeneous", "exact")

FAULTS = ("none", "load-error", "load-stall", "skip-heads")

PRECISIONS = tuple(precision.value for precision in Precision if precision is not Precision.INT0)


ATTENTION_STRATEGIES = ("budget", "krul", "matching")
"""Strategies that are chosen from a conversation's own attention."""


def _parse_size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("not a size")
    num_bytes = parse_bytes(value)
    if num_bytes <= 0:
        raise ValueError("not positive")
    return num_bytes


def _parse_host_memory(value: object) -> int | None:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    return _parse_size(value)


def _parse_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    return float(value)


def _parse_share(value: object) -> float:
    share = _parse_number(value)
    if not 0.0 < share <= 1.0:
        raise ValueError("out of range")
    return share


def _parse_unit_interval(value: object) -> float:
    number = _parse_number(value)
    if not 0.0 <= number <= 1.0:
        raise ValueError("out of range")
    return number


def _parse_positive(value: object) -> float:
    number = _parse_number(value)
    if not 0.0 < number < math.inf:
        raise ValueError("out of range")
    return number


def _parse_query_rows(value: object) -> int:
    number = _parse_number(value)
    if not number.is_integer() or not 16 <= number <= 1024:
        raise ValueError("out of range")
    return int(number)


def _parse_capacity(value: object) -> int | None:
    return _parse_host_memory(value)


def _parse_optional_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not text")
    return value.strip()


def _parse_eviction(value: object) -> str:
    if value not in POLICIES:
        raise ValueError("unknown")
    return str(value)


def _parse_port(value: object) -> int:
    port = _parse_token_count(value)
    if port > 65535:
        raise ValueError("out of range")
    return port


def _parse_mooncake(value: object) -> str:
    """``"key=value,key=value"``, also given as an object; kept as text, which every source can carry."""
    if isinstance(value, Mapping):
        value = ",".join(f"{key}={value[key]}" for key in value)
    text = _parse_optional_text(value)
    if text and any("=" not in part for part in text.split(",")):
        raise ValueError("not a list of settings")
    return text


def _parse_path(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("not a path")
    return value


def _parse_strategy(value: object) -> str:
    if value not in SELECTOR_NAMES:
        raise ValueError("unknown")
    return str(value)


def _parse_precision(value: object) -> str:
    if value not in PRECISIONS:
        raise ValueError("unknown")
    return str(value)


def _parse_planner(value: object) -> str:
    if value not in PLANNER_NAMES:
        raise ValueError("unknown")
    return str(value)


def _parse_switch(value: object) -> bool:
    switches = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.strip().lower() not in switches:
        raise ValueError("not a switch")
    return switches[value.strip().lower()]


def _parse_token_count(value: object) -> int:
    number = _parse_number(value)
    if not number.is_integer() or number < 0:
        raise ValueError("out of range")
    return int(number)


def _parse_max_head_tokens(value: object) -> int | None:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    return _parse_token_count(value)


def _parse_fault(value: object) -> str:
    if value not in FAULTS:
        raise ValueError("unknown")
    return str(value)


def _parse_estimator(value: object) -> str:
    if value not in ESTIMATORS:
        raise ValueError("unknown")
    return str(value)


def _option(default: Any, parse: Callable[[object], Any], accepted: str, description: str) -> Any:
    metadata = {"parse": parse, "accepted": accepted, "description": description}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class KrulConfig:
    """What a user may set, with the defaults.

    Sources, later ones win: the TOML file named by ``KRUL_CONFIG``, environment variables ``KRUL_<KEY>``,
    the JSON object of SGLang's ``--unified-cache-external-linker-config``.
    """

    host_memory: int | None = _option(
        None,
        _parse_host_memory,
        '"auto", or a positive size such as 8589934592, "8GiB" or "500MB"',
        "*daemon* Host memory in bytes for stored KV, all tensor-parallel ranks of this server together. "
        f'"auto" takes {DEFAULT_HOST_MEMORY_SHARE:.0%} of the memory limit (cgroup, else physical).',
    )
    endpoint: str = _option(
        "",
        _parse_optional_text,
        "the runtime directory of a running krul-backend, or empty",
        "The daemon to join; options marked *daemon* are then its own, and refused here. Empty: the server "
        "starts one, which ends with it.",
    )
    ssd_dir: str = _option(
        "",
        _parse_optional_text,
        "a path, or empty",
        "*daemon* Directory on a local disk for stored KV that leaves host memory, and that is to survive "
        "a restart. Empty: no SSD tier.",
    )
    ssd_capacity: int | None = _option(
        None,
        _parse_capacity,
        '"auto", or a positive size such as "200GiB"',
        '*daemon* Most bytes that files in ssd_dir take. "auto" takes half of what is free on that disk.',
    )
    ssd_timeout: float = _option(
        1.0,
        _parse_positive,
        "a positive number",
        "*daemon* Seconds after which a read from disk is given up, and the KV recomputed.",
    )
    mooncake: str = _option(
        "",
        _parse_mooncake,
        'settings such as "master_address=10.0.0.1:50051,local_hostname=10.0.0.2", or empty',
        "*daemon* A Mooncake Store cluster that shares stored KV between hosts; needs "
        "`krul-sglang[mooncake]`. Empty: none.",
    )
    eviction: str = _option(
        "value",
        _parse_eviction,
        "one of " + ", ".join(POLICIES),
        '*daemon* What leaves a full tier first: "value" weighs the time that a segment saves by its bytes '
        'and by how long nobody used it; "lru" looks at the last use only.',
    )
    tenant_quota: float = _option(
        1.0,
        _parse_share,
        "a number in (0, 1]",
        "*daemon* Largest part of host memory that one tenant (`cache_salt`, `extra_key`) may take.",
    )
    metrics_port: int = _option(
        0,
        _parse_port,
        "a port number, or 0",
        "*daemon* Local port for Prometheus metrics of the daemon; 0: none.",
    )
    max_pending_share: float = _option(
        0.25,
        _parse_share,
        "a number in (0, 1]",
        "Largest part of the device pool that turns waiting to be stored may hold; a turn that would "
        "exceed it is not stored, and counted.",
    )

    strategy: str = _option(
        "none",
        _parse_strategy,
        "one of " + ", ".join(SELECTOR_NAMES),
        "How it is decided which layers share their KV, and at which precision each is stored.",
    )
    precision: str = _option(
        "native",
        _parse_precision,
        "one of " + ", ".join(PRECISIONS),
        'Precision of stored vectors; "native" is the KV pool\'s own element type. The strategy "budget" '
        "chooses it by itself.",
    )
    r_l: float = _option(
        0.5,
        _parse_unit_interval,
        "a number in [0, 1]",
        "Share of all layers that the sharing strategies put into pairs.",
    )
    gamma: float = _option(
        0.6,
        _parse_unit_interval,
        "a number in [0, 1]",
        "A layer shares only if at least so much of its attention goes to the first and last tenth of what "
        "it sees.",
    )
    error_budget: float = _option(
        0.01,
        _parse_positive,
        "a positive number",
        'For the strategy "budget": the damage allowed to a conversation over all its turns, as the mean '
        "divergence of next-token distributions in nats.",
    )
    probe_share: float = _option(
        0.05,
        _parse_unit_interval,
        "a number in [0, 1]",
        'For the strategy "budget": share of turns after which an idle server measures what its compression '
        "does to the model's answers.",
    )
    estimator: str = _option(
        "sampled",
        _parse_estimator,
        "one of " + ", ".join(ESTIMATORS),
        'What attention statistics are computed from: "sampled" keeps a few query vectors of each turn and '
        'reduces them when it ends; "heterogeneous" reduces every prompt token in a process of its own and '
        'every decoded token at its step, as the Krul paper does; "exact" reduces every token at once. The '
        "last two need a server without CUDA graphs and slow every step down.",
    )
    query_rows: int = _option(
        256,
        _parse_query_rows,
        "a whole number from 16 to 1024",
        "Query vectors kept of each turn for attention statistics, half of them from the prompt; fewer, down "
        "to 64, where query_memory is short.",
    )
    query_memory: int = _option(
        512 << 20,
        _parse_size,
        'a positive size such as 536870912 or "512MiB"',
        "Device memory in bytes for those query vectors, per rank; requests beyond it are not recorded.",
    )
    map_memory: int = _option(
        512 << 20,
        _parse_size,
        'a positive size such as 536870912 or "512MiB"',
        'For the strategy "budget": bytes per rank, of host memory while it is learned how to predict layers '
        "from their neighbours, then of device memory for what was learned; it bounds the number of pairs.",
    )

    planner: str = _option(
        "local-search",
        _parse_planner,
        "one of " + ", ".join(PLANNER_NAMES),
        "How each layer of a returning prefix is split into a head that is recomputed and a tail that is "
        'loaded: "local-search" looks for the split that ends first by the costs measured on this machine; '
        '"full-load" loads everything there is and "full-recompute" nothing; "uniform" and "pyramid" are '
        "those of the Krul paper; "
        '"random" is for tests.',
    )
    store_full_tail: bool = _option(
        False,
        _parse_switch,
        "true or false",
        "Store every token in every layer. Otherwise tokens that the planner would recompute when the "
        "conversation returns are left out, which takes less memory.",
    )
    max_head_tokens: int | None = _option(
        None,
        _parse_max_head_tokens,
        '"auto", or a whole number that is not negative',
        "Most tokens that are recomputed for the requests of one batch together; others of the batch wait "
        'for them. "auto" takes as many as the server prefills at once (--chunked-prefill-size).',
    )
    load_timeout: float = _option(
        2.0,
        _parse_positive,
        "a positive number",
        "Seconds, beyond those that its plan expects, after which a load of which no further layer has "
        "landed is given up, and recomputed.",
    )

    fault_injection: str = _option(
        "none",
        _parse_fault,
        "one of " + ", ".join(FAULTS),
        "For tests of a deployment, never for serving: let every second load fail, or stop, at some layer; "
        '"skip-heads" leaves heads uncomputed, which gives wrong answers.',
    )

    cache_dir: str = _option(
        "~/.cache/krul-sglang",
        _parse_path,
        "a path",
        "Where what was learned of a model (its sensitivity to compression, and how its layers predict each "
        "other) and what was measured on this machine are kept between runs.",
    )

    @property
    def is_lossless(self) -> bool:
        """Whether restored KV is to the bit what was stored."""
        return self.strategy == "none" and self.precision == Precision.NATIVE.value

    @property
    def needs_query_rows(self) -> bool:
        """Whether the strategy looks at query vectors themselves, beside statistics."""
        return self.strategy == "budget"

    @property
    def needs_attention(self) -> bool:
        """Whether the strategy is chosen from a conversation's own attention."""
        return self.strategy in ATTENTION_STRATEGIES

    def host_memory_bytes(self, *, num_ranks: int) -> int:
        """Arena bytes of one rank when ``num_ranks`` share this host.

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

    def head_token_limit(self, prefill_tokens: int) -> int:
        """``max_head_tokens``; if that is "auto", the ``prefill_tokens`` that the server computes at once."""
        return prefill_tokens if self.max_head_tokens is None else self.max_head_tokens

    def as_dict(self) -> dict[str, Any]:
        """Plain values that ``from_mapping`` accepts again."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        for name in ("host_memory", "ssd_capacity", "max_head_tokens"):
            if values[name] is None:
                values[name] = "auto"
        return values

    def check_endpoint(self) -> None:
        """Refuse options of a daemon when one is joined.

        Raises:
            ConfigError: names those that differ from their defaults.
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
        """Defaults overridden by ``values``.

        Raises:
            ConfigError: names the key, what was given, what is accepted and ``source``.
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
