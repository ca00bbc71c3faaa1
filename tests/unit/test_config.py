from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import orjson
import pytest

from krul_backend.errors import ConfigError
from krul_sglang.config import DAEMON_MARK, FLAG, KrulConfig

GIB = 1 << 30


def test_defaults() -> None:
    config = KrulConfig.load(None, env={})
    assert config == KrulConfig()
    assert (config.host_memory, config.strategy, config.precision) == (None, "none", "native")


def share_of(host_memory: int) -> KrulConfig:
    return KrulConfig(host_memory=host_memory, tenant_quota=0.5)


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "krul.toml"
    file.write_text('host_memory = "1GiB"\ntenant_quota = 0.5\n')
    env = {"KRUL_CONFIG": str(file), "KRUL_HOST_MEMORY": "2GiB", "PATH": "/bin"}
    assert KrulConfig.load(None, env={"KRUL_CONFIG": str(file)}) == share_of(GIB)
    assert KrulConfig.load(None, env=env) == share_of(2 * GIB)
    assert KrulConfig.load({"host_memory": 3 * GIB}, env=env) == share_of(3 * GIB)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"host_memmory": "1GiB"}, ("'host_memmory'", "did you mean 'host_memory'?", "tenant_quota")),
        ({"host_memory": -1}, ("host_memory = -1", "positive size")),
        ({"host_memory": "-4GiB"}, ("host_memory = '-4GiB'", "positive size")),
        ({"host_memory": 0}, ("host_memory = 0",)),
        ({"host_memory": True}, ("host_memory = True",)),
        ({"host_memory": "many"}, ("host_memory = 'many'",)),
        ({"tenant_quota": 0}, ("tenant_quota = 0", "(0, 1]")),
        ({"tenant_quota": 1.5}, ("tenant_quota = 1.5",)),
        ({"tenant_quota": "half"}, ("tenant_quota = 'half'",)),
        ({"tenant_quota": [1]}, ("tenant_quota = [1]",)),
        ({"strategy": "best"}, ("strategy = 'best'", "minicache")),
        ({"strategy": ["krul"]}, ("strategy = ['krul']",)),
        ({"precision": "int3"}, ("precision = 'int3'", "native, int8, int4")),
        ({"precision": "int2"}, ("precision = 'int2'", "native, int8, int4")),
        ({"r_l": -0.1}, ("r_l = -0.1", "[0, 1]")),
        ({"gamma": "nan"}, ("gamma = 'nan'",)),
        ({"error_budget": 0}, ("error_budget = 0", "positive")),
        ({"error_budget": "inf"}, ("error_budget = 'inf'",)),
        ({"probe_share": 2}, ("probe_share = 2",)),
        ({"query_rows": 17.5}, ("query_rows = 17.5", "whole number")),
        ({"query_rows": 8}, ("query_rows = 8",)),
        ({"query_memory": 0}, ("query_memory = 0",)),
        ({"endpoint": 7}, ("endpoint = 7", "runtime directory")),
        ({"ssd_dir": ["/mnt"]}, ("ssd_dir = ['/mnt']", "a path")),
        ({"ssd_capacity": "half"}, ("ssd_capacity = 'half'", '"auto"')),
        ({"ssd_capacity": -1}, ("ssd_capacity = -1",)),
        ({"ssd_timeout": 0}, ("ssd_timeout = 0", "positive")),
        ({"ssd_queue": 0}, ("ssd_queue = 0", "a positive size")),
        ({"mooncake": "10.0.0.1:50051"}, ("mooncake = '10.0.0.1:50051'", "master_address=")),
        ({"mooncake": {"master": "a,b"}}, ("mooncake = {'master': 'a,b'}",)),
        ({"eviction": "fifo"}, ("eviction = 'fifo'", "value, lru")),
        ({"eviction": ["lru"]}, ("eviction = ['lru']",)),
        ({"max_head_tokens": "some"}, ("max_head_tokens = 'some'", '"auto"')),
        ({"max_head_tokens": -1}, ("max_head_tokens = -1",)),
        ({"metrics_port": 65536}, ("metrics_port = 65536", "port")),
        ({"metrics_port": -1}, ("metrics_port = -1",)),
        ({"metrics_port": "http"}, ("metrics_port = 'http'",)),
    ],
)
def test_bad_values_name_key_given_and_accepted(values: dict[str, object], wanted: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        KrulConfig.load(values, env={})
    assert "\n" not in str(error.value)
    for part in (FLAG, *wanted):
        assert part in str(error.value)


def test_an_unknown_environment_variable_is_an_error() -> None:
    with pytest.raises(ConfigError, match="environment variable KRUL_HOST_MEMORI"):
        KrulConfig.load(None, env={"KRUL_HOST_MEMORI": "1GiB"})


def test_a_file_that_is_missing_or_no_toml_is_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        KrulConfig.load(None, env={"KRUL_CONFIG": str(missing)})
    broken = tmp_path / "broken.toml"
    broken.write_text("host_memory = = 1\n")
    with pytest.raises(ConfigError, match=r"broken\.toml: is not TOML"):
        KrulConfig.load(None, env={"KRUL_CONFIG": str(broken)})


def test_budget_is_shared_by_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("krul_sglang.config.memory_limit_bytes", lambda: 16 * GIB)
    assert KrulConfig(host_memory=8 * GIB).host_memory_bytes(num_ranks=4) == 2 * GIB
    assert KrulConfig().host_memory_bytes(num_ranks=1) == 4 * GIB
    with pytest.raises(ConfigError, match=r"host_memory = .*larger than the memory"):
        KrulConfig(host_memory=17 * GIB).host_memory_bytes(num_ranks=1)


@pytest.mark.parametrize(
    ("given", "device_gib", "expected"),
    [
        ("auto", 8, 512 << 20),
        ("auto", 80, int(1.6 * (1 << 30))),
        ("1GiB", 80, 1 << 30),
        ("64MiB", 8, 64 << 20),
    ],
)
def test_memory_of_query_rows(given: str, device_gib: int, expected: int) -> None:
    """Devices of one kind do not report the same to the byte, but their ranks record the same requests."""
    config = KrulConfig.load({"query_memory": given}, env={})
    for more in (0, 12345, (1 << 30) - 1):
        assert config.query_memory_bytes((device_gib << 30) + more) == expected


def test_as_dict_round_trips() -> None:
    for config in (
        KrulConfig(),
        KrulConfig(host_memory=123, tenant_quota=1.0, max_head_tokens=0),
        KrulConfig(
            ssd_dir="/mnt/kv",
            ssd_capacity=456,
            mooncake="master_address=a:1,metadata_server=b",
            eviction="lru",
        ),
    ):
        # Over JSON, as SGLang hands it to the scheduler processes.
        values = orjson.loads(orjson.dumps(config.as_dict()))
        assert KrulConfig.from_mapping(values, "test") == config


def test_the_page_of_the_configuration_lists_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert set(rows) == {option.name for option in fields(KrulConfig)}
    for option in fields(KrulConfig):
        is_daemons = option.metadata["description"].startswith(DAEMON_MARK)
        assert (DAEMON_MARK in rows[option.name].split(" | ")[3][:12]) == is_daemons


def test_heads_of_a_batch_are_at_most_what_the_server_prefills_at_once() -> None:
    """Longer ones, or a load that is waited for longer, would hold up the tokens of everybody else."""
    assert KrulConfig().head_token_limit(prefill_tokens=2048) == 2048
    assert KrulConfig.load({"max_head_tokens": "auto"}, env={}) == KrulConfig()
    for given in (0, 100_000):
        config = KrulConfig.load({"max_head_tokens": given}, env={})
        assert config.head_token_limit(prefill_tokens=2048) == given
    assert KrulConfig.load({"load_timeout": "auto"}, env={}) == KrulConfig()


def test_options_of_the_daemon() -> None:
    config = KrulConfig.load(
        {
            "ssd_dir": " /mnt/kv ",
            "ssd_capacity": "2GiB",
            "ssd_timeout": "0.5",
            "mooncake": {"master_address": "10.0.0.1:50051", "replicas": 2},
            "eviction": "lru",
            "tenant_quota": 0.25,
            "metrics_port": "9400",
        },
        env={},
    )
    assert (config.ssd_dir, config.ssd_capacity, config.ssd_timeout) == ("/mnt/kv", 2 * GIB, 0.5)
    assert config.mooncake == "master_address=10.0.0.1:50051,replicas=2"
    assert (config.eviction, config.tenant_quota, config.metrics_port) == ("lru", 0.25, 9400)
    assert KrulConfig.load({"ssd_capacity": "auto"}, env={}).ssd_capacity is None
    assert KrulConfig.load(None, env={"KRUL_MOONCAKE": "a=b,c=d"}).mooncake == "a=b,c=d"


def test_a_daemon_that_is_joined_keeps_its_own_options() -> None:
    KrulConfig(endpoint="/run/krul", load_timeout=1.0, cache_dir="/x").check_endpoint()
    KrulConfig(host_memory=GIB, ssd_dir="/mnt/kv", metrics_port=9400).check_endpoint()
    refused = KrulConfig(endpoint="/run/krul", host_memory=GIB, eviction="lru", load_timeout=0.5)
    with pytest.raises(ConfigError) as error:
        refused.check_endpoint()
    assert "endpoint = '/run/krul'" in str(error.value)
    assert "its own host_memory, eviction: give these to krul-backend serve" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host_memory", GIB),
        ("ssd_dir", "/mnt/kv"),
        ("ssd_capacity", GIB),
        ("ssd_timeout", 2.0),
        ("ssd_queue", GIB),
        ("mooncake", "a=b"),
        ("eviction", "lru"),
        ("tenant_quota", 0.5),
        ("metrics_port", 9400),
    ],
)
def test_every_option_of_the_daemon_is_refused_beside_an_endpoint(name: str, value: object) -> None:
    config = KrulConfig.load({"endpoint": "/run/krul", name: value}, env={})
    with pytest.raises(ConfigError, match=name):
        config.check_endpoint()
