"""Watches how much the text that is stored differs from the text that the bases were learned from."""

from __future__ import annotations

import logging
from typing import Any

from krul_sglang.engine.budget.gauges import show

logger = logging.getLogger(__name__)

UNFAMILIAR_OFFSET = 2.0
"""Mean offsets above this are those of text unlike that which was learned from: see docs/compression.md."""

_UNFAMILIAR_SHARE = 0.25
"""If more of the tokens than this are stored natively because the bases cannot represent them, the text is
unlike that which was learned from."""

_MEAN_TOKENS = 16_384
"""The means are over about so many tokens."""

_LEAST_TOKENS = 4096
"""Nothing is said of the means of fewer tokens."""


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
        """Forget what was measured: with other bases it is another text that is unlike theirs."""
        self.last: float | None = None
        self.mean: float | None = None
        self.unfamiliar_share = 0.0
        self._num_measured = 0
        self._num_tokens = 0

    @property
    def is_unlike(self) -> bool:
        """Whether bases that are learned from text like this may store it in less."""
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
        return {
            "last_offset": self.last,
            "mean_offset": self.mean,
            "unfamiliar_share": self.unfamiliar_share,
        }


_OFFSET = "How much larger coefficients are than in the text learned from, in quarter octaves."
_SHARE = "Share of the last tokens that were stored natively because the bases cannot represent them."
