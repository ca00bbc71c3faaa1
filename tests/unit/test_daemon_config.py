from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from krul_backend.daemon.server.config import DaemonConfig
from krul_backend.errors import ConfigError

SMALLEST = 1 << 20


def test_memory_and_a_directory_are_enough() -> None:
    config = DaemonConfig(arena_bytes=SMALLEST, runtime_dir=Path("run"))
    assert (config.ssd_dirs, config.mooncake, config.bucket) == ((), None, None)
    assert (config.eviction, config.tenant_quota, config.exit_when_unused) == ("value", 1.0, False)
    with pytest.raises(FrozenInstanceError):
        config.eviction = "lru"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "given", "accepted"),
    [
        ("arena_bytes", {"arena_bytes": SMALLEST - 1}, "at least 1 MiB"),
        ("ssd_capacity_bytes", {"ssd_capacity_bytes": 1 << 30}, "together with ssd_dir"),
        ("ssd_capacity_bytes", {"ssd_capacity_bytes": 5, "ssd_dirs": (Path("d"),)}, "at least 1 MiB"),
        ("ssd_timeout_s", {"ssd_timeout_s": 0.0}, "positive, finite"),
        ("ssd_timeout_s", {"ssd_timeout_s": float("nan")}, "positive, finite"),
        ("ssd_timeout_s", {"ssd_timeout_s": float("inf")}, "positive, finite"),
        ("ssd_queue_bytes", {"ssd_queue_bytes": 0}, "a positive size"),
        ("eviction", {"eviction": "random"}, "value, lru"),
        ("tenant_quota", {"tenant_quota": 0.0}, "(0, 1]"),
        ("tenant_quota", {"tenant_quota": 1.5}, "(0, 1]"),
        ("metrics_port", {"metrics_port": 65536}, "a port"),
        ("metrics_port", {"metrics_port": -1}, "a port"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(key: str, given: dict[str, Any], accepted: str) -> None:
    values: dict[str, Any] = {"arena_bytes": SMALLEST, "runtime_dir": Path("run"), **given}
    with pytest.raises(ConfigError) as caught:
        DaemonConfig(**values)
    message = str(caught.value)
    assert message.startswith(f"{key}: got ")
    assert str(given[key]).strip("'") in message
    assert accepted in message


def test_a_directory_is_given_once() -> None:
    directories = (Path("d"), Path("e"), Path("d"))
    with pytest.raises(ConfigError, match="ssd_dir: got 'd,e,d', accepted is each directory once"):
        DaemonConfig(arena_bytes=SMALLEST, runtime_dir=Path("run"), ssd_dirs=directories)
