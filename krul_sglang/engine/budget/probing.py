"""Measures what the stored form of a conversation would cost its next tokens, while the server is idle."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from krul_backend.codec.layout import LayerKV
from krul_backend.codec.registry import ModelCodecs
from krul_backend.errors import KrulError
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import Lease
from krul_sglang.engine.budget.provenance import damage_of
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.restore import SegmentReader, TailGroups, open_segments
from krul_sglang.engine.save import StoredPath

logger = logging.getLogger(__name__)

PROBED_TOKENS = 64

MOST_HISTORY_TOKENS = 8192
"""Longer histories are not probed. All of a history is decoded, and attended to twice, on the scheduler's
thread: a request that comes meanwhile waits for that."""

History = Callable[[int], LayerKV]
"""The KV of a layer, of all tokens before those that are probed."""

RunOnHistory = Callable[[torch.Tensor], torch.Tensor]
"""Logits ``[W, vocabulary]`` (float32) of ``W`` token ids that follow a history.

If the history fails, it raises at its end: other ranks wait in the collectives of the forward."""

PrepareForward = Callable[[int, int, History], RunOnHistory]
"""Makes ready all that a forward needs, given how many tokens the history has and how many follow."""

_LEAST_DIVERGENCE = 1e-9
"""Rounding alone makes differences of this size."""


@dataclass(frozen=True)
class ProbeOutcome:
    """The divergence in nats, mean over the probed tokens: ``kl`` as it is, and ``noted`` as the bases
    expected it when the segments were stored."""

    kl: float
    noted: float


@dataclass(frozen=True, eq=False)
class _Probe:
    """What one rank has ready for a probe: the tokens ``[W]`` after the history, and both histories."""

    token_ids: torch.Tensor
    history: _StoredHistory
    run_true: RunOnHistory
    run_stored: RunOnHistory


class Prober:
    """Compares next-token distributions on the true history of a conversation and on the stored one.

    It runs short forwards on the scheduler's thread, on all ranks together, because the model's collectives
    run in them. ``group`` joins the ranks of the model, None for one rank.

    The ranks exchange twice, whatever fails on one of them: each says whether it is ready, then all run both
    forwards, then each says how that went. So all come to the same outcome, or all fail.
    """

    def __init__(
        self,
        prepare: PrepareForward,
        pool: DevicePool,
        codec: ModelCodecs,
        store: KVStore,
        model: ServedModel,
        group: Any | None,
    ) -> None:
        self._prepare = prepare
        self._pool = pool
        self._codec = codec
        self._store = store
        self._model = model
        self._group = group

    def measure(self, path: StoredPath, is_exact: Callable[[], bool]) -> ProbeOutcome | None:
        """Run the last tokens of ``path`` on its true history, which lies in the pool, and on the stored one.

        None if the history is too long, if a rank has no exact KV (``is_exact()``), or not the whole history
        in host memory, or if the stored history is expected to cost nothing. Raises what fails on this rank,
        and KrulError if something fails on another one.
        """
        page_size = self._model.identity.page_size
        num_history = (len(path.token_ids) - PROBED_TOKENS) // page_size * page_size
        if not 0 < num_history <= MOST_HISTORY_TOKENS:
            return None
        with ExitStack() as held:
            probe: _Probe | None = None
            error: Exception | None = None
            noted = kl = 0.0
            try:
                if is_exact():
                    probe = self._prepared(path, num_history, held)
                if probe is not None:
                    noted = sum(map(damage_of, probe.history.readers)) / len(path.token_ids)
            except Exception as caught:
                error = caught
            num_unready, noted = self._sums_of_ranks(error, float(probe is None), noted)
            if num_unready or probe is None or not noted > 0:
                return None
            try:
                kl = self._divergence(probe)
            except Exception as caught:
                error = caught
            kl, num_ranks = self._sums_of_ranks(error, kl, 1.0)
            # Each rank has noted what its own heads lose, or, of latent KV, all the same.
            noted *= self._model.identity.tp_size / num_ranks
            return ProbeOutcome(max(kl / num_ranks, _LEAST_DIVERGENCE), noted)

    def _prepared(self, path: StoredPath, num_history: int, held: ExitStack) -> _Probe | None:
        """All that this rank can do before the forwards; None if it cannot read the whole history."""
        lease = self._store.lease(
            self._model.identity,
            path.page_keys[: num_history // self._model.identity.page_size],
            path.token_ids[:num_history],
            fast_copies="skip",
        )
        if lease is None:
            return None
        held.callback(self._store.release, lease)
        readers = self._readers(lease, num_history)
        if readers is None:
            return None
        token_ids = self._pool.streams.from_list(path.token_ids[num_history:].tolist())
        stored_history = _StoredHistory(self._pool, path, readers)
        true = partial(self._pool.gather, slots=path.slots[:num_history])
        run_true, run_stored = (
            self._prepare(num_history, len(token_ids), history) for history in (true, stored_history.layer)
        )
        return _Probe(token_ids, stored_history, run_true, run_stored)

    def _divergence(self, probe: _Probe) -> float:
        """The divergence of the predictions on the stored history from those on the true one, in nats."""
        predictions, errors = [], []
        for run in (probe.run_true, probe.run_stored):
            # After an error the other ranks run the second forward, too.
            try:
                predictions.append(run(probe.token_ids).log_softmax(-1))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        probe.history.tails.check()
        true, stored = predictions
        return (true.exp() * (true - stored)).sum(-1).mean().item()

    def _readers(self, lease: Lease, num_history: int) -> list[SegmentReader] | None:
        """Readers of the whole history; None if it is not in host memory, damaged or undecodable."""
        if not lease.is_in_dram:
            return None
        try:
            readers = open_segments(lease, self._codec, num_history)
        except KrulError as error:
            logger.debug("krul: no probe of a conversation that cannot be read: %s", error)
            return None
        is_whole = sum(reader.num_tokens for reader in readers) == num_history
        is_sound = all(
            reader.source.is_right(layer) for reader in readers for layer in range(len(reader.source.blocks))
        )
        return readers if is_whole and is_sound else None

    def _sums_of_ranks(self, error: Exception | None, *values: float) -> list[float]:
        """The sums of these values over all ranks. Every rank raises if one passes an error, which is raised
        there."""
        total = torch.tensor([float(error is not None), *values], dtype=torch.float64)
        if self._group is not None:
            torch.distributed.all_reduce(total, group=self._group)
        if error is not None:
            raise error
        num_failed, *sums = total.tolist()
        if num_failed:
            raise KrulError("a probe failed on another rank")
        return sums


class _StoredHistory:
    """The history as it would come back.

    Tokens that a layer does not hold stay as they are in the pool: a restore recomputes them.
    """

    def __init__(self, pool: DevicePool, path: StoredPath, readers: Sequence[SegmentReader]) -> None:
        self.readers = readers
        self._pool = pool
        self._slots = path.slots[: readers[-1].end_token]
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        places = torch.arange(len(self._slots), device=self._slots.device)
        for reader in readers:
            head_ends = reader.decoder.decodable_from(reader.source.header.layer_first_token)
            reader.begin(head_ends, places[reader.first_token : reader.end_token])
        self.tails = TailGroups(readers, pool.streams)

    def layer(self, layer: int) -> LayerKV:
        """The KV of a layer; asked for once, in ascending order."""
        for group in self.tails.of_layer(layer):
            group.fetch(self._pool.streams)
            group.restore(self)
        kv = LayerKV(*self.buffers(layer))
        del self._layers[layer]
        return kv

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the layer's true KV, which the tails are written over."""
        if layer not in self._layers:
            true = self._pool.gather(layer, self._slots)
            self._layers[layer] = true.k, true.v
        return self._layers[layer]
