"""What compression does to the model's own answers: the last tokens of a turn, run on decoded history."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from krul_backend.codec.interface import LayerKV
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.segment import ModelIdentity
from krul_backend.store.interface import KVStore
from krul_backend.strategy.strategy import Strategy
from krul_sglang.engine.kv_pool import DevicePool
from krul_sglang.engine.probe_forward import HistoryAttention, probe_forward
from krul_sglang.engine.query_capture import QueryCapture
from krul_sglang.engine.segment_reader import open_readers
from krul_sglang.engine.turn import StoredPath

logger = logging.getLogger(__name__)

PROBED_TOKENS = 64


@dataclass(frozen=True)
class ProbeOutcome:
    """``errors[layer]`` of the attention output of the damaged layers; ``kl`` in nats, mean over tokens.

    ``strategy`` is that of the newest segment.
    """

    strategy: Strategy
    errors: dict[int, float]
    kl: float


class Prober:
    """Compares next-token distributions on the true and on the stored history of one conversation.

    Two short forwards on the scheduler's thread, on every rank at the same time: collectives of the model run
    in them. ``group`` joins the ranks of the model, None for one rank.
    """

    def __init__(
        self,
        model_runner: Any,
        capture: QueryCapture | None,
        pool: DevicePool,
        codec: SegmentCodec,
        store: KVStore,
        model: ModelIdentity,
        group: Any | None,
    ) -> None:
        self._model_runner = model_runner
        self._capture = capture
        self._pool = pool
        self._codec = codec
        self._store = store
        self._model = model
        self._group = group

    def probe(
        self, path: StoredPath, choose_layers: Callable[[Strategy], Collection[int]]
    ) -> ProbeOutcome | None:
        """Run the last tokens of ``path`` with the history of some layers decoded from the store.

        ``choose_layers`` gets the strategy of the newest segment and names the layers; ranks name the same.
        None if the history is too short or not stored any more, or no layer was named.
        """
        page_size = self._model.page_size
        num_tail_pages = -(-PROBED_TOKENS // page_size)
        num_pages = len(path.page_keys) - num_tail_pages
        if num_pages < 1:
            return None
        num_history = num_pages * page_size
        lease = self._store.lease(self._model, path.page_keys[:num_pages], path.token_ids[:num_history])
        try:
            if not self._all_ranks(lease is not None and lease.num_pages == num_pages):
                return None
            assert lease is not None
            readers = open_readers(lease, self._codec, num_history)
            layers = choose_layers(readers[-1].strategy)
            if not layers:
                return None

            def true(layer: int) -> LayerKV:
                return self._pool.gather(layer, path.slots[:num_history])

            def decoded(layer: int) -> LayerKV | None:
                if layer not in layers:
                    return None
                parts = [reader.read(layer, self._pool.device) for reader in readers]
                return LayerKV(torch.cat([part.k for part in parts]), torch.cat([part.v for part in parts]))

            token_ids = torch.from_numpy(path.token_ids[num_history:]).long().to(self._pool.device)
            reference, _ = self._run(token_ids, num_history, true, lambda layer: None)
            logits, errors = self._run(token_ids, num_history, true, decoded)
        finally:
            if lease is not None:
                self._store.release(lease)
        log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
        return ProbeOutcome(readers[-1].strategy, self._mean_of_ranks(errors), kl)

    def _run(
        self,
        token_ids: torch.Tensor,
        num_history: int,
        history: Callable[[int], LayerKV],
        damaged: Callable[[int], LayerKV | None],
    ) -> tuple[torch.Tensor, dict[int, float]]:
        attention = HistoryAttention(num_history, len(token_ids), history, damaged, self._pool.device)
        unrecorded: AbstractContextManager[None] = (
            nullcontext() if self._capture is None else self._capture.suspended()
        )
        logits = probe_forward(self._model_runner, token_ids, num_history, attention, unrecorded)
        return logits, attention.errors

    def _all_ranks(self, is_fine: bool) -> bool:
        if self._group is None:
            return is_fine
        flag = torch.tensor([int(is_fine)])
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return bool(flag.item())

    def _mean_of_ranks(self, errors: dict[int, float]) -> dict[int, float]:
        if self._group is None:
            return errors
        values = torch.tensor(list(errors.values()), dtype=torch.float64)
        torch.distributed.all_reduce(values, group=self._group)
        values /= self._model.tp_size
        return dict(zip(errors, values.tolist(), strict=True))
