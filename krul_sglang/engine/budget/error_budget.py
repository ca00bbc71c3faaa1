"""The strategy ``budget`` in the engine: it measures damage, and probes the model to learn its cost."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from krul_backend.attention.rows import QueryRows
from krul_backend.codec.round_trip import LayerRoundTrip
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.errors import SensitivityError
from krul_backend.segment import ModelIdentity
from krul_backend.store.interface import KVStore
from krul_backend.strategy.sensitivity import DamageKind, SensitivityTable
from krul_backend.strategy.strategy import Precision, Strategy
from krul_sglang.engine.budget.budgeted_choice import BudgetedChoice, ConversationKV, errors_of
from krul_sglang.engine.budget.damage import DamageMeter
from krul_sglang.engine.budget.probing import Prober
from krul_sglang.engine.budget.provenance import DamagedSpan, KvProvenance, carried_damage, spent_damage
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.save.strategy_choice import Choice, Decision
from krul_sglang.engine.save.turn import StoredPath, Turn

logger = logging.getLogger(__name__)

_PROBES_WHILE_UNKNOWN = 8
_MAX_FIRST_PROBES = 200
"""After this many probes the model counts as known, even if the damage of some layer never showed."""

_PRECISIONS = (Precision.INT8, Precision.INT4, Precision.INT2, Precision.INT0)


@dataclass(frozen=True)
class _History:
    """The damage of a conversation so far, at the time when a turn of it is stored.

    ``spent``: the damage of its segments in nats, infinite if it is not known. Tokens from
    ``first_new_token`` on are stored now. Tokens from ``first_exact_token`` on were computed, not decoded.
    ``carried``: the damage in nats that each run of tokens to be stored already has.
    """

    spent: float
    first_new_token: int
    first_exact_token: int
    carried: tuple[float, ...]


class ErrorBudget(Decision):
    """Stores each turn in the fewest bytes whose damage, measured on that conversation, stays in the budget.

    A conversation has one budget, ``limit``, however often it leaves and returns: each segment's parameters
    have its damage, and a turn starts from the sum. Only what the turn adds is measured, on the KV in the
    pool. Tokens that came back lossy are never learned from: no probe sees them. If their segment has
    left the store, they are stored again, and their old damage is added to the new.

    A turn may spend a share of what is left: its tokens over the tokens of the conversation and one further
    turn like it. That is half at first, ``1 / (k (k + 1))`` of the limit in the ``k``-th of equal turns. So
    the sum stays below the limit, and no turn is left without a budget.

    ``decide`` runs on the thread that stores turns. ``wants_probe`` and ``probe`` run on the scheduler's, the
    latter only while no turn is being stored, so that one thread at a time uses the table.

    ``table_path`` keeps the table of this model between runs; the first rank reads and writes it. None keeps
    nothing, because no later run has this model.
    """

    def __init__(
        self,
        *,
        limit: float,
        store: KVStore,
        provenance: KvProvenance,
        probe_share: float,
        table_path: Path | None,
        model: ServedModel,
        pool: DevicePool,
        codec: SegmentCodec,
        prober: Prober,
        agreement: RankAgreement,
    ) -> None:
        self.num_probes = 0
        self.last_kl: float | None = None
        self._last_spent, self._last_damage = 0.0, 0.0
        self._limit = limit
        self._store = store
        self._provenance = provenance
        self._model = model
        self._prober = prober
        self._last_strategy: Strategy | None = None
        self._probes_due = 0.0
        self._pool = pool
        self._codec = codec
        self._agreement = agreement
        self._probe_share = probe_share
        self._table_path = table_path
        self._is_first_rank = model.identity.tp_rank == 0
        self._limit = limit
        self._table = _load_table(table_path, model.identity, agreement)
        self._choice = self._make_choice()

    def _make_choice(self) -> BudgetedChoice:
        shape = self._pool.shape
        return BudgetedChoice(
            DamageMeter(self._table),
            self._table,
            native_token_bytes=shape.k_token_bytes + shape.v_token_bytes,
            precisions=_PRECISIONS,
            agree=self._mean_over_ranks,
        )

    def forget_model(self) -> None:
        """Start probing again, and keep nothing for later runs, which have other weights."""
        self._table = SensitivityTable(self._table.model, self._table.num_layers)
        self._choice = self._make_choice()
        self._last_strategy = None
        self.num_probes = 0
        self._table_path = None

    def decide(self, turn: Turn | None, missing: Sequence[range]) -> Choice:
        strategy, damage = Strategy.from_pairs(self._pool.num_layers), 0.0
        if turn is None:
            self._agreed(None)
            return Choice(strategy, ())
        page_size = self._model.identity.page_size
        runs = [range(pages.start * page_size, pages.stop * page_size) for pages in missing]
        history = self._history(turn, runs)
        rows = _rows_of(turn)
        agreed = self._agreed(None if rows is None else history)
        if rows is not None and agreed is not None:
            history = agreed
            limit = self._limit_of(history, len(turn.token_ids))
            if limit > 0:
                kv = self._conversation(turn, history, rows)
                strategy, damage = self._choice.choose(kv, limit)
            self._last_strategy = strategy
            self._last_spent, self._last_damage = history.spent, damage
        # The runs were measured together: each counts with the share of its tokens.
        num_new = sum(len(run) for run in runs)
        shares = [damage * len(run) / num_new for run in runs]
        return Choice(strategy, tuple(map(operator.add, history.carried, shares)))

    def _history(self, turn: Turn, runs: Sequence[range]) -> _History:
        """What this rank knows of the turn's conversation; after an error the whole budget is spent."""
        num_tokens = len(turn.token_ids)
        first_new_token = runs[0].start if runs else num_tokens
        try:
            lossy = self._provenance.read(turn.slots)
            spent = spent_damage(self._stored_damage(turn), lossy, runs, num_tokens)
        except Exception:
            logger.exception("krul: what a conversation has spent of its error budget is not known")
            return _History(math.inf, first_new_token, num_tokens, (math.inf,) * len(runs))
        first_exact_token = max((span.end for span in lossy), default=0)
        carried = tuple(carried_damage(lossy, run) for run in runs)
        return _History(spent, first_new_token, first_exact_token, carried)

    def _stored_damage(self, turn: Turn) -> list[DamagedSpan]:
        """The conversation's segments in DRAM, with their damage."""
        spans = []
        for segment in self._store.path_segments(self._model.identity, turn.page_keys):
            header = segment.header
            damage = self._codec.damage_of(header.codec_params, header.num_tokens)
            spans.append(DamagedSpan(header.start_token, header.end_token, header.start_token, damage))
        return spans

    def _agreed(self, history: _History | None) -> _History | None:
        """The worst of what the ranks know, which differs because each evicts on its own.

        None if a rank has None: it does not store the turn, or has no rows to measure on.
        """
        mine = None
        if history is not None:
            mine = torch.tensor(
                [history.spent, -history.first_new_token, history.first_exact_token], dtype=torch.float64
            )
        of_ranks = self._agreement.gather(mine, (3,))
        if history is None or of_ranks is None:
            return None
        spent, first_new, first_exact = torch.stack(of_ranks).amax(0).tolist()
        return replace(
            history, spent=spent, first_new_token=int(-first_new), first_exact_token=int(first_exact)
        )

    def _limit_of(self, history: _History, num_tokens: int) -> float:
        """The damage in nats that storing the new tokens may cause."""
        num_new = num_tokens - history.first_new_token
        return max(0.0, self._limit - history.spent) * num_new / (num_tokens + num_new)

    def _conversation(self, turn: Turn, history: _History, rows: QueryRows) -> ConversationKV:
        num_tokens, first_new = len(turn.token_ids), history.first_new_token
        return ConversationKV(
            rows=rows,
            read=lambda layer: self._pool.gather(layer, turn.slots),
            round_trip=LayerRoundTrip(self._codec, start_token=0, num_kept=first_new),
            share=(num_tokens - first_new) / num_tokens,
            is_exact=history.first_exact_token <= first_new,
        )

    def wants_probe(self) -> bool:
        """Whether to probe after this turn: always while the model is unknown, then after a share of turns.

        Call it once per stored turn.
        """
        if self._probe_share == 0:
            return False
        self._probes_due += 1.0 if self._is_model_unknown() else self._probe_share
        if self._probes_due < 1.0:
            return False
        self._probes_due -= 1.0
        return True

    def probe(self, path: StoredPath) -> None:
        """Try on a stored conversation what teaches most: a layer alone, or the last whole strategy.

        A conversation that came back lossy is skipped: its true answers are not known.
        """
        if self._prober.is_on_any_rank(bool(self._provenance.read(path.slots))):
            return
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
        """Stop probing. What was learned stays."""
        self._probe_share = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "probes": self.num_probes,
            "last_kl": self.last_kl,
            "last_spent": self._last_spent if math.isfinite(self._last_spent) else None,
            "last_damage": self._last_damage,
            "spread": self._table.spread,
        }

    def _is_model_unknown(self) -> bool:
        return self.num_probes < _MAX_FIRST_PROBES and any(
            self._table.confidence(layer, kind) < 1.0
            for kind in DamageKind
            for layer in range(self._pool.num_layers)
        )

    def _save_table(self) -> None:
        if self._table_path is None:
            return
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


def _rows_of(turn: Turn) -> QueryRows | None:
    """The query rows that were kept of a turn; None if there are none."""
    if turn.attention is None:
        return None
    try:
        return turn.attention.rows(len(turn.token_ids))
    except Exception:
        # The other ranks wait for this one: without its rows, all store the turn natively.
        logger.exception("krul: the query rows of a turn could not be read")
        return None


def table_path(cache_dir: str, model: ModelIdentity) -> Path:
    """The table's file: one per model and element type, for any page size and number of ranks."""
    return Path(cache_dir).expanduser() / "sensitivity" / f"{_table_model(model)}.json"


def _table_model(model: ModelIdentity) -> str:
    return f"{model.config_digest[:32]}-{model.dtype}"


def _load_table(path: Path | None, model: ModelIdentity, agreement: RankAgreement) -> SensitivityTable:
    """Load the first rank's table on every rank; an empty one if there is none that can be used."""
    content = b""
    if model.tp_rank == 0 and path is not None:
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
