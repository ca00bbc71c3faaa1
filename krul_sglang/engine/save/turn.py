"""Describes a finished turn: its pages and slots, whose it is, and how long it is to be kept."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from krul_backend.segment import TokenIds
from krul_sglang.engine.capture.turn_capture import CapturedTurn

logger = logging.getLogger(__name__)

KEEP_PARAMETER = "krul_keep_s"
"""Key of a request's ``custom_params``: seconds for which its conversation is to stay in host memory."""

_MAX_KEEP_S = 24 * 3600.0


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


def owner_of(req: Any) -> TurnOwner:
    """Read the owner of a turn from SGLang's request ``req``, whose turn has ended."""
    return TurnOwner(
        rid=req.rid,
        request_slot=req.kv.req_pool_idx,
        tenant=tenant_of(req.extra_key, req.cache_salt),
        keep_s=_keep_s(req),
    )


def tenant_of(extra_key: str | None, cache_salt: str | None) -> str:
    """A short name for the namespace of a request; empty without one. Hashed, because salts are secrets."""
    if not extra_key and not cache_salt:
        return ""
    parts = ((extra_key or "").encode(), (cache_salt or "").encode())
    digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts))
    return digest.hexdigest()[:16]


def _keep_s(req: Any) -> float | None:
    params = req.sampling_params.custom_params
    value = params.get(KEEP_PARAMETER) if isinstance(params, dict) else None
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        logger.warning("krul: %s = %r is not a positive number of seconds: ignored", KEEP_PARAMETER, value)
        return None
    return min(float(value), _MAX_KEEP_S)
