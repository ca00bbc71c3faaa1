"""The arithmetic of rows and summary, and what is printed, from made-up turn results."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from krul_sglang.demo.conversations import Conversation, UserTurn
from krul_sglang.demo.player import TurnResult
from krul_sglang.demo.report import LiveReporter, PlainReporter, make_reporter, print_result
from krul_sglang.demo.result import (
    Row,
    StoredAmounts,
    krul_states,
    make_row,
    stored_amounts,
    summarize,
    verdict,
    without_turns,
)
from krul_sglang.demo.run import DemoConfig, DemoResult, server_args
from krul_sglang.demo.sizing import PoolSizes
from krul_sglang.json_file import write_json

CONVERSATION = Conversation("ada", (UserTurn("The code is 4821."), UserTurn("Which code?", "4821", "recall")))
POOLS = PoolSizes(device_tokens=512, reference_tokens=4096, longest_tokens=300, total_tokens=900)


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


def row(turn: int = 2, *, host: int = 0, ttft_s: float = 0.1, baseline_ttft_s: float = 0.4) -> Row:
    reference = turn_result(turn)
    return make_row(
        CONVERSATION,
        turn_result(turn, host=host, ttft_s=ttft_s),
        baseline=turn_result(turn, ttft_s=baseline_ttft_s, answer="No idea."),
        reference=reference,
    )


def test_a_row_splits_the_prompt_and_compares_with_the_reference() -> None:
    made = row(host=160)
    assert (made.prompt_tokens, made.device_tokens, made.host_tokens, made.computed_tokens) == (
        200,
        16,
        160,
        24,
    )
    assert (made.answer_equal, made.baseline_answer_equal) == (True, False)
    assert (made.expected, made.correct, made.baseline_correct) == ("4821", True, False)
    assert (made.ttft_s, made.baseline_ttft_s, made.kind) == (0.1, 0.4, "recall")


def test_a_turn_that_expects_nothing_is_neither_right_nor_wrong() -> None:
    made = row(turn=1)
    assert (made.expected, made.correct, made.baseline_correct) == (None, None, None)


def test_results_of_different_turns_cannot_be_joined() -> None:
    with pytest.raises(AssertionError):
        make_row(CONVERSATION, turn_result(2), baseline=turn_result(1), reference=turn_result(2))


def test_summary_counts_and_medians() -> None:
    rows = [
        row(turn=1, ttft_s=9.0, baseline_ttft_s=9.0),  # not a returning turn: in no median
        row(host=160, ttft_s=0.1, baseline_ttft_s=0.5),
        row(host=80, ttft_s=0.2, baseline_ttft_s=0.6),
        row(ttft_s=0.9, baseline_ttft_s=0.7),
    ]
    rows[3] = replace(rows[3], answer_equal=False, correct=False)
    summary = summarize(rows, stored=StoredAmounts(1000, 10), lossless=True)
    assert (summary.answers, summary.answers_equal, summary.baseline_answers_equal) == (4, 3, 0)
    assert (summary.returning_turns, summary.restored_turns, summary.host_hit_tokens) == (3, 2, 240)
    assert summary.recall == pytest.approx(2 / 3)
    assert summary.baseline_recall == 0.0
    assert (summary.median_ttft_s, summary.baseline_median_ttft_s) == (0.2, 0.6)
    assert summary.median_restored_ttft_s == pytest.approx(0.15)
    assert summary.baseline_median_restored_ttft_s == pytest.approx(0.55)
    assert (summary.median_first_ttft_s, summary.baseline_median_first_ttft_s) == (9.0, 9.0)
    assert (summary.bytes_stored, summary.tokens_stored) == (1000, 10)
    assert not summary.passed


def test_summary_of_first_turns_only_has_no_medians_and_no_recall() -> None:
    summary = summarize([row(turn=1)], stored=None, lossless=True)
    assert summary.median_ttft_s is None
    assert summary.recall is None
    assert not summary.passed


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([row(turn=1), row()], "FAILED: not one of the 1 returning turns took anything from krul"),
        (
            [row(host=16), replace(row(host=16), answer_equal=False)],
            "1 of 2 answers differ from the server that never evicts (first: conversation ada, turn 2).",
        ),
        ([row(host=16)], "after 100 ms with krul and 400 ms without: 4.00 times sooner with krul."),
        (
            [row(host=16, ttft_s=1.5, baseline_ttft_s=0.5)],
            "after 1.50 s with krul and 500 ms without: krul is 3.00 times SLOWER here.",
        ),
        ([row(host=16, ttft_s=0.4)], "no difference."),
    ],
)
def test_the_verdict_says_what_was_measured_or_why_it_failed(rows: list[Row], sentence: str) -> None:
    text = verdict(summarize(rows, stored=None, lossless=True), rows)
    assert sentence in text
    assert "\n" not in text


@pytest.mark.parametrize(("ttft_s", "warned"), [(1.0, False), (1.25, False), (1.6, True), (0.5, True)])
def test_the_verdict_warns_when_the_same_work_took_different_times(ttft_s: float, warned: bool) -> None:
    rows = [row(turn=1, ttft_s=ttft_s, baseline_ttft_s=1.0), row(host=16)]
    text = verdict(summarize(rows, stored=None, lossless=True), rows)
    assert ("too busy" in text) is warned
    assert "4.00 times sooner" in text


def stored_of(states: list[dict[str, Any]]) -> StoredAmounts | None:
    return stored_amounts(krul_states({"internal_states": states}))


def test_stored_amounts_are_those_of_all_ranks_and_replicas() -> None:
    one = {"stored_bytes": 1000, "stored_tokens": 64, "tp_size": 1}
    two = {"stored_bytes": 900, "stored_tokens": 80, "tp_size": 2}
    assert stored_of([{"krul": one}]) == StoredAmounts(1000, 64)
    assert stored_of([{"krul": two}]) == StoredAmounts(1800, 80)
    assert stored_of([{"krul": one}, {"krul": two}]) == StoredAmounts(2800, 144)
    assert stored_of([{}]) is None


def demo_result(rows: list[Row]) -> DemoResult:
    return DemoResult(
        rows=tuple(rows),
        summary=summarize(rows, stored=StoredAmounts(2**20, 64), lossless=True),
        samples={"krul": [turn_result()]},
        server_commands={"krul": "python -m sglang.launch_server"},
        krul_states=[{"stored_bytes": 2**20, "stored_tokens": 64, "tp_size": 1}],
        config=DemoConfig(model_path="model", conversations_path="file.json"),
        pools=POOLS,
    )


def test_json_has_rows_summary_and_circumstances(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(demo_result([row(host=160)]).to_json(), path)
    written = json.loads(path.read_text())
    assert list(tmp_path.iterdir()) == [path], "the temporary file is gone"
    names = "conversation turn prompt_tokens device_tokens host_tokens computed_tokens ttft_s baseline_ttft_s"
    assert {*names.split(), "answer_equal"} <= set(written["rows"][0])
    assert written["summary"]["restored_turns"] == 1
    assert written["summary"]["passed"] is True
    assert written["configuration"]["device_tokens"] == 512
    assert {"python", "torch", "sglang", "krul_sglang"} <= set(written["versions"])
    assert {"cpu", "cores", "memory_bytes", "device"} <= set(written["machine"])
    assert written["samples"]["krul"][0]["ttft_s"] == 0.1


def test_what_is_kept_groups_returning_turns_by_the_length_of_their_prompt() -> None:
    rows = [
        row(1, ttft_s=9.0),
        row(host=160, ttft_s=0.1),
        replace(row(host=40, ttft_s=0.3), turn=3),
        replace(row(ttft_s=0.2), turn=4, prompt_tokens=1025),
    ]
    kept = without_turns(demo_result(rows).to_json())
    assert not {"rows", "samples"} & set(kept)
    assert kept["conversations"] == 1
    assert kept["summary"]["returning_turns"] == 3
    short, long, every = kept["returning_turns"]
    assert (short["min_prompt_tokens"], short["max_prompt_tokens"], short["turns"]) == (1, 512, 2)
    assert (short["prompt_tokens"], short["host_tokens"]) == (400, 200)
    assert short["ttft_s"]["median"] == pytest.approx(0.2)
    assert (long["min_prompt_tokens"], long["max_prompt_tokens"], long["turns"]) == (1025, None, 1)
    assert (every["min_prompt_tokens"], every["max_prompt_tokens"], every["turns"]) == (1, None, 3)
    assert every["ttft_s"]["max"] == 0.3


def test_compressed_answers_are_judged_by_recall() -> None:
    same_fact = replace(row(host=16), answer_equal=False)
    kept = [same_fact, replace(row(host=16), correct=True, baseline_correct=True)]
    assert summarize(kept, stored=None, lossless=False).passed
    assert not summarize(kept, stored=None, lossless=True).passed
    lost = [replace(same_fact, correct=False, baseline_correct=True)]
    summary = summarize(lost, stored=None, lossless=False)
    assert not summary.passed
    assert "recall is 0% with krul and 100% without" in verdict(summary, lost)


def test_options_of_krul_reach_its_server_alone() -> None:
    config = DemoConfig(
        model_path="m", conversations_path="c", krul_options={"strategy": "krul", "r_l": "0.25"}
    )
    assert json.loads(server_args("krul", config, POOLS)[-1]) == {
        "host_memory": "512MiB",
        "strategy": "krul",
        "r_l": "0.25",
    }
    assert "krul" not in server_args("baseline", config, POOLS)


def test_the_three_servers_differ_in_the_pool_and_in_krul_only() -> None:
    config = DemoConfig(model_path="m", conversations_path="c", host_memory="1GiB", server_args=("--tp=2",))
    reference, baseline, krul = (
        server_args(phase, config, POOLS) for phase in ("reference", "baseline", "krul")
    )
    assert reference[:-1] == baseline[:-1]
    assert reference[-2:] == ["--max-total-tokens", "4096"]
    assert baseline[-2:] == ["--max-total-tokens", "512"]
    assert krul[: len(baseline)] == baseline
    added = krul[len(baseline) :]
    assert added[:2] == ["--radix-cache-backend", "krul"]
    assert json.loads(added[-1]) == {"host_memory": "1GiB"}
    assert "--tp=2" in baseline


def test_plain_output_has_one_line_per_request_and_no_control_codes() -> None:
    console = Console(file=io.StringIO(), width=60)
    with make_reporter(console, num_turns=1) as reporter:
        assert isinstance(reporter, PlainReporter)
        reporter.turn_answered("reference", turn_result())
        reporter.turn_answered("baseline", turn_result())
        reporter.turn_answered("krul", turn_result(host=160))
        reporter.row_finished(row(host=160))
        reporter.log_line("krul", "[info] ready")
    print_result(console, demo_result([row(host=160)]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert "\x1b" not in text
    assert lines[0].startswith("[1/3] reference: ada turn 2: prompt 200 = device 16 + recomputed 184")
    assert lines[2] == (
        "[3/3] krul: ada turn 2: prompt 200 = device 16 + krul 160 + recomputed 24, TTFT 100 ms "
        "(baseline 400 ms), answer equal"
    )
    assert lines[3] == "krul | [info] ready"
    assert lines[-1].endswith("4.00 times sooner with krul.")


def test_a_terminal_gets_the_whole_table_at_the_end_even_when_it_is_taller_than_the_screen() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=12)
    with make_reporter(console, num_turns=30) as reporter:
        assert isinstance(reporter, LiveReporter)
        for number in range(30):
            reporter.turn_answered("krul", turn_result())
            reporter.row_finished(replace(row(host=160), conversation=f"conversation-{number}"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    final_table = text[text.rindex("turn by turn") :]
    assert [f"conversation-{number} " in final_table for number in range(30)] == [True] * 30


def test_paths_below_the_working_directory_are_written_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = DemoConfig(model_path=str(tmp_path / "model"), conversations_path="/elsewhere/file.json")
    result = replace(demo_result([row(host=160)]), config=config)
    written = result.to_json()["configuration"]
    assert (written["model_path"], written["conversations_path"]) == ("model", "/elsewhere/file.json")
