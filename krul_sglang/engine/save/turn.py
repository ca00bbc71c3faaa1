"""Describes a finished turn: its pages and slots, whose it is, and what was said about its future."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from krul_backend.segment import ModelIdentity, TokenIds
from krul_backend.tiers.common.hint import NO_HINT, Hint, SessionName
from krul_sglang.engine.capture import CapturedTurn
from krul_sglang.engine.common.boundary_states import CopiedState
from krul_sglang.engine.save.request_hints import RequestHints
from krul_sglang.hints import tenant_of


@dataclass(frozen=True)
class StoredPath:
    """Whole pages of a conversation from its first token on, which lie in the device pool.

    ``page_keys[i]`` is the chained hash of page ``i``, ``token_ids`` the ``len(page_keys) * page_size``
    tokens, ``slots`` (int64, same length, on the pool's device) where their KV lies. Pages from
    ``moved_from`` on, if given, were computed on top of a moved run, and are named after ``moved_key``.
    """

    page_keys: Sequence[str]
    token_ids: TokenIds
    slots: torch.Tensor
    moved_from: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class TurnOwner:
    """The request whose turn it was: ``request_slot`` is its row in SGLang's request pool.

    ``tenant``, ``session`` and ``hint`` as in ``Turn``.
    """

    rid: str
    request_slot: int
    tenant: str = ""
    session: SessionName | None = None
    hint: Hint = NO_HINT


@dataclass(frozen=True)
class Turn(StoredPath):
    """A conversation as it stands when a turn ends.

    ``model`` is what computed it: weights may change before it is stored. ``ready`` are the events after
    which the slots hold the KV. ``attention`` is what was recorded of it, if anything; whoever stores the
    turn releases it. ``states`` are copies of the states that recurrent layers have after so many of its
    tokens, at its end and at its prompt's, if the model has such layers and the states were there. ``rid`` is
    its request; ``tenant`` is whom its bytes count for; ``session`` the name of the conversation, if it has
    one; ``hint`` what its request said about its future. A turn that is to be dropped is not stored.
    """

    model: ModelIdentity = field(kw_only=True)
    ready: Sequence[Any]
    attention: CapturedTurn | None = None
    states: Mapping[int, CopiedState] = field(default_factory=dict)
    rid: str = ""
    tenant: str = ""
    session: SessionName | None = None
    hint: Hint = NO_HINT


def owner_of(req: Any, hints: RequestHints) -> TurnOwner:
    """Read the owner of a turn from SGLang's request ``req``, whose turn has ended."""
    tenant = tenant_of(req.extra_key, req.cache_salt)
    return TurnOwner(
        rid=req.rid,
        request_slot=req.kv.req_pool_idx,
        tenant=tenant,
        session=hints.session_of(req, tenant),
        hint=hints.hint_of(req),
    )
