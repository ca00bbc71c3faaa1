"""A finished turn: what is stored, and what its compression is chosen from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from krul_backend.segment import TokenIds
from krul_sglang.engine.capture.turn_capture import CapturedTurn


@dataclass(frozen=True)
class StoredPath:
    """Whole pages from the first token on that are stored, and in the device pool as well.

    ``page_keys``, ``token_ids`` and ``slots`` are those of a ``Turn``.
    """

    page_keys: Sequence[str]
    token_ids: TokenIds
    slots: torch.Tensor


@dataclass(frozen=True)
class TurnOwner:
    """The request whose turn it was: ``request_slot`` is its row in SGLang's request pool.

    ``tenant`` and ``keep_s`` as in ``Turn``.
    """

    rid: str
    request_slot: int
    tenant: str = ""
    keep_s: float | None = None


@dataclass(frozen=True)
class Turn:
    """A conversation as it stands when a turn ends: whole pages from its first token on.

    ``page_keys[i]`` is the chained hash of page ``i``, ``token_ids`` the ``len(page_keys) * page_size``
    tokens, ``slots`` (int64, same length, on the pool's device) where their KV lies. ``ready`` are the events
    after which the slots hold the KV. ``attention`` is what was recorded of it, if anything.
    Whoever submits a turn keeps its slots locked until it is popped; the offloader releases ``attention``.
    ``tenant`` is whom its bytes count for; ``keep_s`` how long it is to stay in DRAM at least, None if nobody
    asked for it.
    """

    page_keys: Sequence[str]
    token_ids: TokenIds
    slots: torch.Tensor
    ready: Sequence[Any]
    attention: CapturedTurn | None = None
    tenant: str = ""
    keep_s: float | None = None
