"""Sliding windows in one pool of all tokens: prefixes come back whole, whatever the window has left."""

from __future__ import annotations

from pathlib import Path

from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    POOL_TOKENS,
    STRICT,
    assert_nothing_left_behind,
    assert_same,
    play_all,
    settled_stats,
    small_krul_server_args,
)
from tests.support.tiny_model import build_window_model

ONE_POOL = "--disable-hybrid-swa-memory"
WINDOW = 700
"""Some of the conversations are shorter than that, some longer."""


def test_conversations_come_back_as_on_a_server_that_never_evicts(tmp_path: Path) -> None:
    model = build_window_model(tmp_path / "model", window=WINDOW)
    args = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "16384", "--enable-cache-report")
    with ForkedServer(model, args=(*args, ONE_POOL)) as server:
        kept = play_all(server, evict=False)
    args = (*small_krul_server_args(POOL_TOKENS, {}), ONE_POOL)
    with ForkedServer(model, args=args, env=STRICT) as server:
        restored = play_all(server, evict=True)
        assert_nothing_left_behind(server)
        restore = settled_stats(server)["restore"]
    assert_same(kept.all(), restored.all())
    assert len({answer.output_ids for answer in kept.turns}) == len(kept.turns)
    assert all(answer.host_tokens > 300 for answer in (*restored.turns[1:], *restored.together))
    assert restore["mode"]["planner"] == "full-load"
    assert restore["forward"]["head_tokens"] == 0
