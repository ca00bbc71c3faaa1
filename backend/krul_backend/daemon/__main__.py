"""``python -m krul_backend.daemon`` is ``krul-backend``."""

from krul_backend.daemon.app import main

main()
