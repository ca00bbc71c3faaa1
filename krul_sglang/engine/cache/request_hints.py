"""What a request says about its conversation beside its tokens: whose it is, and how long to keep it."""

from __future__ import annotations

import hashlib
import logging
import math
from typing import Any

from krul_sglang.engine.save.turn import TurnOwner

logger = logging.getLogger(__name__)

KEEP_PARAMETER = "krul_keep_s"
"""Key of a request's ``custom_params``: seconds for which its conversation is to stay in host memory."""

_MAX_KEEP_S = 24 * 3600.0


def owner_of(req: Any) -> TurnOwner:
    """``req`` is SGLang's request, whose turn has ended."""
    return TurnOwner(
        rid=req.rid,
        request_slot=req.kv.req_pool_idx,
        tenant=tenant_of(req.extra_key, req.cache_salt),
        keep_s=_keep_s(req),
    )


def tenant_of(extra_key: str | None, cache_salt: str | None) -> str:
    """A short name for the namespace of a request; empty for requests without one. Salts are secrets."""
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
