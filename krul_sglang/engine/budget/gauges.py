"""Shows numbers of a rank on SGLang's own metrics page."""

from __future__ import annotations

import os
from functools import cache
from typing import Any


def show(name: str, meaning: str, value: float, tp_rank: int) -> None:
    """Show ``value`` as the gauge ``krul_{name}`` of a rank, if the server has a metrics page."""
    # SGLang sets it before its processes start, if it has a metrics page.
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        _gauge(name, meaning).labels(tp_rank).set(value)


@cache
def _gauge(name: str, meaning: str) -> Any:
    from prometheus_client import Gauge

    return Gauge(f"krul_{name}", meaning, ["tp_rank"], multiprocess_mode="mostrecent")
