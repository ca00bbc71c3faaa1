"""``python -m tests.gpu --stages a,b``: the checks that need a GPU, and what they measured, as JSON."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from tests.gpu.stage import Setting, Stage, run_stage

MODULES = {"a": "tests.gpu.kernels_and_copies", "b": "tests.gpu.serving", "c": "tests.gpu.long"}
"""Imported when the stage runs: the first one needs neither SGLang nor pytest."""


def main() -> int:
    arguments = _parser().parse_args()
    setting = Setting(device=arguments.device, folder=arguments.out, model=arguments.model)
    names = arguments.stages.split(",") + (["c"] if arguments.long else [])
    unknown = [name for name in names if name not in MODULES]
    if unknown:
        print(f"stages {unknown} are unknown (accepted: {', '.join(MODULES)})", file=sys.stderr)
        return 2
    setting.folder.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    for name in dict.fromkeys(names):
        checks: Stage = importlib.import_module(MODULES[name]).CHECKS
        num_failed += run_stage(name, checks, setting)
    return 1 if num_failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    add = parser.add_argument
    add("--stages", default="a,b", help="a: torch and triton are enough; b: needs SGLang")
    add("--long", action="store_true", help="stage c as well, which takes hours")
    add("--device", default="cuda:0", help='"cpu" runs every line that a CPU can run')
    add("--out", type=Path, default=Path("gpu-check"), help="folder for the JSON files")
    add("--model", default=None, help="checkpoint that stage b serves (default: the bundled one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
