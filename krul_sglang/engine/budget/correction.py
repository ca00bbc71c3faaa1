"""Corrects the damage that bases expect by what probes have measured, for each kind of text on its own."""

from __future__ import annotations

import math
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from krul_backend.segment import TokenIds

LARGEST_RATIO = 8.0
"""What was measured counts as at most so many times what was expected."""

_SMALLEST_RATIO = 0.5
"""And as at least so much: where the next token is certain, no damage shows, however large it is."""

PROBES_TO_TIGHTEN = 4
"""So many probes in succession are believed at once if they all say that damage is larger."""

HISTORIES_TO_LOOSEN = 16
"""So many different histories must have lost less than was assumed before less is assumed."""

_HISTORIES_KEPT = 32
_HISTORIES_AS_EXPECTED = 4
"""At first, a kind of text counts as if so many histories of it had lost what was expected."""

LONG_TOKENS, _READ_TOKENS, _VARIED_SHARE = 2048, 512, 0.25

VARIED_BUDGET_SHARE = 0.75
"""Varied texts may be expected to lose this share of their budget: some lose a third more than expected."""


def kind_of_text(token_ids: TokenIds) -> str:
    """``repetitive`` if less than a quarter of the last 512 tokens are different ones; else ``varied``, or
    ``long`` from 2,048 tokens on."""
    last = token_ids[-_READ_TOKENS:]
    if len(np.unique(last)) < _VARIED_SHARE * len(last):
        return "repetitive"
    return "long" if len(token_ids) >= LONG_TOKENS else "varied"


def budget_share(token_ids: TokenIds) -> float:
    """Return the share of its budget that a conversation, all its tokens, may be expected to lose."""
    return VARIED_BUDGET_SHARE if kind_of_text(token_ids) == "varied" else 1.0


def _as_expected() -> dict[int, float]:
    return {-number: 1.0 for number in range(1, _HISTORIES_AS_EXPECTED + 1)}


@dataclass
class _Evidence:
    """What was measured of texts of one kind.

    ``ratios`` of measured to expected damage, by the history's checksum (below zero: assumed at first), the
    newest histories last. ``last``: of the last probes, whatever their histories. ``lower``: histories that
    lost less than ``factor`` says since that has changed.
    """

    factor: float = 1.0
    ratios: dict[int, float] = field(default_factory=_as_expected)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=PROBES_TO_TIGHTEN))
    lower: set[int] = field(default_factory=set)

    @property
    def is_enough(self) -> bool:
        return len(self.ratios) >= _HISTORIES_AS_EXPECTED + HISTORIES_TO_LOOSEN

    def add(self, history: int, ratio: float) -> None:
        self.ratios[history] = ratio
        if len(self.ratios) > _HISTORIES_KEPT:
            del self.ratios[next(iter(self.ratios))]
        self.last.append(ratio)
        found = math.fsum(self.ratios.values()) / len(self.ratios)
        if len(self.last) == PROBES_TO_TIGHTEN:
            found = max(found, min(self.last))
        if found >= self.factor:
            self.factor = found
            self.lower.clear()
        elif ratio < self.factor:
            self.lower.add(history)
            if len(self.lower) >= HISTORIES_TO_LOOSEN:
                self.factor = max(1.0, found)
                self.lower.clear()


class DamageCorrection:
    """Says how many times the expected damage a text is to be taken for, from 1 up.

    A probe gives the ratio of measured to expected damage. The factor is the mean ratio of the last
    histories, since the budget limits the mean, or the smallest of the last four probes if that is larger:
    so it rises at once, and no single odd probe raises it far. It falls only when 16 different histories have
    lost less than it says since it last changed, and never below 1, which is what the bases expect. One
    history counts once for that, however often it is probed.

    Texts are told apart by how many of their last tokens are different ones: that is known alike when a turn
    is stored and when it is probed, on every rank. Below a quarter are loops, tables, logs and lists of equal
    records: there the model is certain of the next token, so little damage shows. Prose, dialogues and code
    lie above: when measured, they lost nearly alike, long ones half as much of what was expected. A kind of
    which fewer than 16 histories were probed takes the largest factor of all.

    It has no lock: ``observe`` and ``begin_again`` must not run while another thread reads.
    """

    def __init__(self) -> None:
        self._kinds = {kind: _Evidence() for kind in ("varied", "long", "repetitive")}

    @property
    def largest(self) -> float:
        """The largest factor of any kind of text."""
        return max(evidence.factor for evidence in self._kinds.values())

    def factor(self, token_ids: TokenIds) -> float:
        """What the damage that the bases expect of this conversation, all its tokens, is multiplied by."""
        evidence = self._kinds[kind_of_text(token_ids)]
        return evidence.factor if evidence.is_enough else self.largest

    def observe(self, kl: float, expected: float, token_ids: TokenIds) -> None:
        """Take in a probe: ``kl`` nats were measured where the bases, without any correction, expected
        ``expected``, which is above 0. ``token_ids`` as for ``factor``. A divergence that is not finite
        counts as the largest."""
        ratio = kl / expected
        # What is no number is not below either.
        ratio = max(ratio, _SMALLEST_RATIO) if ratio < LARGEST_RATIO else LARGEST_RATIO
        # A long conversation is one history until it has grown by 2,048 tokens.
        end = max(1, len(token_ids) // LONG_TOKENS) * LONG_TOKENS
        history = zlib.crc32(np.ascontiguousarray(token_ids[:end]).tobytes())
        self._kinds[kind_of_text(token_ids)].add(history, ratio)

    def begin_again(self) -> None:
        """Forget what was measured with other bases. Factors stay until enough is known of the new ones:
        these may expect less of the same text."""
        self._kinds = {kind: _Evidence(evidence.factor) for kind, evidence in self._kinds.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain values: by kind of text its factor, and how many histories say so."""
        return {
            kind: {"factor": evidence.factor, "histories": sum(history >= 0 for history in evidence.ratios)}
            for kind, evidence in self._kinds.items()
        }
