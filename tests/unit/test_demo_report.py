"""The arithmetic of rows, rounds and summary, and what is printed, from made-up turn results."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from demo.conversations import Conversation, UserTurn
from demo.report import LiveReporter, PlainReporter, draw_demo, make_reporter, print_result, shortened
from demo.result import SERVERS, Row, make_rounds, make_row, summarize, verdict
from demo.run import DemoConfig, DemoResult, server_args
from demo.server import StoredAmounts, krul_states, stored_amounts
from demo.sizing import PoolSizes
from krul_sglang.cli.timed_answer import TurnResult
from krul_sglang.json_file import write_json

CONVERSATION = Conversation("ada", (UserTurn("The code is 4821."), UserTurn("Which code?", "4821", "recall")))
POOLS = PoolSizes(device_tokens=512, reference_tokens=4096, longest_tokens=300, total_tokens=900)
HELD = StoredAmounts(2**20, 64)


def turn_result(
    turn: int = 2, *, answer: str = "It is 4821.", ttft_s: float = 0.1, host: int = 0
) -> TurnResult:
    return TurnResult(
        conversation="ada",
        turn=turn,
        prompt_tokens=200,
        device_tokens=16,
        host_tokens=host,
        completion_tokens=5,
        ttft_s=ttft_s,
        total_s=ttft_s + 1,
        answer=answer,
    )


def row(
    turn: int = 2,
    *,
    host: int = 0,
    ttft_s: float = 0.1,
    recompute_s: float = 0.4,
    answer: str = "It is 4821.",
) -> Row:
    return make_row(
        CONVERSATION,
        device=turn_result(turn),
        recompute=turn_result(turn, ttft_s=recompute_s, answer="No idea."),
        krul=turn_result(turn, host=host, ttft_s=ttft_s, answer=answer),
        save_s=0.05,
        stored=HELD,
    )


def first_sentence(rows: list[Row], *, must_be_same: bool = True) -> str:
    return verdict(summarize(rows, answers_must_be_same=must_be_same), rows)[0]


def test_a_row_compares_the_answers_with_those_of_the_server_that_never_evicts() -> None:
    made = row(host=160)
    assert made.krul.computed_tokens == 24
    assert [made.is_same(server) for server in ("device", "recompute", "krul")] == [True, False, True]
    assert [made.is_correct(server) for server in ("device", "recompute", "krul")] == [True, False, True]
    assert made.speedup == pytest.approx(4.0)
    assert (made.kind, made.expected, made.stored) == ("recall", "4821", HELD)


def test_a_turn_that_expects_nothing_is_neither_right_nor_wrong() -> None:
    assert row(turn=1).is_correct("krul") is None


def test_results_of_different_turns_cannot_be_joined() -> None:
    results = {"device": turn_result(2), "recompute": turn_result(1), "krul": turn_result(2)}
    with pytest.raises(AssertionError):
        make_row(CONVERSATION, **results, save_s=0.0, stored=HELD)


@pytest.mark.parametrize(("num_tokens", "tpot_s"), [(1, None), (5, 0.25)])
def test_time_per_token_leaves_the_first_token_out(num_tokens: int, tpot_s: float | None) -> None:
    assert replace(turn_result(), completion_tokens=num_tokens).tpot_s == tpot_s


def test_summary_counts() -> None:
    rows = [row(turn=1), row(host=160), row(host=80), row(answer="No idea.")]
    summary = summarize(rows, answers_must_be_same=True)
    assert summary.same_answers == {"device": 4, "recompute": 0, "krul": 3}
    assert (summary.answers, summary.returning_turns) == (4, 3)
    assert (summary.restored_turns, summary.restored_tokens) == (2, 240)
    assert summary.recall == {"device": 1.0, "recompute": 0.0, "krul": pytest.approx(2 / 3)}
    assert summary.tpot_s["krul"]["n"] == 4
    assert summary.tpot_s["krul"]["median"] == pytest.approx(0.25)
    assert not summary.passed


def test_rounds_are_the_turns_by_their_number_and_then_all_returning_ones() -> None:
    rows = [
        row(turn=1, ttft_s=9.0),
        row(host=160, ttft_s=0.1, recompute_s=0.2),
        replace(row(host=40, ttft_s=0.1, recompute_s=0.4), stored=StoredAmounts(7, 1)),
    ]
    first, second, returning = make_rounds([*rows[1:], rows[0]])
    assert [each.turn for each in (first, second, returning)] == [1, 2, None]
    assert (first.num_turns, first.ttft_s["krul"]["median"]) == (1, 9.0)
    assert (second.num_turns, second.prompt_tokens, second.restored_tokens) == (2, 400, 200)
    assert second.ttft_s["recompute"]["median"] == pytest.approx(0.3)
    assert (second.speedup["q25"], second.speedup["median"]) == (pytest.approx(2.5), pytest.approx(3.0))
    assert (first.stored, second.stored) == (HELD, StoredAmounts(7, 1))
    assert replace(returning, turn=2) == second
    assert [each.turn for each in make_rounds(rows[:1])] == [1]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([row(turn=1), row()], "FAILED: not one of the 1 returning turns took anything from krul"),
        (
            [row(host=16), row(host=16, answer="It is 1.")],
            "1 of 2 answers differ from the server that never evicts (first: conversation ada, turn 2).",
        ),
        ([row(host=16)], "All 1 answers are those of the server that never evicts; 1 of 1 returning turns"),
    ],
)
def test_the_verdict_says_whether_the_demo_passed_and_why_not(rows: list[Row], sentence: str) -> None:
    assert sentence in first_sentence(rows)


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        (
            [(0.1, 0.4), (0.1, 0.3)],
            "first token after 100 ms with krul, 350 ms recomputed, 100 ms where nothing was evicted. "
            "krul is 3.50 times sooner (half of the turns: 3.25 to 3.75).",
        ),
        ([(0.2, 0.1)], "krul is 2.00 times SLOWER (half of the turns: 2.00 to 2.00)."),
        (
            [(0.2, 0.1), (0.1, 0.2)],
            "No clear difference: 1.25 times sooner (half of the turns: 0.88 to 1.62).",
        ),
    ],
)
def test_the_verdict_compares_the_times_of_returning_turns(
    times: list[tuple[float, float]], sentence: str
) -> None:
    rows = [row(host=16, ttft_s=ttft_s, recompute_s=recompute_s) for ttft_s, recompute_s in times]
    lines = verdict(summarize(rows, answers_must_be_same=True), rows)
    assert lines[1].endswith(sentence)


def test_the_verdict_says_what_first_turns_and_further_tokens_take() -> None:
    rows = [row(turn=1, ttft_s=2.0, recompute_s=1.5), row(host=16)]
    *_, first_turns, tokens = verdict(summarize(rows, answers_must_be_same=True), rows)
    assert first_turns == "First turns, which krul cannot help: 2.00 s with krul, 1.50 s without."
    assert tokens == "Each further token: 250 ms with krul, 250 ms without."


def test_answers_that_may_differ_are_judged_by_recall() -> None:
    other_words = row(host=16, answer="The code is 4821")
    assert summarize([other_words], answers_must_be_same=False).passed
    assert not summarize([other_words], answers_must_be_same=True).passed
    lost = [replace(row(host=16, answer="No idea."), recompute=turn_result())]
    assert first_sentence(lost, must_be_same=False) == "FAILED: recall is 0% with krul and 100% without."


def test_stored_amounts_are_those_of_all_ranks_and_replicas() -> None:
    one = {"stored_bytes": 1000, "stored_tokens": 64, "tp_size": 1}
    two = {"stored_bytes": 900, "stored_tokens": 80, "tp_size": 2}
    info = {"internal_states": [{"krul": one}, {}, {"krul": two}]}
    assert stored_amounts(krul_states(info)) == StoredAmounts(2800, 144)


def demo_result(rows: list[Row]) -> DemoResult:
    return DemoResult(
        rows=tuple(rows),
        summary=summarize(rows, answers_must_be_same=True),
        server_commands={"krul": "python -m sglang.launch_server"},
        krul_states=[{"stored_bytes": 2**20, "stored_tokens": 64, "tp_size": 1}],
        config=DemoConfig(model_path="model", conversations_path="file.json"),
        pools=POOLS,
    )


def test_json_has_summary_rounds_and_circumstances(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = demo_result([row(turn=1), row(host=160)])
    write_json({**result.to_json(), "turns": result.turns_to_json()}, path)
    written = json.loads(path.read_text())
    assert list(tmp_path.iterdir()) == [path], "the temporary file is gone"
    assert [each["turn"] for each in written["rounds"]] == [1, 2, None]
    assert written["rounds"][1]["ttft_s"]["krul"]["median"] == 0.1
    assert (written["summary"]["restored_turns"], written["summary"]["passed"]) == (1, True)
    assert written["configuration"]["device_tokens"] == 512
    assert {"python", "torch", "sglang", "krul_sglang"} <= set(written["versions"])
    assert {"cpu", "cores", "memory_bytes", "device"} <= set(written["machine"])
    assert written["turns"][1]["krul"]["host_tokens"] == 160
    assert "turns" not in result.to_json()


def test_the_figure_has_three_bars_for_each_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure", reason="matplotlib is a development dependency")
    drawn: list[Any] = []
    save: Callable[..., None] = figures.Figure.savefig

    def keep(self: Any, *args: Any, **options: Any) -> None:
        drawn.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(figures.Figure, "savefig", keep)
    path = tmp_path / "demo.png"
    draw_demo(demo_result([row(turn=1), row(host=160), replace(row(host=80), turn=3)]).to_json(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    axis = drawn[0].axes[0]
    assert [round(bar.get_height(), 2) for bar in axis.patches] == [0.4] * 3 + [0.1] * 6
    labels = [label.get_text() for label in axis.get_xticklabels()]
    assert labels[1] == "turn 2\n200 tokens,\n80% from krul"


def test_options_of_krul_reach_its_server_alone() -> None:
    config = DemoConfig(
        model_path="m", conversations_path="c", krul_options={"strategy": "krul", "r_l": "0.25"}
    )
    assert json.loads(server_args("krul", config, POOLS)[-1]) == {
        "host_memory": "512MiB",
        "strategy": "krul",
        "r_l": "0.25",
    }
    assert "krul" not in server_args("recompute", config, POOLS)


def test_the_three_servers_differ_in_the_pool_and_in_krul_only() -> None:
    config = DemoConfig(model_path="m", conversations_path="c", host_memory="1GiB", server_args=("--tp=2",))
    device = server_args("device", config, POOLS)
    recompute = server_args("recompute", config, POOLS)
    krul = server_args("krul", config, POOLS)
    assert device[:-1] == recompute[:-1]
    assert device[-2:] == ["--max-total-tokens", "4096"]
    assert recompute[-2:] == ["--max-total-tokens", "512"]
    assert krul[: len(recompute)] == recompute
    added = krul[len(recompute) :]
    assert added[:2] == ["--radix-cache-backend", "krul"]
    assert json.loads(added[-1]) == {"host_memory": "1GiB"}
    assert "--tp=2" in recompute


def test_plain_output_has_one_line_per_turn_and_no_control_codes() -> None:
    console = Console(file=io.StringIO(), width=60)
    with make_reporter(console, num_turns=2) as reporter:
        assert isinstance(reporter, PlainReporter)
        reporter.server_ready("krul", 12.3)
        reporter.turn_finished(row(host=160), "Which code?")
        reporter.turn_finished(row(host=160, answer="It is 1."), "Which code?")
        reporter.log_line("krul", "[info] ready")
    print_result(console, demo_result([row(turn=1), row(host=160)]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert "\x1b" not in text
    assert lines[0] == "krul: ready after 12 s"
    assert lines[1] == (
        "[1/2] ada turn 2: TTFT recompute 400 ms, krul 100 ms, device 100 ms; prompt 200 = device 16 + "
        "krul 160 + computed 24; saved in 50 ms; same answer"
    )
    assert lines[2].startswith("[2/2]")
    assert lines[2].endswith("DIFFERENT answer")
    assert lines[3] == "krul | [info] ready"
    assert lines[5] == (
        "turn 2; prompt tokens 200; from krul 80%; recompute 400 ms; krul 100 ms; device hit 100 ms; "
        "times sooner 4.00 (4.00 to 4.00); held by krul 1 MiB"
    )
    assert "recall of stated facts: recompute 0%, krul 100%, device 100%" in lines
    assert lines[-1] == "Each further token: 250 ms with krul, 250 ms without."


def test_a_terminal_shows_bars_in_proportion_and_answers_that_differ() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=12)
    with make_reporter(console, num_turns=1) as reporter:
        assert isinstance(reporter, LiveReporter)
        reporter.turn_finished(row(host=160), "Which code?")
    print_result(console, demo_result([row(turn=1), row(host=160)]))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    bars = {server: next(line for line in lines if f"  {server} " in line) for server in SERVERS}
    assert [bars[server].count("█") for server in ("recompute", "krul", "device")] == [30, 8, 8]
    assert "No idea." in bars["recompute"]
    assert "160 of 200 tokens from krul, same answer" in bars["krul"]
    assert "It is 4821." in bars["device"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Short\nenough?", "Short enough?"),
        ("A long list. Of many things. Which one?", "A long lis ... Which one?"),
        ("A sentence that does not end for a long time", "A sentence that does n..."),
    ],
)
def test_a_long_question_keeps_its_beginning_and_its_last_sentence(text: str, shown: str) -> None:
    assert shortened(text, 25) == shown


def test_paths_are_relative_to_the_working_directory_or_to_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    for path, written in (
        (str(tmp_path / "model"), "model"),
        ("/home/ada/cache/model", "~/cache/model"),
        ("/elsewhere/model", "/elsewhere/model"),
    ):
        config = DemoConfig(model_path=path, conversations_path="file.json")
        result = replace(demo_result([row(host=160)]), config=config)
        assert result.to_json()["configuration"]["model_path"] == written
