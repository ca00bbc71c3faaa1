"""The order of requests in the demo, with players and servers that only write down what is asked of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from demo import run
from demo.conversations import Conversation, UserTurn
from demo.run import DemoConfig, DemoError, DemoResult, run_demo
from demo.server import ServerError, wait_for_saves
from demo.sizing import PoolSizes
from krul_sglang.cli.timed_answer import PlayError, TurnResult

CHATS = [Conversation(name, (UserTurn(f"{name} one?"), UserTurn(f"{name} two?"))) for name in ("ada", "bob")]
POOLS = PoolSizes(device_tokens=512, reference_tokens=4096, longest_tokens=300, total_tokens=900)
CONFIG = DemoConfig(model_path="model", conversations_path="file.json")


class FakeServer:
    """Knows its name by its arguments, and has the pool that it was asked for."""

    def __init__(self, model_path: str, *, args: list[str], ready_timeout_s: float) -> None:
        is_large = args[args.index("--max-total-tokens") + 1] == str(POOLS.reference_tokens)
        self.name = "krul" if "krul" in args else "device" if is_large else "recompute"
        self.url = self.command_line = self.name
        self.pool_tokens = POOLS.reference_tokens if is_large else POOLS.device_tokens
        self.ready_after_s = 1.0

    def server_info(self) -> dict[str, Any]:
        return {"max_total_num_tokens": self.pool_tokens}

    def error(self, problem: str) -> ServerError:
        return ServerError(f"{problem}; the log of {self.name}")


class SavingServer:
    """Has krul, and these numbers of turns that are not saved yet, one after the other; then the last one."""

    def __init__(self, *pending: int) -> None:
        self._pending = list(pending)
        self.num_asked = 0

    def server_info(self) -> dict[str, Any]:
        pending = self._pending[min(self.num_asked, len(self._pending) - 1)]
        self.num_asked += 1
        state = {
            "offload": {"pending": pending},
            "load": {"pending": 0},
            "tiers": [],
            "asked": self.num_asked,
        }
        return {"internal_states": [{"krul": state}]}

    def error(self, problem: str) -> ServerError:
        return ServerError(problem)


class Run:
    """One run of the demo; ``events`` are what happened, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, dead: str = "", prompt_tokens: int = 100) -> None:
        self.events: list[str] = []
        self.histories: list[dict[tuple[str, int], str]] = []
        recorder = self

        class FakePlayer:
            def __init__(self, url: str, *, max_tokens: int) -> None:
                self._name = url

            def __enter__(self) -> FakePlayer:
                return self

            def __exit__(self, *_: object) -> None:
                return None

            def warm_up(self) -> None:
                recorder.events.append(f"warm up {self._name}")

            def ask(
                self, conversation: Conversation, turn: int, answers: Mapping[tuple[str, int], str]
            ) -> TurnResult:
                name = conversation.conversation_id
                recorder.events.append(f"{name} {turn} {self._name}")
                recorder.histories.append(dict(answers))
                if self._name == dead:
                    raise PlayError("no answer")
                said = f"{self._name} says {turn}"
                return TurnResult(name, turn, prompt_tokens, 0, 0, 5, 0.1, 0.5, said)

        def wait_for_saves(server: FakeServer) -> list[dict[str, Any]]:
            self.events.append(f"saved by {server.name}")
            return [{"stored_bytes": len(self.events), "stored_tokens": 1, "tp_size": 1}]

        def start_servers(servers: list[FakeServer], on_ready: Any) -> None:
            self.events.append("start " + " ".join(server.name for server in servers))
            for server in reversed(servers):
                on_ready(server)

        def stop_servers(servers: list[FakeServer]) -> None:
            self.events.append("stop " + " ".join(server.name for server in servers))

        monkeypatch.setattr(run, "ServerProcess", FakeServer)
        monkeypatch.setattr(run, "Player", FakePlayer)
        monkeypatch.setattr(run, "wait_for_saves", wait_for_saves)
        monkeypatch.setattr(run, "start_servers", start_servers)
        monkeypatch.setattr(run, "stop_servers", stop_servers)

    def play(self) -> DemoResult:
        def note(*_: Any) -> None:
            return None

        def ready(name: str, ready_after_s: float) -> None:
            self.events.append(f"{name} is ready")

        reporter: Any = SimpleNamespace(servers_starting=note, server_ready=ready, turn_finished=note)
        return run_demo(CONFIG, POOLS, CHATS, reporter)


def test_counters_are_read_again_when_nothing_is_pending_any_more() -> None:
    server: Any = SavingServer(2, 1, 0)
    (state,) = wait_for_saves(server)
    assert state["asked"] == server.num_asked == 4


def test_a_server_that_never_ends_saving_is_an_error() -> None:
    server: Any = SavingServer(1)
    with pytest.raises(ServerError, match="still saving or loading after 0 s"):
        wait_for_saves(server, timeout_s=0.05)


def test_every_server_is_asked_each_turn_in_rotating_order_and_after_krul_has_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = Run(monkeypatch)
    played.play()
    begin = played.events.index("ada 1 device")
    assert played.events[:4] == [
        "start device recompute krul",
        "krul is ready",
        "recompute is ready",
        "device is ready",
    ]
    assert played.events[begin - 1 :] == [
        "saved by krul",
        *("ada 1 device", "ada 1 recompute", "ada 1 krul", "saved by krul"),
        *("bob 1 recompute", "bob 1 krul", "saved by krul", "bob 1 device"),
        *("ada 2 krul", "saved by krul", "ada 2 device", "ada 2 recompute"),
        *("bob 2 device", "bob 2 recompute", "bob 2 krul", "saved by krul"),
        "stop device recompute krul",
    ]


def test_histories_hold_the_answers_of_the_server_that_never_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Run(monkeypatch)
    rows = played.play().rows
    of_round_2 = played.histories[6:9]
    assert of_round_2 == [{("ada", 1): "device says 1", ("bob", 1): "device says 1"}] * 3
    assert [(row.conversation, row.turn, row.krul.answer) for row in rows[2:]] == [
        ("ada", 2, "krul says 2"),
        ("bob", 2, "krul says 2"),
    ]


def test_what_krul_holds_is_read_when_it_has_saved_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Run(monkeypatch)
    rows = played.play().rows
    saved_at = [number for number, event in enumerate(played.events, 1) if event == "saved by krul"]
    assert [row.stored.num_bytes for row in rows] == saved_at[1:]


def test_a_server_that_dies_ends_all_and_its_log_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Run(monkeypatch, dead="recompute")
    with pytest.raises(ServerError, match="the server 'recompute' gave no answer; the log of recompute"):
        played.play()
    assert played.events[-2:] == ["ada 1 recompute", "stop device recompute krul"]


def test_a_conversation_that_outgrows_the_small_pool_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = Run(monkeypatch, prompt_tokens=440)
    with pytest.raises(
        DemoError, match=r"'ada' takes 464 tokens; use --device-tokens 528 or more \(now 512\)"
    ):
        played.play()
