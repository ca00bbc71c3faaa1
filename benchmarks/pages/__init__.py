"""Writes what is generated in the documentation: ``python -m benchmarks.pages``.

Result files, ``KrulConfig`` and the table of settings enter; tables in the README, ``docs/measured.md``,
``docs/configuration.md`` and ``docs/support.md`` leave, and the figure of the demo. Tests compare the pages
with what this room would write.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
