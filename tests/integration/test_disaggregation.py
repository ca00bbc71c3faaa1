"""Prefill and decode on two servers: what the first one restores is what it sends to the second."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.server import ServerProcess, find_free_port
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    POOL_TOKENS,
    STRICT,
    Played,
    assert_same,
    play_all,
    settled_stats,
    small_krul_server_args,
)
from tests.support.server_plugin import SENDING, WITH_PLUGIN, faulty_loads

pytest.importorskip("mooncake.engine", reason="`make mooncake` installs what sends KV", exc_type=ImportError)


class PrefillAndDecode:
    """Two servers as one: a request goes to both, the answer is the decoding one's."""

    def __init__(self, prefill: ServerProcess, decode: ServerProcess, port: int) -> None:
        self.prefill, self.decode = prefill, decode
        self._port = port
        self._rooms = itertools.count(1)
        self._threads = ThreadPoolExecutor(16)
        self.server_info = prefill.server_info

    def post_json(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        host, port = "127.0.0.1", self._port
        room = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": next(self._rooms)}
        sent = self._threads.submit(self.prefill.post_json, path, payload | room)
        answer: dict[str, Any] = self.decode.post_json(path, payload | room)
        answer["meta_info"]["cached_tokens_details"] = sent.result()["meta_info"].get("cached_tokens_details")
        return answer


@dataclass(frozen=True)
class Served:
    fails: bool
    played: Played
    stats: dict[str, Any]


@pytest.fixture(scope="module", params=[False, True], ids=["loads", "failing-loads"])
def served(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Iterator[Served]:
    port, model = find_free_port(), tiny_models["float32"]
    apart = ("--disaggregation-transfer-backend", "mooncake", "--disaggregation-bootstrap-port", str(port))
    krul = small_krul_server_args(POOL_TOKENS, {"planner": "random"})
    # Requests that are retracted would be copied to memory that CUDA locks.
    plain = (
        *("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "16384"),
        *("--disaggregation-decode-retraction-backup", "none"),
    )
    env = STRICT | SENDING | (faulty_loads("load-error") if request.param else WITH_PLUGIN)
    with (
        ForkedServer(model, args=(*krul, *apart, "--disaggregation-mode", "prefill"), env=env) as prefill,
        ForkedServer(model, args=(*plain, *apart, "--disaggregation-mode", "decode")) as decode,
    ):
        played = play_all(PrefillAndDecode(prefill, decode, port), evict=True)
        yield Served(request.param, played, settled_stats(prefill))


def test_every_answer_is_that_of_one_server_that_never_evicted(served: Served, kept: Played) -> None:
    assert_same(kept.all(), served.played.all())


def test_turns_come_back_before_they_are_sent(served: Served) -> None:
    came = [turn.host_tokens > 500 for turn in served.played.turns[1:]]
    assert any(came) if served.fails else all(came)
    assert served.stats["restore"]["forward"]["head_tokens"] > 0
    assert served.stats["num_leases"] == 0


def test_failed_loads_are_computed(served: Served) -> None:
    forward = served.stats["restore"]["forward"]
    assert (forward["rescued_requests"] > 0) == served.fails
    assert forward["lost_requests"] == 0
