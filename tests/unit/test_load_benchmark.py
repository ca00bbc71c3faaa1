"""The benchmark of users side by side without a real server: its texts, pools, think times and rows."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from benchmarks.figures import draw_load
from benchmarks.load import run as load_run
from benchmarks.load.__main__ import main
from benchmarks.load.rows import (
    COLUMNS,
    Played,
    answers_equal,
    found_share,
    load_summary,
    load_tables,
    make_rows,
    measure,
    over_blocks,
)
from benchmarks.load.run import CONFIGURATIONS, choose_pools, choose_texts, most_running, play, think_times
from benchmarks.serving.configuration import Configuration, ServingBenchmarkError
from benchmarks.serving.conversations import cut_conversations
from benchmarks.serving.rows import theoretical_hit_rate
from demo.conversations import Conversation, UserTurn
from demo.sizing import PoolSizes
from demo.summary import write_summary
from krul_sglang.cli.timed_answer import Message, TurnResult


def configuration(**changes: Any) -> Configuration:
    given = {"users": 2, "rounds": 3, "history_tokens": (40,), "turn_tokens": 12, "max_tokens": 4, **changes}
    return Configuration(model_path="model", settles=False, **given)


def encode_letters(messages: list[Message]) -> list[int]:
    """A token per letter, and one at the end of each message."""
    return [token for message in messages for token in (*map(ord, message["content"]), 0)]


def count_letters(messages: list[Message]) -> int:
    return len(encode_letters(messages))


def answered(
    name: str, turn: int, ttft_s: float = 1.0, *, answer: str = "yes", device: int = 0, host: int = 0
) -> TurnResult:
    return TurnResult(name, turn, 100, device, host, 5, ttft_s, ttft_s + 2.0, answer)


# Users


def test_think_times_are_exponential_and_of_the_user_alone() -> None:
    few, many = list(think_times(2, 5, 3.0, seed=7)), list(think_times(400, 5, 3.0, seed=7))
    assert many[:2] == few != list(think_times(2, 5, 3.0, seed=8))
    each = [pause_s for of_user in many for pause_s in of_user]
    assert len(set(each)) == 2000
    # An exponential distribution's deviation is its mean.
    assert statistics.fmean(each) == pytest.approx(3.0, rel=0.1)
    assert statistics.stdev(each) == pytest.approx(3.0, rel=0.1)
    assert list(think_times(1, 3, 0.0, seed=7)) == [[0.0, 0.0, 0.0]]


def test_texts_are_cut_from_their_ends_into_turns_of_the_lengths_asked_for() -> None:
    wanted = 40 + 2 * (12 - 4)
    texts = [("a", "same beginning " * 3 + "A" * wanted), ("b", "too short"), ("c", "C" * (2 * wanted + 30))]
    one, other, again = cut_conversations(texts, configuration(users=3), count_letters)
    assert [each.conversation_id for each in (one, other, again)] == ["a-0", "c-0", "c-1"]
    assert [len(turn.text) for turn in one.turns] == pytest.approx([40, 8, 8], abs=1)
    assert set("".join(turn.text for turn in one.turns)) == {"A"}
    with pytest.raises(ServingBenchmarkError, match="enough for 3 conversations of 56 tokens"):
        cut_conversations(texts, configuration(users=4), count_letters)


def test_a_text_has_the_length_whose_turn_it_is_and_that_it_has_enough_for() -> None:
    asked = configuration(users=5, history_tokens=(40, 100))
    texts = [(name, name * length) for name, length in zip("abcde", (60, 60, 130, 130, 130), strict=True)]
    found = cut_conversations(texts, asked, count_letters)
    lengths = [len(each.turns[0].text) for each in found if each.conversation_id[-1] == "0"]
    assert lengths == pytest.approx([40, 40, 100, 40, 100], abs=1)


def test_data_are_the_longest_prompts_of_sessions_and_the_default_is_bundled(tmp_path: Path) -> None:
    lines = [
        {"session_id": session, "timestamp": number, "input": text, "output": "o"}
        for number, (session, text) in enumerate([("s", "one"), ("s", "one two"), ("s", "on"), ("t", "")])
    ]
    (tmp_path / "one.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    assert list(choose_texts(tmp_path)) == [("s", "one two")]
    ((_, text),) = choose_texts(None)
    assert len(text) > 50_000


def test_the_small_pool_holds_a_share_of_all_and_limits_what_runs_on_device() -> None:
    texts = [("a", "x" * 1000)]
    for users, running in ((6, 2), (40, 8)):
        asked = configuration(users=users, page_size=2, history_tokens=(400 // users + 100,))
        conversations = [
            Conversation(
                str(number), cut_conversations(texts, configuration(users=1), count_letters)[0].turns
            )
            for number in range(users)
        ]
        pools = choose_pools(asked, conversations, encode_letters, None)
        assert pools.device_tokens / pools.total_tokens == pytest.approx(0.45, abs=0.01)
        assert most_running("device", pools, users) == running
    assert most_running("native", pools, 40) == 8
    assert most_running("device", PoolSizes(50, 0, 40, 400), 2) == 1
    given = choose_pools(
        configuration(users=40, page_size=2, device_tokens=200), conversations, encode_letters, None
    )
    assert given.device_tokens == 200


def test_users_ask_side_by_side_with_their_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = most = 0
    asked: dict[tuple[str, int], list[str]] = {}

    async def ask(
        client: object, name: str, turn: int, messages: list[Message], max_tokens: int, more: object
    ) -> TurnResult:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        asked[name, turn] = [message["content"] for message in messages]
        assert more == {"ignore_eos": True, "skip_special_tokens": False}
        await asyncio.sleep(0.01)
        at_once -= 1
        return answered(name, turn, answer=f"answer {turn} to {name}")

    async def nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(load_run, "ask", ask)
    monkeypatch.setattr(load_run, "warm_up", nothing)
    monkeypatch.setattr(load_run, "client_of", lambda server: SimpleNamespace(close=nothing))
    users = [Conversation(name, (UserTurn("q1"), UserTurn("q2"))) for name in "ab"]
    server: Any = SimpleNamespace(name="native")
    turns, seconds = asyncio.run(play(server, configuration(rounds=2, think_time_s=0.0), users))
    assert [(turn.conversation, turn.turn) for turn in turns] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert asked["b", 2] == ["q1", "answer 1 to b", "q2"]
    assert most == 2
    assert seconds >= 0.02


# Rows


def test_shares_found_and_possible() -> None:
    turns = [answered("a", 2, device=10, host=60), answered("b", 2, host=20)]
    assert found_share(turns) == 0.45
    user = Conversation("a", (UserTurn("0123456789"), UserTurn("more")))
    first = TurnResult("a", 1, 11, 0, 0, 5, 1.0, 1.0, "four")
    second = TurnResult("a", 2, 21, 0, 0, 5, 1.0, 1.0, "four")
    both = {("a", 1): first, ("a", 2): second}
    # The first prompt has 11 tokens, and of the answer 4 were computed: of these 15 three pages of 4 are
    # whole and return, in a prompt of 11 + 5 + 5 tokens.
    assert theoretical_hit_rate([user], both, encode_letters, page_size=4) == 12 / 21


def test_answers_are_compared_where_prompts_were_the_same() -> None:
    def of(*answers: str) -> list[TurnResult]:
        return [answered("a", turn, answer=answer) for turn, answer in enumerate(answers, start=1)]

    assert answers_equal(of("x", "y", "z", "w"), of("x", "y", "Z", "w")) == 0.5
    assert answers_equal(of("X", "y", "z"), of("x", "y", "z")) is None


def test_numbers_of_blocks_are_joined_key_by_key() -> None:
    blocks = [{"a": 1.0, "b": None, "c": {"x": 2}}, {"a": 3.0, "b": None, "c": {"x": 4, "y": 8}}]
    assert over_blocks(blocks, statistics.fmean) == {"a": 2.0, "b": None, "c": {"x": 3.0, "y": 8.0}}
    spread = over_blocks(blocks, lambda values: [min(values), max(values)])
    assert spread == {"a": [1.0, 3.0], "b": None, "c": {"x": [2, 4], "y": [8, 8]}}


STATE = {"offload": {"turns": 9, "skipped_turns": 2, "failed_turns": 0, "failed_trims": 7, "pending": 0}}


def krul_state(**changes: Any) -> dict[str, Any]:
    scheduler = {"step_ms": {"p50": 0.1, "p99": 1.5, "largest": 9.0}}
    return {
        **STATE,
        "scheduler": scheduler,
        "stored_bytes": 3 << 20,
        "stored_tokens": 5,
        "tp_size": 2,
        **changes,
    }


def block(*ttft_s: float, states: Sequence[dict[str, Any]] = (), answer: str = "yes") -> Played:
    turns = [answered("a", turn, each, answer=answer, host=80) for turn, each in enumerate(ttft_s, start=1)]
    return Played(turns, 10.0, 0.9, states, states)


def test_a_block_is_measured_by_its_returning_turns() -> None:
    dropped = {"offload": {"dropped_turns": {"memory": 3, "failed": 1}, "failed_turns": 1}}
    played = block(5.0, 1.0, 3.0, states=[krul_state(), krul_state(**dropped)])
    measured = measure(played)
    assert measured["ttft_mean_s"] == 2.0
    assert (measured["ttft_p50_s"], measured["ttft_p99_s"]) == (1.0, 3.0)
    assert measured["ttft_by_turn_s"] == {1: 5.0, 2: 1.0, 3: 3.0}
    assert measured["first_turn_mean_s"] == 5.0
    assert (measured["tpot_s"], measured["requests_per_s"]) == (0.5, 0.3)
    assert (measured["found_share"], measured["possible_share"]) == (0.8, 0.9)
    assert measured["skipped_by_cause"] == {"skipped": 2, "failed": 2, "memory": 3}
    assert measured["turns_skipped"] == 7
    assert measured["scheduler_p99_ms"] == 1.5
    assert measured["host_bytes"] == 12 << 20
    without = measure(block(5.0, 1.0))
    krul_only = ("turns_skipped", "skipped_by_cause", "scheduler_p99_ms", "host_bytes", "answers_equal")
    assert [without[name] for name in krul_only] == [None] * 5
    old = krul_state()
    del old["scheduler"]
    assert measure(block(5.0, 1.0, states=[old]))["scheduler_p99_ms"] is None


def test_rows_table_and_figure_show_blocks_that_ran_one_after_the_other(tmp_path: Path) -> None:
    played = {
        "recompute": [block(5.0, 4.0), block(5.0, 6.0)],
        "device": [block(5.0, 1.0), block(5.0, 1.0)],
        "native": [
            block(5.0, 2.0, states=[krul_state()]),
            block(5.0, 2.0, states=[krul_state()], answer="no"),
        ],
    }
    rows = {row["configuration"]: row for row in make_rows(played)}
    assert rows["native"]["times_sooner_than_recompute"] == 2.5
    assert rows["native"]["spread"]["times_sooner_than_recompute"] == [2.0, 3.0]
    assert rows["recompute"]["times_sooner_than_recompute"] is None
    # The second block's first answer was another one: no prompt was the same.
    assert [rows[name]["answers_equal"] for name in played] == [1.0, 1.0, 1.0]
    result = {
        "configuration": {"model_path": "a/model", "rounds": 2, "think_time_s": 3.0},
        "machine": {"cpu": "a CPU", "cores": 2},
        "versions": {"sglang": "0"},
        "duration_s": 60.0,
        "loads": [
            {"users": users, "dtype": dtype, "total_tokens": 900, "device_tokens": 400}
            for users, dtype in ((8, "float32"), (24, "float32"), (8, "bfloat16"))
        ],
        "rows": [
            {"users": users, "dtype": dtype, **row}
            for users, dtype in ((8, "float32"), (8, "bfloat16"))
            for row in rows.values()
        ],
    }
    write_summary(result, tmp_path / "out.json")
    read = orjson.loads((tmp_path / "out.json").read_bytes())
    cells = [show(read["rows"][2]) for show in COLUMNS.values()]
    assert cells[:3] == ["native", "2.00 s (2.00-2.00)", "2.00 s"]
    assert cells[5] == "2.50 (2.00-3.00)"
    assert cells[9:] == ["80.0%", "90.0%", "2", "1.5 ms", "6 MiB", "100%"]
    tables, summary = load_tables(read, None), load_summary(read, None)
    assert "model in bfloat16, 8 users side by side, 2 turns each, 900 tokens in all" in tables
    assert "| native | 2.00 s | 2.50 | 500 ms | 0.20 | 80.0% | 2 |" in summary
    assert "bfloat16" not in summary
    draw_load(read, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--configurations", "native,fastest"], "no fastest; accepted are recompute, device"),
        (["--blocks", "0"], "--blocks and --users begin at 1"),
        (["--max-new-tokens", "100"], "less than --turn-tokens"),
        (["--turns", "1"], "turns return from the second round on"),
        (["--data", "no-such-folder"], "no such folder"),
        (["--users", "1000"], "users are asked for"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "bundled", *arguments]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert message in line


def test_a_server_that_fails_ends_the_run_and_what_was_measured_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def play_server(name: str, *_: object) -> Played:
        if name == "native":
            raise ServingBenchmarkError("it fell\n  over")
        return block(5.0, 4.0)

    monkeypatch.setattr(load_run, "_play_server", play_server)
    data = tmp_path / "texts"
    arguments = ["--model", "bundled", "--users", "4", "--history", "100", "--turns", "2"]
    data.mkdir()
    line = {"session_id": "s", "timestamp": 1, "input": "Some words about nothing. " * 200, "output": ""}
    (data / "one.jsonl").write_bytes(orjson.dumps(line))
    files = ["--json", str(tmp_path / "out.json"), "--raw", str(tmp_path / "raw.json")]
    assert main([*arguments, *files, "--data", str(data), "--configurations", "recompute,native"]) == 1
    read = orjson.loads((tmp_path / "out.json").read_bytes())
    assert read["failure"] == "it fell"
    assert [(row["configuration"], row["blocks"]) for row in read["rows"]] == [("recompute", 1)]
    assert read["configuration"]["data"] == "texts"
    assert orjson.loads((tmp_path / "raw.json").read_bytes())["turns"][0]["configuration"] == "recompute"
    assert main([*arguments, *files, "--configurations", "native"]) == 1
    assert orjson.loads((tmp_path / "out.json").read_bytes()) == read


def test_every_configuration_has_a_server_and_compressed_has_little_memory() -> None:
    assert CONFIGURATIONS["compressed"] == ("compressed", {"host_share": 0.1})
    assert CONFIGURATIONS["native-tenth"] == ("native", {"host_share": 0.1})
    for server, _ in CONFIGURATIONS.values():
        configuration(servers=(server,))
