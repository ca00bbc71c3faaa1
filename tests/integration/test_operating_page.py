"""The commands of docs/operating.md do what the page says, on a server that it describes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from demo.server import find_free_port
from krul_sglang.config import KrulConfig
from tests.support.forked_server import ForkedServer
from tests.support.scenario import POOL_TOKENS, small_krul_server_args

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "operating.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
NOT_RUN = {
    "python -m hatchling build": "tests/integration/test_distribution.py builds and installs the wheel",
    "pip install dist/": "the same",
    "docker build": "there is no Docker where the tests run",
    "python -m sglang.launch_server": "the server of this test is started with other sizes",
    "make check-sglang": "it downloads a wheel",
    "make test VENV=": "it makes another environment and runs everything",
    "python -m tests.soak": "tests/integration/test_soak.py runs a minute of it",
}
"""How the blocks begin that are not run, and why."""


def is_run(block: str) -> bool:
    return not block.startswith(tuple(NOT_RUN))


@pytest.fixture(scope="module")
def environment(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The variables of the page."""
    metrics_port, hints_port, model = find_free_port(), find_free_port(), tiny_models["float32"]
    options = {
        "metrics_port": metrics_port,
        "hints_port": hints_port,
        "ssd_dir": str(tmp_path_factory.mktemp("ssd")),
        "planner": "full-load",
    }
    with ForkedServer(
        model, args=(*small_krul_server_args(POOL_TOKENS, options), "--enable-metrics")
    ) as server:
        yield {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "MODEL": str(model),
            "URL": server.url,
            "METRICS": f"http://127.0.0.1:{metrics_port}",
            "HINTS": f"http://127.0.0.1:{hints_port}",
        }


@pytest.mark.parametrize("block", [block for block in BLOCKS if is_run(block)])
def test_a_block_of_commands_works(block: str, environment: dict[str, str], tmp_path: Path) -> None:
    command = ["bash", "-euo", "pipefail", "-c", block]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_each_exception_is_one_block_of_the_page() -> None:
    for beginning in NOT_RUN:
        assert sum(block.startswith(beginning) for block in BLOCKS) == 1, beginning
    assert sum(map(is_run, BLOCKS)) > 4
    assert TEXT.count("```") == 2 * len(BLOCKS)


def test_options_to_tune_exist() -> None:
    table = TEXT.partition("| option | change it when |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 8
    assert named <= {option.name for option in fields(KrulConfig)}
