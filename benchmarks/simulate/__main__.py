"""``python -m benchmarks.simulate --json FILE``: planned restores on published hardware."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from benchmarks.simulate.run import run
from krul_sglang.demo import environment
from krul_sglang.json_file import write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    arguments = parser.parse_args()
    result = {
        "command": environment.without_cwd(shlex.join(sys.argv)),
        "git_revision": environment.git_revision(),
        "versions": environment.versions(),
        **run(),
    }
    write_json(result, arguments.json)
    for row in result["summary"]["paper"]:
        ratio = f"{row['ratio']:.2f} (paper: {row['paper']})"
        print(f"{row['tier']:36} {row['codec']:10} {row['baseline']:22} {ratio}")


if __name__ == "__main__":
    main()
