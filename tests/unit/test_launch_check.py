"""The check of a launch: one line and a non-zero exit status, or silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from krul_sglang.adapter.factory import warn_of_small_pages, what_may_change
from krul_sglang.adapter.plugin import check_launch
from krul_sglang.config import KrulConfig

CONFIG = "unified_cache_external_linker_config"

REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown key": ({CONFIG: {"host_memmory": "1GiB"}}, ("'host_memmory'", "did you mean 'host_memory'")),
    "negative budget": ({CONFIG: {"host_memory": "-1GiB"}}, ("host_memory = '-1GiB'", "positive size")),
    "budget over the machine": ({CONFIG: {"host_memory": "100TiB"}}, ("larger than the memory",)),
    "no object": ({CONFIG: ["host_memory"]}, ("expected a JSON object",)),
    "second tier": ({"enable_hierarchical_cache": True}, ("--enable-hierarchical-cache",)),
    "second linker": (
        {"enable_unified_cache_external_linker": True},
        ("--enable-unified-cache-external-linker",),
    ),
    "speculation": ({"speculative_algorithm": "DFLASH"}, ("--speculative-algorithm",)),
    "missing model": ({"model_path": "/no/such/model"}, ("--model-path /no/such/model", "no such file")),
}


def server_args(tmp_path: Path, **values: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(**{"model_path": str(tmp_path), "radix_cache_backend": "krul", **values})


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KRUL_CONFIG", "KRUL_HOST_MEMORY", "KRUL_MAX_PENDING_SHARE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_launch_ends_with_one_line(case: str, tmp_path: Path) -> None:
    values, expected = REFUSED[case]
    with pytest.raises(SystemExit) as stop:
        check_launch(server_args(tmp_path, **values))
    # A text as the code makes Python print it to stderr and exit with status 1.
    message = stop.value.code
    assert isinstance(message, str)
    assert message.startswith("krul-sglang: ")
    assert "\n" not in message
    for part in expected:
        assert part in message


def test_a_bad_environment_variable_ends_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KRUL_HOST_MEMORY", "lots")
    with pytest.raises(SystemExit, match="KRUL_HOST_MEMORY"):
        check_launch(server_args(tmp_path))


@pytest.mark.parametrize(("page_size", "tp_rank", "num_warnings"), [(1, 0, 1), (1, 1, 0), (16, 0, 0)])
def test_small_pages_are_warned_of_once(
    page_size: int, tp_rank: int, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_small_pages(page_size, tp_rank)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * num_warnings
    assert all("--page-size 16 or more" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "to the bit"),
        ({"strategy": "subspace", "error_budget": 0.02}, "by 0.02 nats per token"),
        ({"precision": "int4"}, "strategy=none with precision=int4 changes answers"),
    ],
)
def test_the_log_says_what_may_change(options: dict[str, object], line: str) -> None:
    assert line in what_may_change(KrulConfig.from_mapping(options, "test"))


def test_a_right_launch_passes(tmp_path: Path) -> None:
    assert check_launch(server_args(tmp_path, **{CONFIG: {"host_memory": "64MiB"}})) is None


def test_servers_without_krul_are_never_stopped(tmp_path: Path) -> None:
    values = {"radix_cache_backend": None, "enable_hierarchical_cache": True, "model_path": "/no/such/model"}
    assert check_launch(server_args(tmp_path, **values)) is None
