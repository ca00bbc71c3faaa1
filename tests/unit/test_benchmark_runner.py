"""What all benchmarks share: how a run ends, what is written of it, and how its table looks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks import runner
from benchmarks.measured_code import PARTS, digest
from benchmarks.runner import PACKAGES, Result, names, numbers, without_samples
from benchmarks.tables import RESULTS, Columns, cell, ms, plain_table, quartiles, source, table_of
from demo.summary import quantiles
from krul_backend.errors import KrulError


def given(folder: Path, *arguments: str) -> argparse.Namespace:
    parser = runner.make_parser("example", "An example.", model="small", seed=3)
    return parser.parse_args(
        ["--json", str(folder / "out.json"), "--raw", str(folder / "raw.json"), *arguments]
    )


def show(result: Result, path: Path | None) -> str:
    return f"{len(result['rows'])} rows, {path}"


def without_rows(result: Result) -> Result:
    return {**result, "rows": []}


def test_a_run_is_written_with_what_describes_it_and_its_summary_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.run(given(tmp_path), lambda: {"rows": [1, 2]}, show, without_rows) == 0
    assert capsys.readouterr().out == f"0 rows, {tmp_path / 'out.json'}\n"
    raw, summary = (orjson.loads((tmp_path / name).read_bytes()) for name in ("raw.json", "out.json"))
    assert (raw["rows"], summary["rows"]) == ([1, 2], [])
    assert set(PACKAGES) < set(summary["versions"])
    assert {"git_revision", "code", "machine", "command", "duration_s"} < set(summary)


def test_a_user_s_error_is_one_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure() -> Result:
        raise KrulError("no such model")

    assert runner.run(given(tmp_path), measure, show) == 1
    assert capsys.readouterr() == ("", "no such model\n")
    assert not list(tmp_path.iterdir())


def test_what_was_measured_before_a_failure_is_written_and_the_failure_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure() -> Result:
        result: dict[str, Any] = {"rows": []}
        with runner.failures_kept(result):
            result["rows"].append(1)
            raise KrulError("a server fell over\n  its log")
        return result

    assert runner.run(given(tmp_path), measure, show) == 1
    assert "not all was measured: a server fell over" in capsys.readouterr().err
    written = orjson.loads((tmp_path / "out.json").read_bytes())
    assert (written["rows"], written["failure"]) == ([1], "a server fell over")


def test_a_failure_before_the_first_row_is_an_error_and_none_is_named_as_none() -> None:
    result: dict[str, Any] = {"rows": []}
    with pytest.raises(KrulError, match="at once"), runner.failures_kept(result):
        raise KrulError("at once")
    with runner.failures_kept(result):
        pass
    assert result == {"rows": [], "failure": None}


def test_shared_options_have_the_defaults_of_the_benchmark(tmp_path: Path) -> None:
    assert (given(tmp_path).model, given(tmp_path).seed) == ("small", 3)
    assert given(tmp_path, "--seed", "5").seed == 5
    with pytest.raises(SystemExit):
        given(tmp_path, "--dtype", "float32")
    assert (names("a,b"), numbers("1,20")) == (("a", "b"), (1, 20))
    with pytest.raises(ValueError, match="x"):
        numbers("1,x")


def test_the_folder_of_data_is_left_out_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "benchmarks.load", "--data", "/a/b/texts"])
    found = runner.about(Path("/a/b/texts"))
    assert found["command"] == "python -m benchmarks.load --data texts"
    assert found["code"] == digest(PARTS["benchmarks.load"])


def test_an_interpreter_elsewhere_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["/other/.venv/bin/python", "-m", "benchmarks.load"])
    assert runner.about()["command"] == "python -m benchmarks.load"
    monkeypatch.setattr("sys.orig_argv", [str(Path.cwd() / ".venv/bin/python"), "-m", "benchmarks.load"])
    assert runner.about()["command"] == ".venv/bin/python -m benchmarks.load"


def test_samples_are_replaced_wherever_they_stand() -> None:
    kept = without_samples(
        {
            "rows": [{"samples_s": [1.0, 2.0, 3.0], "p50": 2.0}, {"memcpy_samples_s": [4]}],
            "cost": {"samples": {"a": [1.0], "b": []}},
            "fit": {"samples": [(1, 2), (3, 4)], "resamples": [1, 2]},
        }
    )
    assert kept["rows"][0] == {"samples_s": quantiles([1.0, 2.0, 3.0]), "p50": 2.0}
    assert kept["rows"][1]["memcpy_samples_s"]["n"] == 1
    assert kept["cost"]["samples"] == {"a": quantiles([1.0]), "b": {"n": 0}}
    assert kept["fit"] == {"samples": {"n": 2}, "resamples": [1, 2]}


def test_a_table_has_a_line_for_each_row_and_a_dash_for_what_is_missing() -> None:
    columns: Columns = {
        "name": cell("name"),
        "time": cell("seconds", ms),
        "MB": cell("bytes", "{:.1f} MB", 1e-6),
        "ratio": cell("ratio", quartiles),
    }
    ratio = {"median": 2.0, "q25": 1.5, "q75": 3.0}
    rows: list[dict[str, Any]] = [
        {"name": "a", "seconds": 0.25, "bytes": 1_500_000, "ratio": ratio},
        {"name": "b", "seconds": None},
    ]
    assert table_of(columns, rows).splitlines() == [
        "| name | time | MB | ratio |",
        "|---|---:|---:|---:|",
        "| a | 250 ms | 1.5 MB | 2.00 (1.50-3.00) |",
        "| b | - | - | - |",
    ]
    assert plain_table([{"n": 1, "x": 1 / 3}]).splitlines()[-1] == "| 1 | 0.3333 |"


def test_a_source_is_a_link_only_within_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = "Source: [`load-cpu.json`](benchmarks/results/load-cpu.json)."
    assert source(RESULTS / "load-cpu.json") == link
    monkeypatch.chdir(RESULTS)
    assert source(Path("load-cpu.json")) == link
    assert source(tmp_path / "out.json") == f"Source: `{tmp_path / 'out.json'}`."
    assert source(None) == "Not kept in a file."
