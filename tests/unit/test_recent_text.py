"""The sample of recent turns that bases are learned again from: bounded, of recent text, each text once."""

from __future__ import annotations

import numpy as np

from krul_sglang.engine.budget.served_bases import PIECE_TOKENS, RecentText

PAGE_SIZE = 16
PIECE_PAGES = PIECE_TOKENS // PAGE_SIZE


def add(recent: RecentText, name: str, first_page: int, end_page: int, num_shared: int = 0) -> list[int]:
    """A turn adds these pages to a conversation, whose first pages are those of all conversations."""
    keys = [f"{'all' if page < num_shared else name} {page}" for page in range(end_page)]
    token_ids = np.arange(end_page * PAGE_SIZE, dtype=np.int64)
    recent.add(keys, token_ids, range(first_page, end_page))
    tokens: list[int] = token_ids.tolist()
    return tokens


def test_a_conversation_that_grows_is_kept_once_and_in_pieces() -> None:
    recent = RecentText(PAGE_SIZE)
    add(recent, "a", 0, 40)
    tokens = add(recent, "a", 40, PIECE_PAGES + 10)
    assert recent.pieces() == [tokens[:PIECE_TOKENS], tokens[PIECE_TOKENS:]]
    tokens = add(recent, "a", PIECE_PAGES + 10, PIECE_PAGES + 20)
    assert recent.pieces() == [tokens[:PIECE_TOKENS], tokens[PIECE_TOKENS:]]


def test_what_conversations_begin_with_is_kept_once() -> None:
    recent = RecentText(PAGE_SIZE)
    add(recent, "a", 0, PIECE_PAGES + 5, num_shared=PIECE_PAGES)
    # Only what is new of a turn is looked at.
    add(recent, "b", PIECE_PAGES, PIECE_PAGES + 6, num_shared=PIECE_PAGES)
    assert [len(piece) for piece in recent.pieces()] == [PIECE_TOKENS, 5 * PAGE_SIZE, 6 * PAGE_SIZE]


def test_the_oldest_pieces_make_room() -> None:
    recent = RecentText(PAGE_SIZE)
    for number in range(30):
        add(recent, f"conversation {number}", 0, PIECE_PAGES + number)
    kept = recent.pieces()
    assert len(kept) == 24
    assert sum(map(len, kept)) <= 24 * PIECE_TOKENS
    assert len(kept[-1]) == 29 * PAGE_SIZE


def test_pieces_that_are_too_short_are_not_learned_from() -> None:
    recent = RecentText(PAGE_SIZE)
    add(recent, "a", 0, 3)
    add(recent, "b", 0, 4)
    assert [len(piece) for piece in recent.pieces()] == [4 * PAGE_SIZE]
