"""The wheel and the sdist are complete without the checkout: installed elsewhere, they serve."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from demo.server import ServerProcess
from krul_sglang import __version__
from krul_sglang.adapter.hook_targets import SUPPORTED_SGLANG
from tests.support.scenario import small_krul_server_args

ROOT = Path(__file__).parents[2]
# Nothing is imported from this checkout: neither by a path of the environment nor by the working directory.
CLEAN = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist, made from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def scripts(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment that has the wheel, and sees what else is installed here."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", built[0])
    # A path in a .pth file is searched last, and the .pth files in it are not read: no editable installs.
    (place,) = environment.glob("lib/python*/site-packages")
    (place / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def names(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_has_both_packages_and_neither_tests_nor_what_only_the_demo_needs(
    built: tuple[Path, Path],
) -> None:
    found = names(built[0])
    assert {name.split("/")[0] for name in found} == {"krul_sglang", "krul_backend"}
    sources = [*ROOT.glob("krul_sglang/**/*.py"), *(ROOT / "backend").glob("krul_backend/**/*.py")]
    modules = {str(path.relative_to(ROOT)).removeprefix("backend/") for path in sources}
    page = ROOT.glob("backend/krul_backend/daemon/server/page/*")
    others = {"krul_sglang/py.typed", "krul_backend/py.typed"}
    others |= {f"krul_sglang/assets/{name}.json" for name in ("chats", "source")}
    assert found == modules | others | {str(path.relative_to(ROOT / "backend")) for path in page}
    assert "krul_backend/daemon/server/page/uPlot.LICENSE" in found


def test_a_wheel_that_is_built_from_the_sdist_is_the_same(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[1]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "again", cwd=folder)
    (again,) = (tmp_path / "again").iterdir()
    assert names(again) == names(built[0])


def test_what_is_installed_serves_and_passes_the_selftest(
    scripts: Path, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    where = run(scripts / "python", "-c", "import krul_sglang; print(krul_sglang.__file__)", **CLEAN)
    assert Path(where).is_relative_to(scripts.parent)
    version = run(scripts / "krul-sglang", "--version", **CLEAN)
    assert version == f"krul-sglang {__version__}, SGLang {SUPPORTED_SGLANG[-1]}\n"
    args = small_krul_server_args(2560, {"planner": "full-load"})
    server = ServerProcess(
        tiny_models["float32"], args=args, env=CLEAN, log_path=tmp_path / "server.log", ready_timeout_s=200
    )
    server.command[0] = str(scripts / "python")
    with server:
        told = run(scripts / "krul-sglang", "selftest", "--url", server.url, **CLEAN)
        assert "the same answer" in told, told
        assert str(scripts.parent) in run(scripts / "python", "-c", SEES.format(server.pid), **CLEAN)


SEES = (
    "import psutil; print([child.cmdline() for child in psutil.Process({}).children(recursive=True)"
    " if 'krul_backend' in ' '.join(child.cmdline())])"
)
"""Prints the command of the daemon that a server has started."""


def test_the_image_is_of_the_supported_release() -> None:
    tag = re.search(r"^FROM lmsysorg/sglang:v(\S+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.M)
    assert tag is not None
    assert tag[1] in SUPPORTED_SGLANG
