"""Fixtures of the tests that start real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_model import build_tiny_model


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint directories of the tiny random model by element type."""
    root = tmp_path_factory.mktemp("tiny-models")
    return {dtype: build_tiny_model(root / dtype, dtype=dtype) for dtype in ("float32", "bfloat16")}


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What servers learn and measure stays in the tests."""
    path = tmp_path_factory.mktemp("krul-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KRUL_CACHE_DIR", str(path))
        yield path
