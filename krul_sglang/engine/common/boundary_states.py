"""Names the states of recurrent layers, or windows, in the store, copies them, and undoes a failed load."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from krul_backend.codec.layout import LayerKV, as_bytes
from krul_backend.codec.registry import ModelCodecs
from krul_backend.memory import is_out_of_memory
from krul_backend.segment import ModelIdentity, TokenIds
from krul_backend.strategy import Strategy
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.served_model import ServedModel

MAX_WAITING_BYTES = 256 << 20
"""Of copies on the device that wait to be stored, or one copy: they lie beside SGLang's own budget."""


@dataclass
class StateCounters:
    """``stored`` states, of ``num_bytes``. Of ``dropped_turns`` the state was not stored. ``restored`` came
    back; of ``failed_loads`` batches the states could not be loaded, so that all was computed."""

    stored: int = 0
    num_bytes: int = 0
    dropped_turns: int = 0
    restored: int = 0
    failed_loads: int = 0


@dataclass(frozen=True)
class StateSlot:
    """Names the slot of SGLang's pool that a restored state is written to: ``slot``, int64 ``[1]``; of a
    window the slots of its last tokens, ``[W]``.

    ``before`` (int64 ``[1]``) has the state of the tokens before those that are loaded; None if there are
    none.
    """

    slot: torch.Tensor
    before: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class CopiedState:
    """A state by layer, copied on the device. ``lacks``: set there if a window had lost some of its tokens;
    None for a recurrent layer's state."""

    layers: Sequence[LayerKV]
    lacks: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.layers[0].k)

    @property
    def is_whole(self) -> bool:
        """True if none of its tokens had left the pool when it was copied. Waits for the device."""
        return self.lacks is None or not bool(self.lacks)


class BoundaryStates:
    """Holds what a rank needs to store and load what its model keeps of a prefix's end beside the KV.

    A recurrent layer (Mamba, a gated delta rule, a short convolution) has no KV of tokens, but one state per
    request, which each token changes. A layer with a sliding window may have its KV in a pool of its own,
    which keeps that of the last tokens alone: this *window* is the state here. So a prefix can be restored
    only up to a *boundary*, where its state was kept. A state is stored as it is, under the key of the
    boundary's last page and an ``identity`` of its own, as one segment: see ``names``.

    Args:
        pool: of the layers' states: a row is a state, as bytes, and what it calls keys and values are two
            parts of it. Of windows a row is a token.
        layout: names what the bytes of a row mean.
        target: whose states these are.
        rank, num_ranks: that share the states, also of a model whose KV they all have alike.
        window_pages: pages of the model's KV that a window may reach back; None: the states are recurrent.
    """

    def __init__(
        self,
        pool: DevicePool,
        layout: str,
        target: ServedModel,
        *,
        rank: int,
        num_ranks: int,
        window_pages: int | None = None,
    ) -> None:
        self.pool = pool
        self.codec = ModelCodecs(pool.shape, pool.num_layers, None)
        self.strategy = Strategy.from_pairs(pool.num_layers)
        self.counters = StateCounters()
        self.window_pages = window_pages
        num_rows = 1 if window_pages is None else window_pages * target.identity.page_size
        row_bytes = pool.shape.k_token_bytes + pool.shape.v_token_bytes
        self.num_bytes = row_bytes * pool.num_layers * num_rows
        self._layout = layout
        self._rank, self._num_ranks = rank, num_ranks
        self._target = target
        self._lock = threading.Lock()
        self._num_waiting = 0

    @property
    def identity(self) -> ModelIdentity:
        """Of states that are computed now."""
        return self.identity_for(self._target.identity)

    @property
    def page_size(self) -> int:
        """Of the pages of the model's KV, in tokens."""
        return self._target.identity.page_size

    def identity_for(self, target: ModelIdentity) -> ModelIdentity:
        """Of states that were computed by ``target``."""
        digest = hashlib.sha256(f"state {self._layout} {target.config_digest}".encode()).hexdigest()
        shape = self.pool.shape
        return replace(
            target,
            config_digest=digest,
            dtype="state",
            num_layers=self.pool.num_layers,
            num_kv_heads=shape.num_kv_heads,
            k_head_dim=shape.k_head_dim,
            v_head_dim=shape.v_head_dim,
            page_size=1 if self.window_pages is None else self.page_size,
            tp_rank=self._rank,
            tp_size=self._num_ranks,
        )

    def names(self, end_key: str, end_tokens: TokenIds, num_tokens: int) -> tuple[tuple[str, ...], TokenIds]:
        """The page keys and token ids under which the state is stored that a prefix has at its end.

        ``end_key`` and ``end_tokens`` are of its last page, ``num_tokens`` its length. A recurrent state is
        named after that page and its last token. A window is one segment, whatever windows it overlaps: its
        further pages have keys made from the first one's, and all have the tokens of the last page, since
        those before may be unknown where it is looked for.
        """
        if self.window_pages is None:
            return (end_key,), end_tokens[-1:]
        num_pages = min(self.window_pages, num_tokens // self.page_size)
        others = (f"{end_key}-{number}" for number in range(1, num_pages))
        return (end_key, *others), np.tile(end_tokens, num_pages)

    def copy(self, slots: torch.Tensor) -> CopiedState | None:
        """Copy the state in ``slots`` (int64, see ``StateSlot``), on the current stream; None if too many
        wait already, or if there is no memory for it.

        Whoever stores the copy calls ``release``.
        """
        with self._lock:
            if self._num_waiting and (self._num_waiting + 1) * self.num_bytes > MAX_WAITING_BYTES:
                return None
            self._num_waiting += 1
        try:
            layers = [self.pool.gather(layer, slots) for layer in range(self.pool.num_layers)]
            # SGLang lets tokens point to slot 0 when they have left its pool of windows.
            return CopiedState(layers, None if self.window_pages is None else (slots <= 0).any())
        except Exception as error:
            self.release()
            if not is_out_of_memory(error):
                raise
            return None

    def release(self) -> None:
        """A copy is not needed any more."""
        with self._lock:
            self._num_waiting -= 1

    def reset(self, state: StateSlot) -> None:
        """Bring a slot to the state before the tokens that were to be loaded, on the current stream."""
        for layer in range(self.pool.num_layers):
            for rows in map(as_bytes, self.pool.buffers(layer)):
                if state.before is None:
                    rows.index_fill_(0, state.slot, 0)
                else:
                    rows.index_copy_(0, state.slot, rows.index_select(0, state.before))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``/server_info``."""
        return {"state_bytes": self.num_bytes, **asdict(self.counters)}
