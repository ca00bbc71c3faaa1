"""The servers that the kits ask: one at a time, with krul or without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from demo.server import default_device_args
from tests.support.forked_server import ForkedServer
from tests.support.scenario import KRUL, STRICT

PAGE_SIZE = 16
POOL_OF_ALL = 40_000
"""Tokens that hold what any kit leaves behind: servers without krul keep everything in the device pool."""


@dataclass(frozen=True)
class Setup:
    """What kits want of a server. ``pool_tokens``: with krul, less than what the kits leave behind."""

    pool_tokens: int
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class PeerServers:
    """Starts a server when a kit asks for it, in the place of the one before.

    Args:
        krul_options: None for servers without krul.
        cache_dir: where krul keeps what it measures and learns.
    """

    def __init__(self, model: Path, krul_options: Mapping[str, Any] | None, cache_dir: Path) -> None:
        self._model = model
        self._krul_options = krul_options
        self._cache_dir = cache_dir
        self._setup: Setup | None = None
        self._server: ForkedServer | None = None

    @property
    def with_krul(self) -> bool:
        return self._krul_options is not None

    def running(self, setup: Setup) -> ForkedServer:
        """The server of this setup, started if another one, or none, is running."""
        if self._server is None or setup != self._setup:
            self._stop()
            server = self._make(setup)
            server.start()
            self._setup, self._server = setup, server
        return self._server

    def _make(self, setup: Setup) -> ForkedServer:
        krul: tuple[str, ...] = ()
        if self._krul_options is not None:
            krul = (*KRUL, "--unified-cache-external-linker-config", json.dumps(self._krul_options))
        return ForkedServer(
            self._model,
            args=(
                *("--dtype", "float32"),
                *(() if default_device_args() else ("--attention-backend", "triton")),
                *("--page-size", str(PAGE_SIZE)),
                *("--max-total-tokens", str(setup.pool_tokens if self.with_krul else POOL_OF_ALL)),
                "--enable-cache-report",
                *krul,
                *setup.args,
            ),
            env={**STRICT, "KRUL_CACHE_DIR": str(self._cache_dir), **setup.env},
        )

    def _stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
