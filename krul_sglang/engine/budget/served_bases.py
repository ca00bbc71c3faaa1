"""Holds the bases of the served model, and watches whether stored text is like the text learned from."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.segment import TokenIds

logger = logging.getLogger(__name__)

PIECE_TOKENS = 1024
"""Of the pieces that a model reads while bases are learned; see ``LearningPlan.text_tokens``."""

_MOST_PIECES = 24
"""As many as are taken of the text that comes with the program."""

_LEAST_PIECE_TOKENS = 64
"""Nothing is learned from shorter pieces."""

UNFAMILIAR_OFFSET = 2.0
"""Mean offsets above this are those of text unlike that which was learned from: see docs/compression.md."""

_UNFAMILIAR_SHARE = 0.25
"""If more of the tokens than this are stored natively because the bases cannot represent them, the text is
unlike that which was learned from."""

_MEAN_TOKENS = 16_384
"""The means are over about so many tokens."""

_LEAST_TOKENS = 4096
"""Nothing is said of the means of fewer tokens."""

_OFFSET = "How much larger coefficients are than in the text learned from, in quarter octaves."
_SHARE = "Share of the last tokens that were stored natively because the bases cannot represent them."


def show(name: str, meaning: str, value: float, tp_rank: int) -> None:
    """Show ``value`` as the gauge ``krul_{name}`` of a rank, if the server has a metrics page."""
    # SGLang sets it before its processes start, if it has a metrics page.
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        _gauge(name, meaning).labels(tp_rank).set(value)


@cache
def _gauge(name: str, meaning: str) -> Any:
    from prometheus_client import Gauge

    return Gauge(f"krul_{name}", meaning, ["tp_rank"], multiprocess_mode="mostrecent")


class RecentText:
    """Keeps the last pieces of conversations, each of at most ``PIECE_TOKENS``. Any thread may use it.

    A conversation is cut into pieces of whole pages, always at the same places. So what several turns or
    conversations begin with is kept once.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._piece_pages = max(1, PIECE_TOKENS // page_size)
        # By the key of its first page; the one that changed last is the last.
        self._pieces: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def add(self, page_keys: Sequence[str], token_ids: TokenIds, new_pages: range) -> None:
        """Keep what a turn added to its conversation: ``new_pages`` of the pages that ``page_keys`` name, and
        ``token_ids`` are the tokens of."""
        first_piece = new_pages.start // self._piece_pages
        with self._lock:
            for first in range(first_piece * self._piece_pages, new_pages.stop, self._piece_pages):
                end = min(first + self._piece_pages, len(page_keys))
                tokens = token_ids[first * self._page_size : end * self._page_size]
                self._pieces.pop(page_keys[first], None)
                self._pieces[page_keys[first]] = tokens[:PIECE_TOKENS].tolist()
                if len(self._pieces) > _MOST_PIECES:
                    del self._pieces[next(iter(self._pieces))]

    def pieces(self) -> list[list[int]]:
        """Those that are long enough to be learned from."""
        with self._lock:
            return [piece for piece in self._pieces.values() if len(piece) >= _LEAST_PIECE_TOKENS]


class TextDrift:
    """Keeps the last and the mean offset of stored segments, see ``SubspaceParameters.mean_offset``, and the
    share of the tokens that the bases cannot represent.

    It warns once if the mean says that the text is unlike what was learned from. If the server has a metrics
    page (``--enable-metrics``), the numbers are there. Changed by one thread.
    """

    def __init__(self, model_path: str, tp_rank: int) -> None:
        self._model_path = model_path
        self._tp_rank = tp_rank
        self._has_warned = False
        self.begin_again()

    def begin_again(self) -> None:
        """Forget what was measured: it was measured against bases that are not the newest any more."""
        self.last: float | None = None
        self.mean: float | None = None
        self.unfamiliar_share = 0.0
        self._num_measured = 0
        self._num_tokens = 0

    @property
    def is_unlike(self) -> bool:
        """Whether bases that are learned from text like this may store it in fewer bytes."""
        is_far = self._num_measured >= _LEAST_TOKENS and (self.mean or 0.0) > UNFAMILIAR_OFFSET
        return is_far or (self._num_tokens >= _LEAST_TOKENS and self.unfamiliar_share > _UNFAMILIAR_SHARE)

    def add(self, offset: float, num_tokens: int) -> None:
        """Count a segment of so many tokens that was stored in the bases."""
        self._num_measured = min(self._num_measured + num_tokens, _MEAN_TOKENS)
        before = offset if self.mean is None else self.mean
        self.last = offset
        self.mean = before + (offset - before) * min(1.0, num_tokens / self._num_measured)
        self._count(num_tokens, unfamiliar=0.0)
        show("text_offset_last", _OFFSET, self.last, self._tp_rank)
        show("text_offset_mean", _OFFSET, self.mean, self._tp_rank)
        if self.mean > UNFAMILIAR_OFFSET and self._num_measured >= _LEAST_TOKENS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "krul: text is unlike that which the bases were learned from (mean offset %.1f, familiar "
                "text has less than %g) and takes more memory than it has to; learn from text like it: "
                "`krul-sglang learn --model-path %s --text FILE`",
                self.mean,
                UNFAMILIAR_OFFSET,
                self._model_path,
            )

    def add_unfamiliar(self, num_tokens: int) -> None:
        """Count tokens that are stored natively because the bases cannot represent them."""
        self._count(num_tokens, unfamiliar=1.0)

    def _count(self, num_tokens: int, unfamiliar: float) -> None:
        self._num_tokens = min(self._num_tokens + num_tokens, _MEAN_TOKENS)
        weight = min(1.0, num_tokens / self._num_tokens)
        self.unfamiliar_share += (unfamiliar - self.unfamiliar_share) * weight
        show("text_unfamiliar_share", _SHARE, self.unfamiliar_share, self._tp_rank)

    def as_dict(self) -> dict[str, Any]:
        return {"last_offset": self.last, "mean_offset": self.mean, "unfamiliar_share": self.unfamiliar_share}


