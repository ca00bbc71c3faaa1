"""Chooses how much each turn of a conversation may lose, so that the conversation stays within its budget."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from krul_backend.attention.rows import QueryRows, attention_drawn
from krul_backend.codec.segment_codec import AwaitedBasesError, SegmentCodec
from krul_backend.codec.subspace.codec import MOST_OUTSIDE, EncodedSegment, SubspaceCodec
from krul_backend.errors import CodecError
from krul_backend.store.interface import KVStore
from krul_backend.strategy.strategy import Strategy
from krul_sglang.engine.budget.probing import Prober
from krul_sglang.engine.budget.provenance import DamagedSpan, KvProvenance, carried_damage, spent_damage
from krul_sglang.engine.budget.served_bases import ServedBases
from krul_sglang.engine.budget.subspace_encoding import (
    SHARE_OF_LEFT,
    RunLimit,
    SubspaceEncoding,
    first_group_token_bytes,
)
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.save.strategy_choice import Decision
from krul_sglang.engine.save.turn import StoredPath, Turn
from krul_sglang.engine.save.turn_encoding import LayerEncoding, TurnEncoding

logger = logging.getLogger(__name__)

_LEARNING_RATE = 0.2
_LARGEST_CORRECTION = 8.0
"""Probes correct expected damage by at most this factor, up or down."""

_MAX_REMEMBERED = 100_000
"""Segments whose damage is remembered: those that have left DRAM for a lower tier are not asked for it."""


@dataclass(frozen=True, eq=False)
class _BasesInUse:
    """Bases that turns are stored in, the ``number``-th of this rank, and the bytes that a token takes in
    each of their groups: a mean, which each turn moves."""

    number: int
    subspace: SubspaceCodec
    group_token_bytes: list[float]


@dataclass(frozen=True, eq=False)
class _Measured:
    """What was measured, with ``bases``, of each run of tokens that is to be stored.

    ``attention [L, Hkv, tokens of the run]``: see ``GroupBasis.token_worth``. ``outside``: the damage of what
    the bases cannot represent, in nats at the end of the conversation.
    """

    bases: _BasesInUse
    attention: tuple[torch.Tensor, ...]
    outside: tuple[float, ...]


@dataclass(frozen=True)
class _History:
    """The damage of a conversation so far, at the time when a turn of it is stored.

    ``spent``: of its segments, in nats; infinite if it is not known. ``carried``: what each run of tokens to
    be stored has lost already, in nats at the run's own end.
    """

    spent: float
    carried: tuple[float, ...]


class ErrorBudget(Decision):
    """Stores each turn in the fewest bytes whose expected damage stays in the conversation's budget.

    A conversation has one budget, ``limit`` nats per predicted token, however often it leaves and returns:
    each segment's parameters have its damage, and a turn gets what is left. What a segment costs falls with
    every token that follows, since attention is shared among more tokens: so equal turns get equal errors.
    Each rank stores its own heads, and gets an equal share of the limit.

    Tokens that came back lossy count with what they have lost, also when their segment has left the store
    and they are stored again. A turn is stored natively if nothing is left for it, if what the bases cannot
    represent of it costs nearly all of that, if nothing was recorded of its attention, until every rank has
    its bases, or if the weights are no longer those that the bases were learned from. So is a run of it that
    turns out, once it is encoded, to cost more than it may.

    On idle servers a stored conversation is decoded and compared with the truth, after a share of the turns,
    ``probe_share``. That moves the correction of expected damage. What is noted of a segment, in its
    parameters and here, is what the bases expect of it; the correction in force is applied to all notes alike
    when they are read. So old segments cost what they would be expected to cost today.

    ``decide`` runs on the thread that stores turns. ``wants_probe`` and ``probe`` run on the scheduler's, the
    latter only while no turn is being stored.
    """

    def __init__(
        self,
        *,
        limit: float,
        probe_share: float,
        store: KVStore,
        provenance: KvProvenance,
        model: ServedModel,
        pool: DevicePool,
        codec: SegmentCodec,
        bases: ServedBases,
        prober: Prober,
        agreement: RankAgreement,
    ) -> None:
        self.num_probes = 0
        self.last_kl: float | None = None
        self.last_expected: float | None = None
        self._last_spent, self._last_damage, self._last_outside = 0.0, 0.0, 0.0
        self._num_unfamiliar = self._num_unrecorded = 0
        self._correction = 1.0
        # By the last page of a segment, the oldest first.
        self._remembered: dict[str, DamagedSpan] = {}
        self._limit = limit / agreement.num_ranks
        self._probe_share = probe_share
        self._probes_due = 1.0
        self._store = store
        self._provenance = provenance
        self._model = model
        self._pool = pool
        self._codec = codec
        self._bases = bases
        # Those that turns are stored in: None until every rank has its own.
        self._in_use: _BasesInUse | None = None
        self._prober = prober
        self._agreement = agreement
        self._are_weights_known = True

    def forget_model(self) -> None:
        """Store natively from here on: the bases belong to other weights."""
        self._are_weights_known = False
        self._probe_share = 0.0
        self._bases.recent = None
        logger.warning("krul: the weights are not those that the bases were learned from: turns stay native")

    def decide(self, turn: Turn | None, missing: Sequence[range]) -> TurnEncoding:
        if turn is None:
            self._agreed(None, 0.0)
            return self._native((), (), ())
        page_size = self._model.identity.page_size
        runs = [range(pages.start * page_size, pages.stop * page_size) for pages in missing]
        for pages in missing:
            for key in turn.page_keys[pages.start : pages.stop]:
                # Its segment is not stored any more.
                self._remembered.pop(key, None)
        if self._bases.recent is not None and missing and not turn.tenant:
            new_pages = range(missing[0].start, missing[-1].stop)
            self._bases.recent.add(turn.page_keys, turn.token_ids, new_pages)
        last_keys = [turn.page_keys[pages.stop - 1] for pages in missing]
        history = self._history(turn, runs)
        measured = self._measured(turn, runs)
        agreed = self._agreed(measured, history.spent)
        # As the bases expect damage, like all that is noted.
        left = 0.0 if agreed is None else self._limit / self._correction - agreed[0]
        self._last_spent, self._last_damage = history.spent, 0.0
        self._last_outside = outside = 0.0 if measured is None else sum(measured.outside)
        if self._in_use is None or measured is None or agreed is None or left <= 0:
            return self._native(last_keys, runs, history.carried)
        num_tokens, num_new = len(turn.token_ids), sum(map(len, runs))
        usable = SHARE_OF_LEFT * left
        if agreed[1] > MOST_OUTSIDE * usable:
            self._warn_unfamiliar()
            self._num_unfamiliar += 1
            self._bases.drift.add_unfamiliar(num_new)
            return self._native(last_keys, runs, history.carried)
        limits = []
        for run, carried, drawn, lost in zip(
            runs, history.carried, measured.attention, measured.outside, strict=True
        ):
            # What rounding may cost is shared by length. It is counted at the end of the conversation.
            at_end, to_own_end = lost + (usable - outside) * len(run) / num_new, num_tokens / run.stop
            limits.append(RunLimit(at_end * to_own_end, lost * to_own_end, carried, drawn))
        num_unfamiliar = self._num_unfamiliar

        def on_encoded(index: int, encoded: EncodedSegment | None) -> None:
            run, damage = runs[index], 0.0 if encoded is None else encoded.damage
            self._last_damage += damage * run.stop / num_tokens
            self._remember(last_keys[index], run, damage + limits[index].carried)
            # What is known of other bases says nothing of those that came meanwhile.
            are_newest = measured.bases is self._in_use
            if encoded is None:
                # The turn counts once, however many of its runs are native.
                self._num_unfamiliar = num_unfamiliar + 1
                if are_newest:
                    self._bases.drift.add_unfamiliar(len(run))
            elif are_newest:
                self._bases.drift.add(encoded.mean_offset, len(run))

        native, bases = self._unshared(history.carried), measured.bases
        return SubspaceEncoding(bases.subspace, limits, bases.group_token_bytes, on_encoded, native)

    def _remember(self, last_key: str, run: range, damage: float) -> None:
        """Remember what a segment costs at its own end, in nats, by its last page."""
        self._remembered[last_key] = DamagedSpan(run.start, run.stop, run.start, damage * run.stop)
        if len(self._remembered) > _MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]

    def _native(
        self, last_keys: Sequence[str], runs: Sequence[range], carried: Sequence[float]
    ) -> TurnEncoding:
        for of_run in zip(last_keys, runs, carried, strict=True):
            self._remember(*of_run)
        return self._unshared(carried)

    def _unshared(self, carried: Sequence[float]) -> TurnEncoding:
        return LayerEncoding(self._codec, Strategy.from_pairs(self._pool.num_layers), carried)

    def _history(self, turn: Turn, runs: Sequence[range]) -> _History:
        """What this rank knows of the turn's conversation; after an error the whole budget is spent."""
        num_tokens = len(turn.token_ids)
        try:
            lossy = self._provenance.read(turn.slots)
            spent = spent_damage(self._stored_damage(turn), lossy, runs, num_tokens)
        except Exception:
            logger.exception("krul: what a conversation has spent of its error budget is not known")
            return _History(math.inf, (math.inf,) * len(runs))
        return _History(spent, tuple(carried_damage(lossy, run) for run in runs))

    def _stored_damage(self, turn: Turn) -> list[DamagedSpan]:
        """The conversation's segments with their damage: those that this server stored, and those in DRAM."""
        spans = [self._remembered[key] for key in turn.page_keys if key in self._remembered]
        for segment in self._store.path_segments(self._model.identity, turn.page_keys):
            header = segment.header
            try:
                opened = self._codec.open(
                    header.codec_params, start_token=header.start_token, num_tokens=header.num_tokens
                )
            except AwaitedBasesError:
                continue
            except CodecError as error:
                # It would be a miss. Once it is dropped, the next turn stores its tokens again.
                logger.debug("krul: a stored segment cannot be decoded here: %s", error)
                self._store.report_damage(segment.segment_id, "undecodable")
                continue
            spans.append(
                DamagedSpan(
                    header.start_token,
                    header.end_token,
                    header.start_token,
                    opened.damage * header.end_token,
                )
            )
        return spans

    def _measured(self, turn: Turn, runs: Sequence[range]) -> _Measured | None:
        """Measure the runs of a turn; None without bases, or if nothing was recorded of its attention."""
        rows, bases = _rows_of(turn), self._newest() if self._in_use is None else self._in_use
        if not runs or bases is None or not self._are_weights_known:
            return None
        if rows is None:
            if not self._num_unrecorded:
                logger.warning(
                    "krul: nothing was recorded of a turn's attention, so it is stored natively. If many "
                    "requests run at a time, raise query_memory (unrecorded_turns in /server_info counts)"
                )
            self._num_unrecorded += 1
            return None
        start, end, num_tokens = runs[0].start, runs[-1].stop, len(turn.token_ids)
        try:
            drawn = attention_drawn(
                rows, lambda layer: self._pool.gather_keys(layer, turn.slots), start, end - start
            )
            attention = [drawn[..., run.start - start : run.stop - start] for run in runs]
            outside = [
                bases.subspace.outside(
                    partial(self._pool.gather, slots=turn.slots[run.start : run.stop]),
                    start_token=run.start,
                    num_tokens=len(run),
                    attention=of_run,
                )
                for run, of_run in zip(runs, attention, strict=True)
            ]
        except Exception:
            # The other ranks wait for this one: without its heads, all store the turn natively.
            logger.exception("krul: what a turn would lose could not be measured")
            return None
        at_end = [lost * run.stop / num_tokens for lost, run in zip(outside, runs, strict=True)]
        return _Measured(bases, tuple(attention), tuple(at_end))

    def _newest(self) -> _BasesInUse | None:
        number, subspace = self._bases.num_had, self._bases.subspace
        if subspace is None:
            return None
        return _BasesInUse(number, subspace, first_group_token_bytes(subspace.bases, self._pool.shape))

    def _agreed(self, measured: _Measured | None, spent: float) -> tuple[float, float] | None:
        """The most that any rank has spent, since each evicts on its own, and the most that any would lose
        outside of its bases; None if one could not measure.

        Once each rank has newer bases than those in use, the next turn is stored in them; this one already
        if there were none before.
        """
        mine = None
        if measured is not None:
            newest = measured.bases.number if self._in_use is None else self._bases.num_had
            mine = torch.tensor([spent, sum(measured.outside), newest], dtype=torch.float64)
        of_ranks = self._agreement.gather(mine, (3,))
        if of_ranks is None or measured is None:
            return None
        stacked = torch.stack(of_ranks)
        if self._in_use is None or stacked[:, 2].amin() > self._in_use.number:
            self._in_use = measured.bases if self._in_use is None else self._newest()
            assert self._in_use is not None
            self._bases.drift.begin_again()
            # Other bases may expect less of the same text: then it would be allowed to lose too much.
            self._correction = max(1.0, self._correction)
            digest = self._in_use.subspace.bases.digest[:16]
            logger.info("krul: turns are stored in bases %s from here on", digest)
        spent, outside, _ = stacked.amax(0).tolist()
        return spent, outside

    def _warn_unfamiliar(self) -> None:
        if not self._num_unfamiliar:
            logger.warning(
                "krul: a turn is unlike the text that the bases were learned from, and is stored natively: "
                "they would lose %.3g nats of it. Learn bases from such text if this is frequent",
                self._correction * self._last_outside,
            )

    def wants_probe(self) -> bool:
        """True if this turn is to be probed: the first one, then a share of them. Call it once per turn."""
        self._probes_due += self._probe_share
        if self._probes_due < 1.0 or self._probe_share == 0:
            return False
        self._probes_due -= 1.0
        return True

    def probe(self, path: StoredPath) -> None:
        """Compare what a stored conversation would cost if it came back with what was expected.

        A conversation that came back lossy is skipped: its true answers are not known. Before turns are
        stored in bases there is nothing to compare, and the next turn is wanted instead. All ranks have
        decided on the same turns by now, so they do the same.
        """
        if self._in_use is None:
            self._probes_due = 1.0
            return
        outcome = self._prober.measure(path, partial(self._provenance.is_exact, path.slots))
        if outcome is None:
            return
        self.num_probes += 1
        self.last_kl, self.last_expected = outcome.kl, self._correction * outcome.noted
        correction = self._correction * (self.last_kl / self.last_expected) ** _LEARNING_RATE
        self._correction = min(max(correction, 1 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)

    def stop_probes(self) -> None:
        """Stop probing. What was learned stays."""
        self._probe_share = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values. What was last spent and lost is as expected with the correction that is in force."""
        subspace, correction, spent = self._bases.subspace, self._correction, self._last_spent
        return {
            **self._bases.as_dict(),
            "bases_held": self._codec.num_bases,
            "damage_factor": None if subspace is None else correction * subspace.bases.damage_factor,
            "probes": self.num_probes,
            "last_kl": self.last_kl,
            "last_expected": self.last_expected,
            "last_spent": correction * spent if math.isfinite(spent) else None,
            "last_damage": correction * self._last_damage,
            "last_outside": correction * self._last_outside,
            "unfamiliar_turns": self._num_unfamiliar,
            "unrecorded_turns": self._num_unrecorded,
        }


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
