"""Names the states of recurrent layers in the store, copies them for it, and undoes a load that failed."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from krul_backend.codec.layout import LayerKV
from krul_backend.codec.registry import ModelCodecs
from krul_backend.memory import is_out_of_memory
from krul_backend.segment import ModelIdentity
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
    """Where the state of a restored prefix goes: ``slot``, int64 ``[1]``.

    ``before`` (int64 ``[1]``) has the state of the tokens before those that are loaded; None if there are
    none.
    """

    slot: torch.Tensor
    before: torch.Tensor | None = None


CopiedState = Sequence[LayerKV]
"""A state by layer, copied on the device."""


class BoundaryStates:
    """Holds what a rank needs to store and load the states of its model's recurrent layers.

    A recurrent layer (Mamba, a gated delta rule, a short convolution) has no KV of tokens, but one state per
    request, which each token changes. So a prefix can be restored only up to a *boundary*, where its state
    was kept. A state is stored as it is, under the key of the boundary's last page and an ``identity`` of its
    own: as a segment of one page of one token, the boundary's last one.

    Args:
        pool: of the layers' states: a row is a state, as bytes. What it calls keys and values are two parts
            of the row.
        layout: names what the bytes of a row mean.
        target: whose states these are.
    """

    def __init__(self, pool: DevicePool, layout: str, target: ServedModel) -> None:
        self.pool = pool
        self.codec = ModelCodecs(pool.shape, pool.num_layers, None)
        self.counters = StateCounters()
        self.num_bytes = (pool.shape.k_token_bytes + pool.shape.v_token_bytes) * pool.num_layers
        self._layout = layout
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
            page_size=1,
        )

    def copy(self, slot: torch.Tensor) -> CopiedState | None:
        """Copy the state in ``slot`` (int64 ``[1]``), on the current stream; None if too many wait already,
        or if there is no memory for it.

        Whoever stores the copy calls ``release``.
        """
        with self._lock:
            if self._num_waiting and (self._num_waiting + 1) * self.num_bytes > MAX_WAITING_BYTES:
                return None
            self._num_waiting += 1
        try:
            return [self.pool.gather(layer, slot) for layer in range(self.pool.num_layers)]
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
            for rows in self.pool.buffers(layer):
                if state.before is None:
                    rows.index_fill_(0, state.slot, 0)
                else:
                    rows.index_copy_(0, state.slot, rows.index_select(0, state.before))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``/server_info``."""
        return {"state_bytes": self.num_bytes, **asdict(self.counters)}
