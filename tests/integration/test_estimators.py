"""Attention of every token, on the real server: the paper's estimator, under the error budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from krul_sglang.cli import BUNDLED_CONVERSATIONS, REFERENCE_MODEL
from krul_sglang.demo.conversations import load_conversations
from krul_sglang.demo.player import Player
from krul_sglang.demo.server import ServerProcess
from tests.integration.scenario import KRUL, STRICT, assert_nothing_left_behind, settled_stats


@pytest.mark.timeout(600)
def test_the_heterogeneous_estimator_serves_conversations(tmp_path: Path) -> None:
    config = {
        "host_memory": "256MiB",
        "strategy": "budget",
        "estimator": "heterogeneous",
        "cache_dir": str(tmp_path),
    }
    args = (
        *("--dtype", "float32"),
        *("--page-size", "16"),
        *("--max-total-tokens", "2048"),
        # Small enough that prompts come in chunks.
        *("--chunked-prefill-size", "256"),
        *("--unified-cache-external-linker-config", json.dumps(config)),
        "--enable-cache-report",
        *KRUL,
    )
    conversations = load_conversations(BUNDLED_CONVERSATIONS).select(num_conversations=4, turns=3)
    with ServerProcess(REFERENCE_MODEL, args=args, env=STRICT) as server:
        with Player(server.url, max_tokens=32) as player:
            played = list(player.play(conversations, None))
        stats = settled_stats(server)
        assert stats["offload"]["failed_turns"] == 0
        estimator = stats["compression"]["estimator"]
        assert estimator["name"] == "heterogeneous"
        assert estimator["submitted"] >= len(played)
        assert (estimator["reduced_here"], estimator["rejected"], estimator["restarts"]) == (0, 0, 0)
        # Without statistics and rows the budget stores every layer as it is.
        precisions = stats["compression"]["precisions"]
        assert stats["compression"]["turns"] == len(played)
        assert set(precisions) - {"native"}, precisions
        assert_nothing_left_behind(server)
