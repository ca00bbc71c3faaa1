"""Eviction policies by their names in the configuration."""

from __future__ import annotations

import time
from collections.abc import Callable

from krul_backend.errors import ConfigError
from krul_backend.tiers.common.eviction import EvictionPolicy, LruPolicy
from krul_backend.tiers.common.value_policy import ValuePolicy

POLICIES = ("value", "lru")


def make_policy(name: str, clock: Callable[[], float] = time.monotonic) -> EvictionPolicy:
    """A new policy that knows no segment; ``clock`` counts seconds.

    Raises:
        ConfigError: there is none of this name.
    """
    if name == "value":
        return ValuePolicy(clock)
    if name == "lru":
        return LruPolicy()
    raise ConfigError(f"eviction policy {name!r} is unknown; accepted are {', '.join(POLICIES)}")
