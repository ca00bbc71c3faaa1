"""Attention of every token, on the real server: the paper's estimator."""

from __future__ import annotations

import json

import pytest

from krul_sglang.cli.app import BUNDLED_CONVERSATIONS
from krul_sglang.demo.conversations import load_conversations
from krul_sglang.demo.player import Player
from krul_sglang.models.find import REFERENCE_MODEL
from tests.support.forked_server import ForkedServer
from tests.support.scenario import KRUL, STRICT, assert_nothing_left_behind, play_chats, settled_stats


@pytest.mark.timeout(600)
def test_the_heterogeneous_estimator_serves_conversations() -> None:
    config = {
        "host_memory": "256MiB",
        "strategy": "krul",
        "estimator": "heterogeneous",
        # Every layer may share, so that only a turn without statistics is stored without pairs.
        "gamma": 0.0,
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
    with ForkedServer(REFERENCE_MODEL, args=args, env=STRICT) as server:
        with Player(server.url, max_tokens=32) as player:
            played = list(play_chats(player, conversations))
        stats = settled_stats(server)
        assert stats["offload"]["dropped_turns"] == {}
        estimator = stats["compression"]["estimator"]
        assert estimator["name"] == "heterogeneous"
        assert estimator["submitted"] >= len(played)
        assert (estimator["reduced_here"], estimator["rejected"], estimator["restarts"]) == (0, 0, 0)
        compression = stats["compression"]
        assert compression["turns"] >= len(played)
        # r_l is a half: three pairs among twelve layers, in every turn.
        assert sum(compression["pairs"].values()) == 3 * compression["turns"]
        assert_nothing_left_behind(server)
