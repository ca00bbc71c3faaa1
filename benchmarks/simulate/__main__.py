"""``python -m benchmarks.simulate --json FILE [--raw FILE]``: planned restores on published hardware."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks.simulate.run import run
from krul_sglang.demo import environment
from krul_sglang.json_file import write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--raw", type=Path, help="where the rows of all settings go, if they are wanted")
    arguments = parser.parse_args()
    outcome, rows = run()
    result: dict[str, Any] = {
        "command": environment.without_cwd(shlex.join(sys.argv)),
        "git_revision": environment.git_revision(),
        "versions": environment.versions(),
        **outcome,
    }
    write_result({**result, "rows": rows}, result, json=arguments.json, raw=arguments.raw)
    for row in result["summary"]["paper"]:
        ratio = f"{row['ratio']:.2f} (paper: {row['paper']})"
        print(f"{row['tier']:36} {row['codec']:10} {row['baseline']:22} {ratio}")


if __name__ == "__main__":
    main()
