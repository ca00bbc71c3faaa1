"""Keeps a sample of the token ids of recent turns in memory: what bases are learned again from."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from krul_backend.segment import TokenIds

PIECE_TOKENS = 1024
"""Of the pieces that a model reads while bases are learned; see ``LearningPlan.text_tokens``."""

_MOST_PIECES = 24
"""As many as are taken of the text that comes with the program."""

_LEAST_PIECE_TOKENS = 64
"""Nothing is learned from shorter pieces."""


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
