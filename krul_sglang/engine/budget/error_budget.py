"""Chooses how much each turn of a conversation may lose, so that the conversation stays within its budget."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from krul_backend.attention.rows import QueryRows, attention_drawn
from krul_backend.codec.interface import EncodedRun, TokenRun
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.codec import MOST_OUTSIDE, EncodedSegment, SubspaceCodec
from krul_backend.codec.subspace.held_bases import AwaitedBasesError, RunLimit
from krul_backend.codec.units import UnitPlan
from krul_backend.errors import CodecError
from krul_backend.store.interface import KVStore
from krul_backend.strategy import Strategy
from krul_sglang.engine.budget.coarse import coarse_plan
from krul_sglang.engine.budget.correction import DamageCorrection, budget_share
from krul_sglang.engine.budget.probing import Prober
from krul_sglang.engine.budget.provenance import DamagedSpan, KvProvenance, carried_damage, spent_damage
from krul_sglang.engine.budget.served_bases import ServedBases
from krul_sglang.engine.budget.subspace_encoding import (
    SHARE_OF_LEFT,
    SubspaceEncoding,
    first_group_token_bytes,
)
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.save import Decision, LayerEncoding, StoredPath, Turn, TurnEncoding

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 100_000
"""Segments whose damage is remembered: those that have left DRAM for a lower tier are not asked for it."""


@dataclass(frozen=True, eq=False)
class _BasesInUse:
    """Bases that turns are stored in, the ``number``-th of this rank, and the bytes that a token takes in
    each of their groups: a mean, which each turn moves."""

    number: int
    subspace: SubspaceCodec
    group_token_bytes: list[float]


@dataclass(eq=False)
class _Ended:
    """What is known of a turn when it ends, until it is encoded.

    ``lossy``: what of its conversation came back lossy. ``carried``: what each run of tokens to be stored has
    lost already, in nats at the run's own end. ``attention``, of each run, ``[L, Hkv, tokens of the run]``:
    see ``GroupBasis.token_worth``.
    """

    turn: Turn
    runs: tuple[range, ...]
    lossy: Sequence[DamagedSpan]
    carried: tuple[float, ...]
    attention: tuple[torch.Tensor, ...]
    left: float | None = None
    """The nats that all runs together may lose. None until the first run is encoded."""
    usable: float = 0.0
    """The most nats that the run may lose that is encoded now, counted at the end of that run."""


class ErrorBudget(Decision):
    """Stores each turn in the fewest bytes whose expected damage stays in the conversation's budget.

    A conversation has one budget, ``limit`` nats per predicted token, however often it leaves and returns,
    and may be expected to lose ``budget_share`` of it. Each segment's parameters have its damage, and a turn
    gets what is left. What a segment costs falls with every token that follows, since attention is shared
    among more tokens: so equal turns get equal errors. Each rank stores its own heads, and gets an equal
    share of the limit. Tokens that came back lossy count with what they have lost, also when their segment
    has left the store and they are stored again.

    A turn is stored natively for good if nothing was recorded of its attention and the bases look at it, if
    there are no bases yet, if the weights are no longer those that the bases were learned from, or if it has
    images: SGLang names these by token ids from ``vocabulary_size`` on, and the positions behind them are not
    those of tokens. Others are
    stored natively at first. When a run of one is encoded, later, it may lose what is left by then, and new
    tokens at the conversation's end always their share of the budget by length. If what the bases cannot
    represent costs nearly all of that, or all costs more, its layers are stored one by one in few bits, or
    else natively.

    On idle servers a stored conversation is decoded and compared with the truth, after a share of the turns,
    ``probe_share``. That moves the correction of expected damage. What is noted of a segment, in its
    parameters and here, is what the bases expect of it; the correction in force is applied to all notes alike
    when they are read. So old segments cost what they would be expected to cost today.

    ``decide`` runs on the thread that stores turns, what it returns on the one that encodes. ``wants_probe``
    and ``probe`` run on the scheduler's, the latter only while no turn is being stored or encoded.
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
        codec: ModelCodecs,
        bases: ServedBases,
        prober: Prober,
        vocabulary_size: int | None = None,
    ) -> None:
        self.num_probes = 0
        self.last_kl: float | None = None
        self.last_expected: float | None = None
        self._last_spent = self._last_damage = self._last_outside = 0.0
        self._num_unfamiliar = self._num_unrecorded = self._num_coarse = 0
        self._correction = DamageCorrection()
        self._last_factor = 1.0
        # By the last page of a segment, the oldest first.
        self._remembered: dict[str, DamagedSpan] = {}
        self._limit = limit / model.identity.tp_size
        self._probe_share = probe_share
        self._probes_due = 1.0
        self._store = store
        self._provenance = provenance
        self._model = model
        self._pool = pool
        self._codec = codec
        self._bases = bases
        # Those that turns are stored in.
        self._in_use: _BasesInUse | None = None
        self._prober = prober
        self._vocabulary_size = vocabulary_size
        self._are_weights_known = True

    def forget_model(self) -> None:
        """Store natively from here on: the bases belong to other weights."""
        self._are_weights_known = False
        self._probe_share = 0.0
        self._bases.keep_no_text()
        logger.warning("krul: the weights are not those that the bases were learned from: turns stay native")

    def decide(self, turn: Turn | None, missing: Sequence[range]) -> TurnEncoding:
        if turn is None or not missing:
            return self._unshared(())
        page_size = self._model.identity.page_size
        runs = tuple(range(pages.start * page_size, pages.stop * page_size) for pages in missing)
        for pages in missing:
            for key in turn.page_keys[pages.start : pages.stop]:
                # Its segment is not stored any more.
                self._remembered.pop(key, None)
        size = self._vocabulary_size
        has_images = size is not None and bool((np.asarray(turn.token_ids) >= size).any())
        if self._bases.recent is not None and not turn.tenant and not has_images:
            self._bases.recent.add(turn.page_keys, turn.token_ids, range(missing[0].start, missing[-1].stop))
        lossy = self._lossy(turn)
        carried = tuple(math.inf if lossy is None else carried_damage(lossy, run) for run in runs)
        bases = None if has_images else self._newest()
        attention = None if bases is None or lossy is None else self._attention(bases, turn, runs)
        if bases is None or lossy is None or attention is None:
            for run, of_run in zip(runs, carried, strict=True):
                self._remember(turn, run, of_run)
            return self._unshared(carried)
        ended = _Ended(turn, runs, lossy, carried, attention)
        return SubspaceEncoding(
            self._codec.bases,
            bases.subspace.bases.layer_groups,
            bases.group_token_bytes,
            partial(self._limit_of, ended, bases),
            partial(self._note, ended, bases),
            partial(self._without_bases, ended, bases),
            self._unshared(carried, is_copy=True),
        )

    def _limit_of(self, ended: _Ended, bases: _BasesInUse, index: int, run: TokenRun) -> RunLimit | None:
        """Return what run number ``index`` of a turn may lose in bases: its share by length of what all runs
        may lose together. None if the bases cannot keep it within that."""
        num_tokens, num_new = len(ended.turn.token_ids), sum(map(len, ended.runs))
        if ended.left is None:
            # As the bases expect damage, like all that is noted.
            self._last_spent = spent = self._spent(ended)
            self._last_factor = self._correction.factor(ended.turn.token_ids)
            allowed = budget_share(ended.turn.token_ids) * self._limit / self._last_factor
            ended.left = allowed - spent
            # Known tokens after new ones: none but a part of a page if all new ones are at the end.
            num_after = num_tokens - num_new - ended.runs[0].start
            if spent < math.inf and num_after < self._model.identity.page_size and not any(ended.carried):
                ended.left = max(ended.left, allowed * num_new / num_tokens)
        ended.usable = 0.0
        if ended.left <= 0 or not self._are_weights_known:
            return None
        attention = ended.attention[index][..., : run.num_tokens]
        sample = bases.subspace.sample(
            run.read, start_token=run.start_token, num_tokens=run.num_tokens, attention=attention
        )
        # What a run costs falls with every token that follows: at the conversation's end it is less.
        to_own_end = num_tokens / (run.start_token + run.num_tokens)
        ended.usable = SHARE_OF_LEFT * ended.left * run.num_tokens / num_new * to_own_end
        self._last_outside = sample.outside / to_own_end
        if sample.outside > MOST_OUTSIDE * ended.usable:
            if not self._num_unfamiliar:
                logger.warning(
                    "krul: a turn is unlike the text that the bases were learned from, and not stored in "
                    "them: they would lose %.3g nats of it. Learn bases from such text if this is frequent",
                    self._last_factor * self._last_outside,
                )
            return None
        return RunLimit(ended.usable, sample, ended.carried[index], attention)

    def _note(
        self, ended: _Ended, bases: _BasesInUse, index: int, run: TokenRun, encoded: EncodedSegment
    ) -> None:
        """Note what a run costs, now that it is encoded in bases."""
        self._note_damage(ended, index, run, encoded.damage)
        # What is known of other bases says nothing of those that came meanwhile.
        if bases is self._in_use:
            self._bases.drift.add(encoded.mean_offset, run.num_tokens)

    def _note_damage(self, ended: _Ended, index: int, run: TokenRun, damage: float) -> None:
        tokens = range(run.start_token, run.start_token + run.num_tokens)
        self._last_damage = damage * tokens.stop / len(ended.turn.token_ids)
        self._remember(ended.turn, tokens, damage + ended.carried[index])

    def _without_bases(
        self, ended: _Ended, bases: _BasesInUse, index: int, run: TokenRun, pause: Callable[[], None]
    ) -> EncodedRun:
        """Encode a run that the bases cannot keep: in few bits, or natively if these lose more than it may
        lose."""
        if ended.left is not None and ended.left > 0:
            self._num_unfamiliar += 1
            if bases is self._in_use:
                self._bases.drift.add_unfamiliar(run.num_tokens)
        attention = ended.attention[index][..., : run.num_tokens]
        found = coarse_plan(ended.usable, run, attention, self._codec, bases.subspace, pause)
        self._num_coarse += found is not None
        strategy, damage = found or (Strategy.from_pairs(self._pool.num_layers), 0.0)
        self._note_damage(ended, index, run, damage)
        plan = UnitPlan(strategy, damage + ended.carried[index])
        return self._codec.of(strategy).encode(run, plan, pause)

    def _remember(self, turn: Turn, tokens: range, damage: float) -> None:
        """Remember what a segment costs at its own end, in nats, by its last page."""
        last_key = turn.page_keys[tokens.stop // self._model.identity.page_size - 1]
        self._remembered[last_key] = DamagedSpan(
            tokens.start, tokens.stop, tokens.start, damage * tokens.stop
        )
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.pop(next(iter(self._remembered)), None)

    def _unshared(self, carried: Sequence[float], *, is_copy: bool = False) -> LayerEncoding:
        strategy = Strategy.from_pairs(self._pool.num_layers)
        return LayerEncoding(self._codec, strategy, carried, is_copy=is_copy)

    def _lossy(self, turn: Turn) -> list[DamagedSpan] | None:
        """What of a turn's conversation came back lossy; None if that is not known."""
        try:
            return self._provenance.read(turn.slots)
        except Exception:
            logger.exception("krul: what of a conversation came back lossy is not known")
            return None

    def _spent(self, ended: _Ended) -> float:
        """What this rank knows that a turn's conversation has lost without the turn, in nats; after an error
        the whole budget is spent."""
        try:
            stored = self._stored_damage(ended.turn)
            return spent_damage(stored, ended.lossy, ended.runs, len(ended.turn.token_ids))
        except Exception:
            logger.exception("krul: what a conversation has spent of its error budget is not known")
            return math.inf

    def _stored_damage(self, turn: Turn) -> list[DamagedSpan]:
        """The conversation's segments with their damage: those that this server stored, and those in DRAM."""
        remembered = map(self._remembered.get, turn.page_keys)
        spans = [span for span in remembered if span is not None]
        for segment in self._store.path_segments(turn.model, turn.page_keys):
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
                    header.start_token, header.end_token, header.start_token, opened.damage * header.end_token
                )
            )
        return spans

    def _attention(
        self, bases: _BasesInUse, turn: Turn, runs: Sequence[range]
    ) -> tuple[torch.Tensor, ...] | None:
        """The attention that each token of the runs draws, all alike if the bases do not look at it; None if
        they do and nothing was recorded of it."""
        if not bases.subspace.bases.looks_at_attention:
            size = self._pool.num_layers, self._pool.shape.num_kv_heads
            return tuple(torch.ones(*size, len(run)) for run in runs)
        rows = _rows_of(turn)
        if rows is None:
            if not self._num_unrecorded:
                logger.warning(
                    "krul: nothing was recorded of a turn's attention, so it is stored natively. If many "
                    "requests run at a time, raise query_memory (unrecorded_turns in /server_info counts)"
                )
            self._num_unrecorded += 1
            return None
        start, end = runs[0].start, runs[-1].stop
        read_keys = partial(self._pool.gather_keys, slots=turn.slots)
        try:
            drawn = attention_drawn(rows, read_keys, start, end - start)
        except Exception:
            logger.exception("krul: the attention of a turn could not be measured")
            return None
        return tuple(drawn[..., run.start - start : run.stop - start] for run in runs)

    def _newest(self) -> _BasesInUse | None:
        """The bases that a turn is stored in that ends now; None if there are none."""
        number, subspace = self._bases.num_had, self._bases.subspace
        if subspace is None or not self._are_weights_known or self._pool.is_scaled:
            return None
        if self._in_use is None or self._in_use.number != number:
            token_bytes = first_group_token_bytes(subspace.bases)
            self._in_use = _BasesInUse(number, subspace, token_bytes)
            self._bases.drift.begin_again()
            self._correction.begin_again()
            logger.info("krul: turns are stored in bases %s from here on", subspace.bases.digest[:16])
        return self._in_use

    def wants_probe(self) -> bool:
        """True if this turn is to be probed: the first one, then a share of them. Call it once per turn."""
        self._probes_due += self._probe_share
        if self._probes_due < 1.0 or self._probe_share == 0:
            return False
        self._probes_due -= 1.0
        return True

    def probe(self, path: StoredPath, *, is_encoded: bool = True) -> None:
        """Compare what a stored conversation would cost if it came back with what was expected.

        A conversation that came back lossy is skipped, since its true answers are not known, and so is one of
        which a rank has not encoded all (``is_encoded``): then the next turn is wanted instead.
        """
        outcome = self._prober.measure(path, lambda: is_encoded and self._provenance.is_exact(path.slots))
        if outcome is None:
            self._probes_due = 1.0
            return
        self.num_probes += 1
        self.last_kl = outcome.kl
        self.last_expected = self._correction.factor(path.token_ids) * outcome.noted
        self._correction.observe(outcome.kl, outcome.noted, path.token_ids)

    def stop_probes(self) -> None:
        """Stop probing. What was learned stays."""
        self._probe_share = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values. What was last spent and lost is as expected with ``last_factor``, the correction that
        was in force then."""
        subspace, factor, spent = self._bases.subspace, self._last_factor, self._last_spent
        largest = self._correction.largest
        return {
            **self._bases.as_dict(),
            "bases_held": self._codec.bases.num_held,
            "damage_factor": None if subspace is None else largest * subspace.bases.damage_factor,
            "correction": self._correction.as_dict(),
            "probes": self.num_probes,
            "last_kl": self.last_kl,
            "last_expected": self.last_expected,
            "last_factor": factor,
            "last_spent": factor * spent if math.isfinite(spent) else None,
            "last_damage": factor * self._last_damage,
            "last_outside": factor * self._last_outside,
            "unfamiliar_turns": self._num_unfamiliar,
            "coarse_runs": self._num_coarse,
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
