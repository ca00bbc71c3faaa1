"""The serving benchmark without a real server: its load, its schedule, its requests and its rows."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.figures import draw_serving
from benchmarks.multiturn import COLUMNS as MULTITURN_COLUMNS
from benchmarks.multiturn import SPARSE
from benchmarks.multiturn import summarize as summarize_multiturn
from benchmarks.serving.__main__ import main
from benchmarks.serving.bench_serving import (
    as_chat,
    command,
    plan_pools_of_groups,
    rows_of_reports,
    write_trace,
)
from benchmarks.serving.configuration import Configuration, ServingBenchmarkError
from benchmarks.serving.conversations import (
    RecordedConversation,
    choose_conversations,
    longest_run,
    recorded_conversations,
)
from benchmarks.serving.load import order_of_servers, play, schedule
from benchmarks.serving.rows import hit_rate_by_tier, of_tiers, ratios, row, summarize, theoretical_hit_rate
from benchmarks.serving.servers import Counts, Server
from benchmarks.serving.tables import COLUMNS, rows_table
from benchmarks.tables import RESULTS
from demo.conversations import Conversation, UserTurn
from demo.sizing import SizingError
from demo.sizing import plan_pools as plan_pools_of_conversations
from demo.summary import write_summary
from krul_sglang.cli.timed_answer import Message, TurnResult


def count_words(messages: list[Message]) -> int:
    return sum(len(message["content"].split()) for message in messages)


def encode_words(messages: list[Message]) -> list[int]:
    """A token per word, and one at the end: the prompt for the answer."""
    return [hash(word) for message in messages for word in message["content"].split()] + [0]


def configuration(**changes: Any) -> Configuration:
    return replace(Configuration(model_path="model", history_tokens=(120,), users=3, rounds=2), **changes)


def conversation(name: str, *texts: str) -> Conversation:
    return Conversation(name, tuple(map(UserTurn, texts)))


def answered(turn: int, *, ttft_s: float = 1.0, answer: str = "yes", host: int = 0) -> TurnResult:
    return TurnResult("a", turn, 100, 10, host, 5, ttft_s, ttft_s + 2.0, answer)


# Conversations


def test_generated_conversations_have_the_length_and_depend_on_the_seed_alone() -> None:
    chosen = choose_conversations(configuration(), count_words)
    again = choose_conversations(configuration(), count_words)
    other = choose_conversations(configuration(seed=1), count_words)
    assert chosen == again != other
    assert len({each.turns[0].text for each in chosen}) == 3
    for each in chosen:
        assert len(each.turns) == 2
        assert 120 <= count_words(each.messages(1, {})) <= 140
        assert len(each.turns[1].text.split()) < 20


def test_later_turns_are_as_long_as_asked_for() -> None:
    (short, long) = (
        choose_conversations(configuration(turn_tokens=tokens), count_words)[0] for tokens in (None, 60)
    )
    assert long.turns[0] == short.turns[0]
    assert 60 <= len(long.turns[1].text.split()) <= 80


def test_a_recorded_session_becomes_its_prompts_that_extend_each_other(tmp_path: Path) -> None:
    prompts = ("a b", "a b c d", "x", "a b c d e f", "a b c d e f " + "g " * 200)
    lines = [
        {"timestamp": number, "session_id": "s", "input": text, "output": "o"}
        for number, text in enumerate(prompts)
    ]
    # Lines need not be in the order of time.
    (tmp_path / "one.jsonl").write_bytes(b"\n".join(map(orjson.dumps, reversed(lines))))
    (found,) = recorded_conversations(tmp_path, 2, lambda text: len(text) < 100)
    assert found.messages(1, {}) == [{"role": "user", "content": "a b c d"}]
    assert found.messages(2, {1: "an answer of a model"}) == [{"role": "user", "content": "a b c d e f"}]
    assert longest_run(["b", "a", "a", "ab", "abc"]) == ["a", "ab", "abc"]


def test_recorded_sessions_of_all_folders_are_cut_into_turns(tmp_path: Path) -> None:
    """With a length of turns, pieces of whole sessions are said, answers among them, folders taking turns."""
    for folder in "ab":
        for number in range(3):
            said = f"{folder}{number} " * 40
            turn = {"timestamp": 1, "session_id": f"{folder}{number}", "input": said, "output": said}
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{number}.jsonl").write_bytes(
                b"\n".join(map(orjson.dumps, (turn, {**turn, "timestamp": 2, "input": "", "output": "no"})))
            )
    lengths = {"turn_tokens": 12, "max_tokens": 2, "history_tokens": (10, 40)}
    asked = configuration(data=tmp_path, users=6, rounds=3, **lengths)
    found = choose_conversations(asked, count_words)
    assert [each.conversation_id[0] for each in found] == ["a", "b"] * 3
    assert {each.conversation_id for each in found} == {f"{folder}{n}-0" for folder in "ab" for n in range(3)}
    for each, first in zip(found, (10, 40) * 3, strict=True):
        words = [turn.text.split() for turn in each.turns]
        assert {word for of_turn in words for word in of_turn[1:-1]} == {each.conversation_id[:2]}
        assert [len(of_turn) for of_turn in words] == pytest.approx([first, 10, 10], abs=2)
    assert choose_conversations(asked, count_words) == found


def test_unusable_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServingBenchmarkError, match="no session"):
        choose_conversations(configuration(data=tmp_path), count_words)
    (tmp_path / "one.jsonl").write_text('{"session_id": 1, "timestamp": 5, "input": "alone"}\n')
    with pytest.raises(ServingBenchmarkError, match="0 found where --users is 3"):
        choose_conversations(configuration(data=tmp_path), count_words)
    (tmp_path / "two.jsonl").write_text('{"session_id": 1}\n')
    with pytest.raises(ServingBenchmarkError, match=r"two\.jsonl: line 1"):
        choose_conversations(configuration(data=tmp_path), count_words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--configurations", "native,fastest"], "no 'fastest'"),
        (["--configurations", "native,native"], "each once"),
        (["--configurations", "recompute+lru"], "no 'recompute+lru'"),
        (["--configurations", "native+fifo"], "no 'native+fifo'"),
        (["--speculative", "GUESSES"], "no 'GUESSES'; accepted are NGRAM, STANDALONE"),
        (["--configurations", "native+speculative,recompute"], "give both"),
        (["--configurations", "native,device", "--at-once", "1"], "has to be in the first group"),
        (["--rotate", "--rate", "2"], "--rotate: leave --rate out"),
        (["--host-share", "0"], "--host-share 0"),
        (["--client", "divergence", "--at-once", "1"], "leave --rotate and --at-once out"),
        (["--rounds", "1"], "--rounds 1"),
        (["--users", "0"], "--users 0"),
        (["--host-memory", "much"], "--host-memory"),
        (["--compressed-options", "int4"], "is not JSON"),
        (["--compressed-options", '{"precision": "int5"}'], "int5"),
        (["--client", "bench_serving", "--think-time", "1"], "does not think"),
        (["--client", "divergence", "--rate", "2"], "one request at a time"),
        (["--client", "divergence", "--configurations", "native"], "two or more servers"),
        (["--turn-tokens", "0"], "--turn-tokens 0"),
        (["--data", "no-such-folder", "--model", "bundled"], "no such folder"),
        (["--device-tokens", "100000", "--model", "bundled"], "nothing would leave it"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "no-such-model", *arguments]) == 1
    errors = capsys.readouterr().err.strip().splitlines()
    assert message in errors[-1]
    assert not [line for line in errors if "Traceback" in line]


def test_bench_serving_pools_evict() -> None:
    pools = plan_pools_of_groups(configuration())
    assert pools.longest_tokens < pools.device_tokens < 3 * 120 < pools.total_tokens < pools.reference_tokens
    with pytest.raises(ServingBenchmarkError, match="nothing would leave it"):
        plan_pools_of_groups(configuration(device_tokens=360))
    with pytest.raises(SizingError, match="nothing would leave it"):
        plan_pools_of_conversations(
            [conversation("a", "b c")],
            count_words,
            max_tokens=1,
            page_size=16,
            device_tokens=1000,
            context_length=None,
        )


# Schedule


def test_one_at_a_time_all_others_run_between_two_turns_of_a_conversation() -> None:
    both = [conversation("a", "1", "2"), conversation("b", "1", "2", "3")]
    batches = schedule(both, rate=None, seed=0)
    assert [
        (arrival.conversation.conversation_id, arrival.turn) for batch in batches for arrival in batch
    ] == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("b", 3)]
    assert {len(batch) for batch in batches} == {1}


def test_in_rotation_all_turns_are_one_batch() -> None:
    both = [conversation("a", "1", "2"), conversation("b", "1", "2")]
    (batch,) = schedule(both, rate=None, seed=0, rotates=True)
    assert [(arrival.conversation.conversation_id, arrival.turn) for arrival in batch] == [
        *(("a", 1), ("b", 1), ("a", 2), ("b", 2))
    ]


def test_variants_have_their_options_and_servers_run_in_groups() -> None:
    names = ("recompute", "native", "native+lru+no-prefetch", "compressed+lru", "full-load")
    settings = configuration(servers=names, at_once=2, krul_options={"eviction": "value"})
    assert settings.groups == (names[:2], names[2:4], names[4:])
    assert configuration(servers=names).groups == (names,)
    assert settings.krul_servers == names[1:]
    assert settings.options_of("native") == {"eviction": "value"}
    assert settings.options_of("native+lru+no-prefetch") == {"eviction": "lru"}
    assert settings.options_of("compressed+lru") == {"eviction": "lru", "strategy": "subspace"}


def test_servers_that_draft_are_compared_with_each_other() -> None:
    names = ("recompute", "native", "recompute+speculative", "native+lru+speculative")
    settings = configuration(servers=names, speculative="NGRAM")
    assert settings.options_of("native+lru+speculative") == {"eviction": "lru"}
    ttft_s = dict(zip(names, ([8.0], [4.0], [6.0], [2.0]), strict=True))
    found = [ratios(ttft_s, name)["times_sooner_than_recompute"]["median"] for name in names[1::2]]
    assert found == [2.0, 3.0]
    assert ratios(ttft_s, "recompute+speculative") == {}


def test_arrivals_are_a_poisson_process_of_the_seed() -> None:
    many = [conversation(str(number), "1", "2") for number in range(400)]
    first, second = schedule(many, rate=4.0, seed=7)
    assert (first, second) == tuple(schedule(many, rate=4.0, seed=7))
    assert schedule(many, rate=4.0, seed=8)[0] != first
    assert [arrival.turn for arrival in second] == [2] * 400
    times = [arrival.after_s for arrival in first]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times)
    # Exponential gaps: their mean and their standard deviation are both 1 / rate.
    mean = sum(gaps) / 400
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / 400) ** 0.5
    assert 0.21 < mean < 0.29
    assert 0.20 < deviation < 0.30


def test_servers_begin_equally_often_and_never_always_with_the_same_conversation() -> None:
    names = ["a", "b", "c"]
    orders = [order_of_servers(names, batch) for batch in range(9)]
    assert all(sorted(order) == names for order in orders)
    assert sorted(order[0] for order in orders) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    # Three conversations: each meets each beginner once in three rounds.
    assert {orders[0][0], orders[3][0], orders[6][0]} == set(names)


# Requests


@dataclass
class FakeServer:
    """Answers ``NAME TURN`` as an OpenAI endpoint does, and needs a moment after each answer."""

    name: str
    log: list[tuple[str, list[Message]]]
    url: str = ""
    busy_until: float = 0.0
    asked_while_busy: int = 0
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    hints: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def answer(self, messages: list[Message]) -> Iterator[dict[str, Any]]:
        with self.lock:
            self.log.append((self.name, messages))
            self.asked_while_busy += time.monotonic() < self.busy_until
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        time.sleep(0.05)
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        for piece in (self.name, " ", str(len(messages))):
            yield {"choices": [{"index": 0, "delta": {"content": piece}}]}
            time.sleep(0.01)
        yield {"choices": [], "sglext": {"cached_tokens_details": {"device": 2, "host": 5}}}
        yield {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}}
        with self.lock:
            self.running -= 1
            self.busy_until = time.monotonic() + 0.1

    def server_info(self) -> dict[str, Any]:
        pending = int(time.monotonic() < self.busy_until)
        state = {
            "offload": {"pending": pending},
            "load": {"pending": 0, "dram_tokens": len(self.log)},
            "tiers": [{"name": "ssd", "queued_segments": 0, "stored_bytes": 7, "num_pages": 2}],
            "tier_hit_pages": {"dram": len(self.log)},
            "prefetch_useful_bytes": 3 * len(self.log),
            "prefetch_wasted_bytes": 0,
            "stored_bytes": 5,
            "num_pages": 1,
        }
        return {"internal_states": [{"krul": state}]}


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            if "custom_params" in asked:
                fake.hints.append((asked["session_id"], asked["custom_params"]["krul_hints"]))
            for chunk in fake.answer(asked["messages"]):
                base = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
                self.wfile.write(b"data: " + orjson.dumps(base | chunk) + b"\n\n")
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield fake
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


@contextmanager
def two_fakes(
    *names: str,
) -> Iterator[tuple[list[tuple[str, list[Message]]], list[FakeServer], list[Server]]]:
    log: list[tuple[str, list[Message]]] = []
    with ExitStack() as stack:
        fakes = [
            stack.enter_context(serving(FakeServer(name, log))) for name in names or ("device", "native")
        ]
        yield log, fakes, [Server(fake.name, 64, {}, fake) for fake in fakes]  # type: ignore[arg-type]


def test_servers_are_asked_in_turns_with_the_same_prompts_and_only_when_idle() -> None:
    chosen = [conversation("a", "one", "two"), conversation("b", "one", "two")]
    settings = configuration(servers=("device", "native"))
    told: list[str] = []
    with two_fakes() as (log, fakes, servers):
        batches = schedule(chosen, rate=None, seed=0)
        answers = asyncio.run(play(servers, settings, batches, lambda name, turn: told.append(name)))
        counts = servers[1].counts()
    asked = log[4:]
    assert (
        [name for name, _ in asked]
        == told
        == [*("device", "native", "native", "device", "native", "device", "device", "native")]
    )
    for first, second in zip(asked[::2], asked[1::2], strict=True):
        assert first[1] == second[1]
    assert asked[-1][1] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "device 1"},
        {"role": "user", "content": "two"},
    ]
    # The second request of the warm-up at most, and no other: native answered two turns in a row.
    assert max(fake.asked_while_busy for fake in fakes) <= 1
    # What was counted while it was warmed up does not count.
    assert counts == Counts(
        hit_pages={"dram": 8},
        dram_tokens=8,
        prefetched_bytes={"useful": 24, "wasted": 0},
        num_bytes={"dram": 5, "ssd": 7},
        num_pages={"dram": 1, "ssd": 2},
    )
    turn = answers.turns["native"][-1]
    assert (turn.answer, turn.prompt_tokens, turn.device_tokens, turn.host_tokens) == ("native 3", 9, 2, 5)
    assert 0.05 <= turn.ttft_s <= turn.total_s - 0.02
    assert answers.busy_s["native"] == pytest.approx(
        sum(turn.total_s for turn in answers.turns["native"]), rel=0.2
    )


def test_under_load_the_turns_of_a_round_run_together_and_servers_one_after_the_other() -> None:
    chosen = [conversation(name, "one", "two") for name in "abcd"]
    settings = configuration(servers=("device", "native"), rate=1000.0, think_time_s=0.3)
    with two_fakes() as (log, fakes, servers):
        began = time.perf_counter()
        asyncio.run(play(servers, settings, schedule(chosen, rate=1000.0, seed=0), lambda name, turn: None))
        took_s = time.perf_counter() - began
    assert [name for name, _ in log[4:]] == [
        *(["device"] * 4 + ["native"] * 4),
        *(["native"] * 4 + ["device"] * 4),
    ]
    assert min(fake.most_running for fake in fakes) > 1
    assert took_s > 0.3


def test_in_rotation_a_conversation_waits_for_itself_alone_and_servers_play_one_by_one() -> None:
    chosen = [conversation(name, "one", "two", "three") for name in "ab"]
    settings = configuration(servers=("device", "native"), rotates=True, at_once=1)
    batches = schedule(chosen, rate=None, seed=0, rotates=True)
    with two_fakes() as (log, fakes, servers):
        answers = asyncio.run(play(servers[:1], settings, batches, lambda name, turn: None))
        asyncio.run(play(servers[1:], settings, batches, lambda name, turn: None, answers))
    assert [name for name, _ in log] == ["device"] * 8 + ["native"] * 8
    assert max(fake.most_running for fake in fakes) == 2
    for name in ("device", "native"):
        # Of both servers in the same order, whichever answered first.
        assert [(turn.conversation, turn.turn) for turn in answers.turns[name]] == [
            (key, turn) for key in "ab" for turn in (1, 2, 3)
        ]
    # The prompts of a later group have the answers of the reference, too.
    (last,) = {tuple(message["content"] for message in asked) for _, asked in log[-2:]}
    assert last == ("one", "device 1", "two", "device 3", "three")


def test_a_server_of_hints_is_told_when_conversations_return() -> None:
    names = ("device", "native+hints")
    with pytest.raises(ServingBenchmarkError, match="give it a --think-time"):
        configuration(servers=names)
    settings = configuration(servers=names, think_time_s=0.01)
    batches = schedule([conversation("a", "one", "two")], rate=None, seed=0)
    with two_fakes(*names) as (_, fakes, servers):
        asyncio.run(play(servers, settings, batches, lambda name, turn: None))
    assert not fakes[0].hints
    assert fakes[1].hints == [("a", {"next_use_s": 0.01})] * 2


def test_a_server_that_is_gone_is_a_clear_error() -> None:
    with two_fakes() as (_, fakes, servers):
        fakes[1].url = "http://127.0.0.1:9"
        batches = schedule([conversation("a", "one", "two")], rate=None, seed=0)
        with pytest.raises(ServingBenchmarkError, match="APIConnectionError"):
            asyncio.run(play(servers, configuration(servers=("device", "native")), batches, print))


# Rows


def test_a_row_compares_turn_by_turn_and_looks_at_returning_turns() -> None:
    def of(*ttft_s: float, answer: str = "yes") -> list[TurnResult]:
        return [
            answered(number, ttft_s=seconds, answer=answer) for number, seconds in enumerate(ttft_s, start=1)
        ]

    turns = {
        "recompute": of(5.0, 4.0, 6.0, 10.0),
        "device": of(5.0, 1.0, 1.0, 1.0),
        "native": [*of(6.0, 2.0, 2.0), answered(4, ttft_s=2.5, answer="no", host=50)],
    }
    common = {"reference": "device", "busy_s": 10.0, "hit_pages": {"dram": 3, "ssd": 1}}
    made = row("native", turns, **common, theoretical_hit_rate=0.5, bytes_stored=7)  # type: ignore[arg-type]
    assert made["returning_turns"] == 3
    assert made["ttft_samples_s"] == [2.0, 2.0, 2.5]
    assert (made["p50_ttft_s"], made["p90_ttft_s"]) == (2.0, 2.5)
    assert made["mean_ttft_s"] == pytest.approx(6.5 / 3)
    # Ratios of pairs (2, 3, 4), not a ratio of medians (6 / 2).
    assert made["times_sooner_than_recompute"]["median"] == 3.0
    assert made["times_sooner_than_recompute"]["q75"] == 3.5
    assert made["times_of_device"]["max"] == 2.5
    assert made["first_turn_p50_s"] == 6.0
    assert made["ttft_by_round"][4]["median"] == 2.5
    assert made["tpot_s"] == 0.5
    assert made["first_turn_times_of_recompute"]["median"] == 1.2
    assert made["tpot_times_of_recompute"]["n"] == 4
    assert [(group["up_to"], group["turns"]) for group in made["by_prompt_tokens"]] == [(128, 3)]
    assert made["by_prompt_tokens"][0]["times_sooner_than_recompute"]["median"] == 3.0
    assert made["by_prompt_tokens"][0]["restored"] == pytest.approx(1 / 3)
    assert made["tokens_per_s"] == 2.0
    assert made["answers_equal"] == 0.75
    assert made["hit_rate_by_tier"] == pytest.approx({"device": 0.1, "dram": 0.125, "ssd": 50 / 3 / 4 / 100})
    without = row(
        "recompute",
        {"recompute": turns["recompute"]},
        **{**common, "reference": "recompute"},
        theoretical_hit_rate=0.5,
        bytes_stored=None,
    )  # type: ignore[arg-type]
    assert "times_sooner_than_recompute" not in without
    assert "times_of_device" not in without


def test_what_tiers_hold_and_found_is_told_of_krul_alone() -> None:
    turns = [answered(1, host=16), answered(1), answered(2, host=90), answered(2, host=90), answered(3)]
    counts = Counts(
        hit_pages={"dram": 9},
        dram_tokens=98,
        prefetched_bytes={"useful": 4, "wasted": 1},
        num_bytes={"dram": 640, "ssd": 100},
        num_pages={"dram": 21, "ssd": 42},
    )
    assert of_tiers(turns, turns, None, page_size=10) == {}
    # The last turn of the one conversation has 105 tokens. Of three returning turns two were restored, and
    # half of all that was restored came from DRAM.
    assert of_tiers(turns, turns, counts, page_size=10) == {
        "bytes_by_tier": {"dram": 640, "ssd": 100},
        "conversations_held": {"dram": 2.0, "ssd": 4.0},
        "in_dram_when_admitted": pytest.approx(2 / 3 * 98 / 196),
        "prefetched_bytes": {"useful": 4, "wasted": 1},
    }


def test_pages_and_figure_are_made_of_the_summary_alone(tmp_path: Path) -> None:
    turns = {
        "recompute": [answered(1), answered(2, ttft_s=3.0)],
        "native": [answered(1), answered(2, ttft_s=1.2, host=80)],
    }
    rows = [
        row(
            name,
            turns,
            reference="recompute",
            busy_s=1.0,
            hit_pages={"dram": 5} if name == "native" else {},
            theoretical_hit_rate=0.9,
            bytes_stored=3 << 20 if name == "native" else None,
        )
        for name in turns
    ]
    result = {
        "configuration": {**configuration().to_json(), "dtype": "float32", "total_tokens": 9},
        "machine": {"cpu": "a CPU", "cores": 2},
        "versions": {"sglang": "0"},
        "duration_s": 60.0,
        "rows": rows,
        "turns": turns,
        "krul": {},
    }
    write_summary(summarize(result), tmp_path / "out.json")
    read = orjson.loads((tmp_path / "out.json").read_bytes())
    assert "turns" not in read
    assert read["rows"][0]["ttft_samples_s"] == {
        **dict.fromkeys(["min", "q25", "median", "q75", "max"], 3.0),
        "n": 1,
    }
    table = rows_table(COLUMNS, read, RESULTS / "serving-cpu.json")
    assert (
        "| recompute | 3000 ms | 3000 ms | - | - | 1000 ms | - | 500 ms | - | device 10% | - | 100% |"
        in table
    )
    assert "| native | 1200 ms | 1200 ms | 2.50 (2.50-2.50) | - |" in table
    assert "| device 10% dram 80% | 3 MiB | 100% |" in table
    assert "compressed: strategy = subspace." in table
    draw_serving(read, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_what_is_kept_of_many_servers_is_small_and_enough_for_page_and_figure(tmp_path: Path) -> None:
    turns = {
        name: [
            replace(answered(turn, ttft_s=1 / 3 + number / 7), conversation=key)
            for number, key in enumerate("abcdefghijkl")
            for turn in (1, 2, 3)
        ]
        for name in SPARSE.servers
    }
    counts = Counts(
        hit_pages={"dram": 1234, "ssd": 567},
        dram_tokens=17,
        prefetched_bytes={"useful": 52 << 20, "wasted": 3 << 20},
        num_bytes={"dram": 123456789, "ssd": 234567890},
        num_pages={"dram": 12 * 3, "ssd": 12 * 6},
    )
    rows = [
        row(
            name,
            turns,
            reference="recompute",
            busy_s=1.0,
            hit_pages={} if name == "recompute" else counts.hit_pages,
            theoretical_hit_rate=0.9,
            bytes_stored=None if name == "recompute" else 3 << 20,
        )
        | of_tiers(turns[name], turns[name], None if name == "recompute" else counts, page_size=35)
        for name in SPARSE.servers
    ]
    servers = [
        {
            "configuration": name,
            "restores": {"loaded": 24, "refused": 0, "turns_not_stored": 0},
            "memory_bytes": 1 << 31,
            "tiers_mbs": {"dram": 1.0},
        }
        for name in SPARSE.servers
    ]
    result = {
        "configuration": {**SPARSE.to_json(), "dtype": "float32", "total_tokens": 9},
        "machine": {"cpu": "a CPU", "cores": 2},
        "versions": {"sglang": "0"},
        "duration_s": 60.0,
        "servers": servers,
        "rows": rows,
        "turns": turns,
        "krul": {},
    }
    kept = summarize_multiturn(result)
    write_summary(kept, tmp_path / "out.json")
    assert (tmp_path / "out.json").stat().st_size < 8000
    read = orjson.loads((tmp_path / "out.json").read_bytes())
    table = rows_table(MULTITURN_COLUMNS, read, RESULTS / "multiturn-cpu.json")
    assert "host memory for 25% of them as native KV, an SSD for 50% of them" in table
    cells = "| 0% | dram 12.0 ssd 24.0 | 52 MiB, 3 MiB | 100% |"
    assert table.count(cells) == len(SPARSE.krul_servers) == 8
    draw_serving(read, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_hits_of_a_server_without_krul_are_those_of_the_device() -> None:
    assert hit_rate_by_tier([answered(2)], {}) == {"device": 0.1}


def test_the_theoretical_hit_rate_counts_prompts_answers_and_common_beginnings() -> None:
    chosen = [
        replace(conversation("a", "a b c", "d"), system="s1 s2"),
        replace(conversation("b", "e f g", "h"), system="s1 s2"),
    ]
    answers = {("a", 1): "x y", ("a", 2): "z", ("b", 1): "x y", ("b", 2): "z"}
    turns = {
        key: replace(answered(key[1], answer=text), completion_tokens=len(text.split()) + 1)
        for key, text in answers.items()
    }
    # Second prompts: s1 s2 / a b / c x / y d / end. Of "c x" the answer's page was computed, "y d" was not.
    assert theoretical_hit_rate(chosen, turns, encode_words, page_size=2) == 6 / 9
    # With pages of one token, the answer's last word counts, too: its end token is what was not computed.
    assert theoretical_hit_rate(chosen, turns, encode_words, page_size=1) == 7 / 9


# sglang.bench_serving


def report(ttfts: list[float], cached: list[int]) -> dict[str, Any]:
    return {
        "completed": len(ttfts),
        "input_lens": [100] * len(ttfts),
        "ttfts": ttfts,
        "cached_tokens": cached,
        "mean_ttft_ms": 5.0,
        "median_ttft_ms": 4.0,
        "p99_ttft_ms": 9.0,
        "median_tpot_ms": 20.0,
        "output_throughput": 30.0,
        "cache_report": {"total_prompt_tokens": 300, "device_cached_tokens": 30, "host_cached_tokens": None},
    }


def test_rows_of_bench_serving_pair_the_requests_whose_beginning_came_before() -> None:
    reports = {
        "recompute": report([4.0, 4.0, 6.0], [0, 0, 0]),
        "device": report([4.0, 1.0, 1.0], [10, 90, 90]),
        "native": report([4.0, 2.0, 2.0], [0, 80, 0]),
    }
    made = rows_of_reports(reports, {"recompute": None, "device": None, "native": 5})
    native = made[2]
    assert native["returning_turns"] == 2
    assert native["times_sooner_than_recompute"]["median"] == 2.5
    assert native["times_of_device"]["median"] == 2.0
    assert native["all_requests_p50_ttft_s"] == 0.004
    assert native["hit_rate_by_tier"] == {"device": 0.1, "host": 0.0}
    reports["native"]["input_lens"] = [100, 100, 99]
    with pytest.raises(ServingBenchmarkError, match="same prompts"):
        rows_of_reports(reports, {})


def test_bench_serving_gets_options_that_it_has() -> None:
    source = pytest.importorskip("sglang.benchmark.serving").__file__
    text = Path(source).read_text()
    for rate, trace in ((None, None), (2.0, None), (None, Path("trace"))):
        arguments = command(configuration(rate=rate), "http://127.0.0.1:1", Path("out"), trace)
        options = [argument for argument in arguments if argument.startswith("--")]
        assert len(options) > 10
        assert all(f'"{option}"' in text for option in options)


def test_bench_serving_reads_the_trace_that_is_written(tmp_path: Path) -> None:
    dataset = pytest.importorskip("sglang.benchmark.datasets.agentic_trace").AgenticTraceDataset
    recorded = RecordedConversation("a", tuple(map(UserTurn, ("one", "one two", "one two three"))))
    chats = (as_chat(recorded), conversation("b", "alone", "and again"))
    path = tmp_path / "trace.json"
    write_trace(chats, path)
    rows = dataset(str(path), num_requests=2, fixed_output_len=7, offset=0, max_turns=None).load(None)
    prompts = [[message["content"] for turn in row.prompt for message in turn] for row in rows]
    assert prompts == [["one", " two", " three"], ["alone", "and again"]]
    assert [row.output_len for row in rows] == [7, 7]
