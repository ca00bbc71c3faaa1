"""Fixtures of the tests that start real servers."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from demo import server
from demo.server import ServerProcess
from krul_sglang.reasons import REASONS
from tests.support.forked_server import ForkedServer
from tests.support.scenario import Played, play_all
from tests.support.tiny_model import build_tiny_model

_PORTS_OF_WORKERS = {"gw0": range(20_000, 22_000), "gw1": range(30_000, 32_000), "gw2": range(18_000, 20_000)}
"""A server binds its port ten seconds after it was chosen. SGLang chooses its own ports between these."""


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint directories of the tiny random model by element type."""
    root = tmp_path_factory.mktemp("tiny-models")
    return {dtype: build_tiny_model(root / dtype, dtype=dtype) for dtype in ("float32", "bfloat16")}


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What servers learn and measure stays in the tests."""
    path = tmp_path_factory.mktemp("krul-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KRUL_CACHE_DIR", str(path))
        yield path


@pytest.fixture(scope="session", autouse=True)
def ports_of_this_worker() -> Iterator[None]:
    """Test processes that run side by side do not choose each other's ports."""
    with pytest.MonkeyPatch.context() as patch:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        patch.setattr(server, "_PORTS", _PORTS_OF_WORKERS.get(worker, server._PORTS))
        yield


@pytest.fixture(scope="session")
def kept(tiny_models: dict[str, Path]) -> Played:
    """What a server answers that never evicts anything."""
    args = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "16384", "--enable-cache-report")
    with ForkedServer(tiny_models["float32"], args=args) as server:
        return play_all(server, evict=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failure what the test's servers say of themselves, and of why requests were computed."""
    report = yield
    for name, value in item.funcargs.items() if report.when == "call" and report.failed else ():
        if isinstance(value, ServerProcess):
            with suppress(Exception):
                state = value.server_info()["internal_states"][0]
                said = [f"{key}: {state[key]}"[-8000:] for key in ("krul", REASONS) if key in state]
                report.sections.append((name, "\n".join([*said, value.log_text()[-4000:]])))
    return report
