"""Sliding windows in the pool of all tokens: conversations come back as if kept."""

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
NEVER_EVICTS = (
    *("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "16384"),
    "--enable-cache-report",
)


def test_one_pool_of_all_tokens_needs_no_windows(tmp_path: Path) -> None:
    """Prefixes come back whole, whatever the window has left."""
    model = build_window_model(tmp_path / "model", window=700)
    with ForkedServer(model, args=(*NEVER_EVICTS, ONE_POOL)) as server:
        kept = play_all(server, evict=False)
    with ForkedServer(model, args=(*small_krul_server_args(POOL_TOKENS, {}), ONE_POOL), env=STRICT) as server:
        restored = play_all(server, evict=True)
        assert_nothing_left_behind(server)
        stats = settled_stats(server)
    assert_same(kept.all(), restored.all())
    assert all(answer.host_tokens > 300 for answer in (*restored.turns[1:], *restored.together))
    assert stats["restore"]["mode"]["planner"] == "full-load"
    assert stats["restore"]["forward"]["head_tokens"] == 0
    assert stats["states"] is None
