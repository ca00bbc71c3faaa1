"""The site of the documentation is built without a warning, and fetches nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "mkdocs.yml",
    "docs",
    "benchmarks",
    "krul_sglang",
    "scripts",
)
ENVIRONMENT = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the site is made of."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "assets")
            )
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def test_every_page_is_built_and_nothing_is_fetched_from_elsewhere(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    built = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {f"{page}/index.html" for page in pages | {"CONTRIBUTING", "CHANGELOG"}} <= built
    assert "files/benchmarks/results/load-cpu.json" in built
    first = (tmp_path / "index.html").read_text()
    assert "figures/top.svg" in first
    navigation = first.partition("md-nav--primary")[2].partition("md-content")[0]
    assert all(f'href="{page}/"' in navigation for page in pages)
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(https?:[^"]*)"', page.read_text()
        )
        assert fetched == [], page


@pytest.mark.parametrize("target", ["tiers.md#no-such-heading", "no_such_page.md", "../no/such/file.json"])
def test_a_link_that_leads_nowhere_fails_the_build(copy: Path, tmp_path: Path, target: str) -> None:
    page = copy / "docs" / "serving.md"
    page.write_text(f"{page.read_text()}\n[broken]({target})\n")
    done = build(copy, tmp_path / "site")
    assert done.returncode != 0
    assert target.rpartition("#")[2] in done.stderr


def test_versions_are_kept_beside_each_other(copy: Path) -> None:
    def run(*command: str) -> str:
        author = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
        # It calls mkdocs by its name.
        path = f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"
        environment = {**ENVIRONMENT, **author, "GIT_COMMITTER_EMAIL": "a@b", "PATH": path}
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("git", "init", "--quiet")
    run("git", "commit", "--quiet", "--allow-empty", "--message", "start")
    for version in ("0.1", "0.2"):
        run("mike", "deploy", "--update-aliases", version, "latest")
    kept = run("git", "ls-tree", "--name-only", "gh-pages").split()
    assert {"0.1", "0.2", "latest", "versions.json"} <= set(kept)