class ServedBases:
    """Holds one rank's newest bases; ``subspace`` is None until there are any.

    ``num_had`` counts them. ``state`` says in a few words where they come from, how far learning is, or why
    there are none. ``drift`` measures whether they should be learned again; ``recent`` keeps the text for
    that, and is None on a rank that does not learn. ``num_relearned``: how often
    that came to new bases; ``refusal``: why the last time it did not, None if it did.
    """

    def __init__(
        self, drift: TextDrift, recent: RecentText | None = None, end: Callable[[], None] = lambda: None
    ) -> None:
        """``end`` stops what learns bases or looks for them."""
        self.subspace: SubspaceCodec | None = None
        self.num_had = 0
        self.state = "none"
        self.drift = drift
        self.recent = recent
        self.num_relearned = 0
        self.refusal: str | None = None
        self._end = end

    def have(self, subspace: SubspaceCodec, state: str) -> None:
        """Take these bases as the newest; ``state`` says where they come from."""
        self.subspace, self.state = subspace, state
        self.num_had += 1
        logger.info("krul: bases %s of the model: %s", subspace.bases.digest[:16], state)

    def keep_no_text(self) -> None:
        """Nothing will be learned again from the turns that are stored."""
        self.recent = None

    def relearned(self, tp_rank: int, refusal: str | None) -> None:
        """Learning again has ended; ``refusal`` says why its bases are not taken, None if they are."""
        self.refusal = refusal
        self.num_relearned += refusal is None
        show("bases_relearned", "How often bases were learned again.", self.num_relearned, tp_rank)
        was_refused = float(refusal is not None)
        show("bases_relearning_refused", "1 if what was learned last was refused.", was_refused, tp_rank)
        if refusal is None:
            logger.info("krul: bases were learned again, from recent turns as well")
        else:
            logger.warning("krul: the bases stay as they are: %s", refusal)

    def close(self) -> None:
        """Stop what learns bases or looks for them."""
        self._end()

    def as_dict(self) -> dict[str, Any]:
        return {
            "bases": None if self.subspace is None else self.subspace.bases.digest[:16],
            "bases_state": self.state,
            "relearned": self.num_relearned,
            "relearning_refused": self.refusal,
            "text": self.drift.as_dict(),
        }
