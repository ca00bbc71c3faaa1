"""``python -m krul_backend.daemon`` is ``krul-backend``."""

from krul_backend.daemon.cli.app import main

main()
