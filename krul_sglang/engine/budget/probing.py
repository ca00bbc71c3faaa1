"""Measures how compression changes the model's answers, by running a turn's end on decoded history."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from krul_backend.codec.interface import LayerKV
from krul_backend.codec.round_trip import LayerRoundTrip
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.strategy.strategy import LayerStrategy, Strategy
from krul_sglang.engine.budget.probe_forward import HistoryAttention, probe_forward
from krul_sglang.engine.capture.turn_capture import TurnCapture
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.save.turn import StoredPath

PROBED_TOKENS = 64


@dataclass(frozen=True)
class ProbeOutcome:
    """The result of a probe.

    ``errors[layer]``: of the attention output of each compressed layer. ``kl`` in nats, mean over tokens.
    """

    errors: dict[int, float]
    kl: float


class Prober:
    """Compares next-token distributions on the true history of a conversation and on a decoded one.

    It runs short forwards on the scheduler's thread, on all ranks together, because the model's collectives
    run in them. ``group`` joins the ranks of the model, None for one rank.
    """

    def __init__(
        self,
        model_runner: Any,
        capture: TurnCapture | None,
        pool: DevicePool,
        codec: SegmentCodec,
        group: Any | None,
    ) -> None:
        self._model_runner = model_runner
        self._capture = capture
        self._pool = pool
        self._round_trip = LayerRoundTrip(codec, start_token=0)
        self._group = group

    def open(self, path: StoredPath) -> OpenProbe | None:
        """Run the last ``PROBED_TOKENS`` of ``path`` on its true history; None if nothing is before them."""
        num_history = len(path.token_ids) - PROBED_TOKENS
        if num_history < 1:
            return None
        token_ids = self._pool.streams.from_list(path.token_ids[num_history:].tolist())
        slots = path.slots[:num_history]

        def read(layer: int) -> LayerKV:
            return self._pool.gather(layer, slots)

        def run(damaged: Callable[[int], LayerKV | None]) -> tuple[torch.Tensor, dict[int, float]]:
            attention = HistoryAttention(
                num_history,
                len(token_ids),
                read,
                damaged,
                self._pool.device,
                self._model_runner.token_to_kv_pool,
            )
            unrecorded: AbstractContextManager[None] = (
                nullcontext() if self._capture is None else self._capture.suspended()
            )
            logits = probe_forward(self._model_runner, token_ids, num_history, attention, unrecorded)
            return logits.log_softmax(-1), attention.errors

        reference, _ = run(lambda layer: None)
        return OpenProbe(self, read, run, reference)

    def is_on_any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank. Every rank calls it."""
        if self._group is None:
            return flag
        value = torch.tensor([float(flag)])
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(value.item())

    def decode(self, strategy: Strategy, read: Callable[[int], LayerKV]) -> dict[int, LayerKV]:
        """The layers that ``strategy`` compresses, each alone, encoded and decoded."""
        return {
            layer: self._round_trip(layer, of_layer.precision, read(layer))[0]
            for layer, of_layer in enumerate(strategy.layers)
            if of_layer != LayerStrategy()
        }

    def mean_of_ranks(self, errors: dict[int, float]) -> dict[int, float]:
        if self._group is None:
            return errors
        values = torch.tensor(list(errors.values()), dtype=torch.float64)
        torch.distributed.all_reduce(values, group=self._group)
        values /= torch.distributed.get_world_size(self._group)
        return dict(zip(errors, values.tolist(), strict=True))


class OpenProbe:
    """One conversation and its true next-token distributions, on which strategies are tried."""

    def __init__(
        self,
        prober: Prober,
        read: Callable[[int], LayerKV],
        run: Callable[[Callable[[int], LayerKV | None]], tuple[torch.Tensor, dict[int, float]]],
        reference: torch.Tensor,
    ) -> None:
        self._prober = prober
        self._read = read
        self._run = run
        self._reference = reference

    def run(self, strategy: Strategy) -> ProbeOutcome:
        """Run on the history as ``strategy`` would give it back. Every rank runs the same strategy."""
        decoded = self._prober.decode(strategy, self._read)
        log_q, errors = self._run(decoded.get)
        kl = (self._reference.exp() * (self._reference - log_q)).sum(-1).mean().item()
        return ProbeOutcome(self._prober.mean_of_ranks(errors), kl)
