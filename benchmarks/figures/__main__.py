"""``python -m benchmarks.figures NAME``: draws a figure of the documentation from the result that is kept."""

from __future__ import annotations

import argparse
from pathlib import Path

import orjson

from benchmarks.figures import charts
from benchmarks.pages import RESULTS, ROOT

FIGURES = ROOT / "docs" / "figures"
DRAWN = {
    "load": (charts.draw_load, "load-cpu.json", "load.png"),
    "overlap": (charts.draw_overlap, "overlap-cpu.json", "overlap.png"),
    "quality": (charts.draw_quality, "quality-agent-cpu.json", "quality.png"),
    "serving": (charts.draw_serving, "serving-cpu.json", "serving.png"),
    "simulate": (charts.draw_simulate, "simulate.json", "simulate.png"),
}
"""What draws each figure, from which result, and as which file."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=DRAWN)
    parser.add_argument("--json", type=Path, help="another result")
    parser.add_argument("--png", type=Path, help="another file")
    arguments = parser.parse_args()
    draw, result, figure = DRAWN[arguments.name]
    path = RESULTS / result if arguments.json is None else arguments.json
    draw(orjson.loads(path.read_bytes()), FIGURES / figure if arguments.png is None else arguments.png)


if __name__ == "__main__":
    main()
