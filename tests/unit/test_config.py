from __future__ import annotations

from pathlib import Path

import pytest

from krul_backend.errors import ConfigError
from krul_sglang.config import FLAG, KrulConfig

GIB = 1 << 30


def test_defaults() -> None:
    config = KrulConfig.load(None, env={})
    assert config == KrulConfig()
    assert (config.host_memory, config.strategy, config.precision) == (None, "none", "native")


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "krul.toml"
    file.write_text('host_memory = "1GiB"\nmax_pending_share = 0.5\n')
    env = {"KRUL_CONFIG": str(file), "KRUL_HOST_MEMORY": "2GiB", "PATH": "/bin"}
    assert KrulConfig.load(None, env={"KRUL_CONFIG": str(file)}) == KrulConfig(GIB, 0.5)
    assert KrulConfig.load(None, env=env) == KrulConfig(2 * GIB, 0.5)
    assert KrulConfig.load({"host_memory": 3 * GIB}, env=env) == KrulConfig(3 * GIB, 0.5)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"host_memmory": "1GiB"}, ("'host_memmory'", "did you mean 'host_memory'?", "max_pending_share")),
        ({"host_memory": -1}, ("host_memory = -1", "positive size")),
        ({"host_memory": "-4GiB"}, ("host_memory = '-4GiB'", "positive size")),
        ({"host_memory": 0}, ("host_memory = 0",)),
        ({"host_memory": True}, ("host_memory = True",)),
        ({"host_memory": "many"}, ("host_memory = 'many'",)),
        ({"max_pending_share": 0}, ("max_pending_share = 0", "(0, 1]")),
        ({"max_pending_share": 1.5}, ("max_pending_share = 1.5",)),
        ({"max_pending_share": "half"}, ("max_pending_share = 'half'",)),
        ({"max_pending_share": [1]}, ("max_pending_share = [1]",)),
        ({"strategy": "best"}, ("strategy = 'best'", "minicache")),
        ({"strategy": ["krul"]}, ("strategy = ['krul']",)),
        ({"precision": "int3"}, ("precision = 'int3'", "native, int8, int4, int2")),
        ({"r_l": -0.1}, ("r_l = -0.1", "[0, 1]")),
        ({"gamma": "nan"}, ("gamma = 'nan'",)),
        ({"error_budget": 0}, ("error_budget = 0", "positive")),
        ({"error_budget": "inf"}, ("error_budget = 'inf'",)),
        ({"probe_share": 2}, ("probe_share = 2",)),
        ({"query_rows": 17.5}, ("query_rows = 17.5", "whole number")),
        ({"query_rows": 8}, ("query_rows = 8",)),
        ({"estimator": "guess"}, ("estimator = 'guess'", "sampled, heterogeneous, exact")),
        ({"estimator": ["exact"]}, ("estimator = ['exact']",)),
        ({"query_memory": 0}, ("query_memory = 0",)),
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


def test_as_dict_round_trips() -> None:
    for config in (KrulConfig(), KrulConfig(host_memory=123, max_pending_share=1.0)):
        assert KrulConfig.from_mapping(config.as_dict(), "test") == config


def test_the_readme_lists_every_option() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for key in KrulConfig().as_dict():
        assert f"`{key}`" in readme
