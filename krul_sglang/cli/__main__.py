"""``python -m krul_sglang.cli`` is ``krul-sglang``."""

from krul_sglang.cli.app import main

main()
