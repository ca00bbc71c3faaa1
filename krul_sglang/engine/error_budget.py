"""The strategy ``budget`` in the engine: measured damage, and probes that teach what it costs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from krul_backend.attention.rows import QueryRows
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.round_trip import UnitRoundTrip
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.errors import SensitivityError
from krul_backend.segment import ModelIdentity
from krul_backend.strategy.budgeted_choice import BudgetedChoice, ConversationKV, errors_of
from krul_backend.strategy.damage import DamageMeter
from krul_backend.strategy.sensitivity import DamageKind, SensitivityTable
from krul_backend.strategy.strategy import Precision, Strategy
from krul_sglang.engine.agreement import RankAgreement
from krul_sglang.engine.kv_pool import DevicePool
from krul_sglang.engine.layer_maps import LayerMapLearner
from krul_sglang.engine.probing import Prober
from krul_sglang.engine.strategy_choice import Decision
from krul_sglang.engine.turn import StoredPath, Turn

logger = logging.getLogger(__name__)

_PROBES_WHILE_UNKNOWN = 8
_MAX_FIRST_PROBES = 200
"""A layer whose damage never shows would otherwise keep the model unknown for ever."""

_PRECISIONS = (Precision.INT8, Precision.INT4, Precision.INT2, Precision.INT0)
PAIR_PRECISIONS = (Precision.NATIVE, Precision.INT8, Precision.INT4, Precision.INT2)


class ErrorBudget(Decision):
    """Stores each turn in the fewest bytes whose damage, measured on that conversation, stays in the budget.

    ``decide`` runs on the thread that stores turns. ``wants_probe`` and ``probe`` run on the scheduler's, the
    latter only while no turn is being stored, so that the table has one owner at a time.

    Pairs of layers are offered as soon as ``learner``, which learns from the same turns, has maps of them;
    ``codec`` reads the same maps.

    ``table_path`` is where the table of this model is kept between runs; the first rank reads and writes it.
    """

    def __init__(
        self,
        *,
        limit: float,
        probe_share: float,
        table_path: Path,
        model: ModelIdentity,
        pool: DevicePool,
        codec: SegmentCodec,
        learner: LayerMapLearner,
        prober: Prober,
        agreement: RankAgreement,
    ) -> None:
        self.num_probes = 0
        self.last_kl: float | None = None
        self._prober = prober
        self._last_strategy: Strategy | None = None
        self._probes_due = 0.0
        self._pool = pool
        self._codec = codec
        self._learner = learner
        self._agreement = agreement
        self._probe_share = probe_share
        self._table_path = table_path
        self._is_first_rank = model.tp_rank == 0
        self._table = _load_table(table_path, model, agreement)
        self._choice = BudgetedChoice(
            DamageMeter(self._table, single_precisions=_PRECISIONS, pair_precisions=PAIR_PRECISIONS),
            self._table,
            limit=limit,
            native_token_bytes=pool.shape.k_token_bytes + pool.shape.v_token_bytes,
            max_pairs=pool.num_layers,
            offered=learner.maps.keys,
            agree=self._mean_over_ranks,
        )

    def decide(
        self, turn: Turn | None, statistics: AttentionStatistics | None, rows: QueryRows | None
    ) -> Strategy:
        if turn is None or statistics is None or rows is None:
            return Strategy.from_pairs(self._pool.num_layers)
        self._learner.learn(turn, statistics)
        slots = turn.slots
        self._last_strategy = self._choice.choose(
            statistics,
            ConversationKV(
                rows=rows,
                read=lambda layer: self._pool.gather(layer, slots),
                round_trip=UnitRoundTrip(self._codec, start_token=0),
            ),
        )
        return self._last_strategy

    def wants_probe(self) -> bool:
        """Asked once per stored turn: every turn while the model is unknown, then a share of them."""
        if self._probe_share == 0:
            return False
        self._probes_due += 1.0 if self._is_model_unknown() else self._probe_share
        if self._probes_due < 1.0:
            return False
        self._probes_due -= 1.0
        return True

    def probe(self, path: StoredPath) -> None:
        """Try what teaches most on a stored conversation: a unit alone, or the last whole strategy."""
        opened = self._prober.open(path)
        if opened is None:
            return
        for _ in range(_PROBES_WHILE_UNKNOWN if self._is_model_unknown() else 1):
            strategy = self._choice.next_probe(self._last_strategy)
            if strategy is None:
                break
            outcome = opened.run(strategy)
            self.num_probes += 1
            self.last_kl = outcome.kl
            self._table.update(errors_of(strategy, outcome.errors), outcome.kl)
            logger.debug(
                "krul: probe of %s: errors %s, KL %.2g nats",
                {layer: strategy.layers[layer].precision.value for layer in outcome.errors},
                {layer: f"{error:.2g}" for layer, error in outcome.errors.items()},
                outcome.kl,
            )
        if self._is_first_rank:
            self._save_table()

    def stop_probes(self) -> None:
        """What is known stays; nothing is added."""
        self._probe_share = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "probes": self.num_probes,
            "last_kl": self.last_kl,
            "spread": self._table.spread,
            "layer_maps": self._learner.as_dict(),
        }

    def _is_model_unknown(self) -> bool:
        return self.num_probes < _MAX_FIRST_PROBES and any(
            self._table.confidence(layer, kind) < 1.0
            for kind in DamageKind
            for layer in range(self._pool.num_layers)
        )

    def _save_table(self) -> None:
        try:
            self._table_path.parent.mkdir(parents=True, exist_ok=True)
            self._table.save(self._table_path)
        except OSError as error:
            logger.warning("krul: %s could not be written: %s", self._table_path, error)

    def _mean_over_ranks(self, values: Sequence[float] | None, count: int) -> list[float] | None:
        mine = None if values is None else torch.tensor(values, dtype=torch.float64)
        of_ranks = self._agreement.gather(mine, (count,))
        if of_ranks is None:
            return None
        mean: list[float] = torch.stack(of_ranks).mean(0).tolist()
        return mean


def table_path(cache_dir: str, model: ModelIdentity) -> Path:
    """One file for each model and element type, whatever the page size and the number of ranks."""
    return Path(cache_dir).expanduser() / "sensitivity" / f"{_table_model(model)}.json"


def _table_model(model: ModelIdentity) -> str:
    return f"{model.config_digest[:32]}-{model.dtype}"


def _load_table(path: Path, model: ModelIdentity, agreement: RankAgreement) -> SensitivityTable:
    """The first rank's table, on every rank; a fresh one if there is none that can be used."""
    content = b""
    if model.tp_rank == 0:
        try:
            content = path.read_bytes()
        except OSError:
            logger.info("krul: how sensitive this model is to compression is not known yet; probes will tell")
    content = agreement.broadcast(content)
    if content:
        try:
            return SensitivityTable.parse(content, _table_model(model), model.num_layers)
        except SensitivityError as error:
            logger.warning("krul: %s: %s", path, error)
    return SensitivityTable(_table_model(model), model.num_layers)
