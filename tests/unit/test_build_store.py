from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from krul_backend.daemon.server.build_store import build_store, default_ssd_capacity, parse_options
from krul_backend.daemon.server.config import DaemonConfig
from krul_backend.errors import ConfigError
from tests.support.ssd_builders import disk_bytes, open_tier, put
from tests.support.store_builders import make_model, page_keys


@dataclass(frozen=True)
class Options:
    address: str
    limit_s: float = 0.5
    size_bytes: int = 7


def test_options_are_parsed_by_their_types() -> None:
    given = {"address": "host:1", "limit_s": "1.5", "size_bytes": "2MiB"}
    assert parse_options(Options, "tier", given) == Options("host:1", 1.5, 2 << 20)
    assert parse_options(Options, "tier", {"address": "7"}) == Options("7")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adress": "x"}, "tier: got 'adress', accepted are address, limit_s, size_bytes"),
        ({"limit_s": "1"}, "tier: address is needed, got limit_s"),
        ({"address": "x", "limit_s": "soon"}, "tier: limit_s='soon'"),
        ({"address": "x", "size_bytes": "big"}, "tier: size_bytes='big'"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(Options, "tier", given)
    assert str(caught.value).startswith(said)


def test_half_of_the_free_disk_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    directory = tmp_path / "not" / "there"
    assert default_ssd_capacity([directory]) == 5_000
    tier = open_tier(directory)
    put(tier, "a")
    tier.close()
    own_bytes = disk_bytes(directory)
    assert own_bytes > 8192
    assert default_ssd_capacity([directory]) == 5_000 + own_bytes // 2, "a restart does not shrink it"
    assert default_ssd_capacity([directory, tmp_path]) == 5_000 + own_bytes // 2, "on one disk"


def test_what_others_have_on_the_disk_is_not_counted_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    open_tier(tmp_path).close()
    (own,) = tmp_path.iterdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "krul-v1").symlink_to(elsewhere)
    for foreign in (tmp_path / "model.safetensors", elsewhere / "00000001.log", own / "00000001.log"):
        foreign.write_bytes(bytes(50_000))
    (own / "00000002.log").symlink_to(elsewhere / "00000001.log")
    assert default_ssd_capacity([tmp_path]) == 5_000


def test_memory_alone_is_a_store_of_one_tier(tmp_path: Path) -> None:
    store = build_store(DaemonConfig(arena_bytes=1 << 20, runtime_dir=tmp_path, tenant_quota=0.5))
    assert store.host.buffer.nbytes == 1 << 20
    assert store.tier_costs() == {}
    assert store.find_missing(make_model(), page_keys("c", 0, 2)) == [range(2)]
    assert store.reserve((600_000,), "one tenant") is None
    store.close()


def test_memory_that_cannot_be_had_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="arena_bytes: got"):
        build_store(DaemonConfig(arena_bytes=1 << 62, runtime_dir=tmp_path))
