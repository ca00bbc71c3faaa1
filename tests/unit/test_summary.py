from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo.summary import LINE_WIDTH, quantiles, write_result


def test_quantiles_are_those_of_all_samples() -> None:
    assert quantiles([4.0, 1.0, 3.0, 2.0, 5.0]) == {
        "n": 5,
        "min": 1.0,
        "q25": 2.0,
        "median": 3.0,
        "q75": 4.0,
        "max": 5.0,
    }
    assert quantiles([7.0]) == {"n": 1, **dict.fromkeys(("min", "q25", "median", "q75", "max"), 7.0)}


def test_a_summary_is_rounded_and_has_a_row_per_line(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"name": f"row {n}", "x": [1 / 3] * 30} for n in range(3)]
    result = {
        "small": 1.23456789e-5,
        "near one": 1.00449999,
        "count": 123456789,
        "rows": rows,
        "by": {1: "a"},
    }
    write_result(result, {}, json=None, raw=tmp_path / "raw.json")
    assert [path.name for path in tmp_path.iterdir()] == ["raw.json"]
    write_result({}, result, json=tmp_path / "summary.json", raw=None)
    assert json.loads((tmp_path / "raw.json").read_text())["small"] == 1.23456789e-5
    text = (tmp_path / "summary.json").read_text()
    written = json.loads(text)
    assert written["small"] == 1.2346e-5
    assert written["near one"] == 1.0045
    assert written["count"] == 123456789
    assert written["by"] == {"1": "a"}
    lines = text.splitlines()
    assert sum(line.lstrip().startswith('{"name":"row') for line in lines) == 3
    assert all(len(line) <= LINE_WIDTH for line in lines if "row" not in line)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw.json", "summary.json"]
