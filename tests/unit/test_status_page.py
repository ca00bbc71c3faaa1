"""What the daemon's page is told: conversations with what they hold and have spent."""

from __future__ import annotations

import asyncio
import json
import re
from importlib.resources import files
from typing import Any

import pytest

from krul_backend.daemon.server.status_page import MAX_CONVERSATIONS, SAMPLE_S, StatusPage
from krul_backend.errors import DaemonError
from krul_backend.tiers.common.conversations import MAX_LISTED_TURNS, conversations_of
from krul_backend.tiers.common.interface import SegmentInfo
from tests.support.stats_builders import (
    make_daemon_stats,
    make_segment_info,
    make_store_stats,
    make_tier_stats,
)

FILES = files("krul_backend.daemon.server").joinpath("page")
FIRST = make_segment_info(
    1,
    last_page_key="aa",
    num_tokens=100,
    codec="subspace",
    codec_params={"damage": 0.02},
    tiers=("dram", "ssd"),
)
SECOND = make_segment_info(
    2,
    parent_key="aa",
    last_page_key="bb",
    start_token=100,
    num_tokens=100,
    codec="subspace",
    codec_params={"damage": 0.01},
    idle_s=0.5,
)
COPY = make_segment_info(
    3, parent_key="aa", last_page_key="bb", start_token=100, num_bytes=9000, codec="native", is_fast_copy=True
)


def status_of(*segments: SegmentInfo, **changes: Any) -> dict[str, Any]:
    stats = make_store_stats(tiers=(make_tier_stats(num_segments=3),), **changes)
    page = StatusPage(lambda: (stats, make_daemon_stats()), lambda: list(segments))
    answer: dict[str, Any] = json.loads(asyncio.run(page.status()))
    return answer


def test_a_conversation_says_what_it_holds_where_and_what_it_has_spent() -> None:
    (line,) = status_of(FIRST, SECOND, COPY, num_segments=3)["conversations"]
    assert line == {
        "first_page": "aa",
        "tenant": "",
        "codecs": ["subspace"],
        "tokens": 200,
        "turns": 2,
        "held": {
            "dram": 8192,
            **dict.fromkeys((tier.name for tier in make_store_stats().tiers), 0),
            "ssd": 4096,
        },
        "exact_copy_bytes": 9000,
        # The first turn's damage counts for half of the tokens by now.
        "spent_nats": pytest.approx(0.02 / 2 + 0.01),
        "leases": 0,
        "idle_s": 0.5,
    }


@pytest.mark.parametrize(
    ("segment", "spent"),
    [
        (make_segment_info(codec="native"), 0.0),
        (make_segment_info(codec="native", codec_params={"damage": 0.03}), 0.03),
        (make_segment_info(codec="native", codec_params={"damage": None}), None),
        (make_segment_info(codec="subspace", codec_params={"damage": float("inf")}), None),
        (make_segment_info(codec="pairs"), None),
    ],
)
def test_nats_that_nobody_knows_are_not_made_up(segment: SegmentInfo, spent: float | None) -> None:
    assert conversations_of([segment])[0].spent_nats == spent


def test_ranks_that_store_the_same_tokens_spend_them_once() -> None:
    other = make_segment_info(
        9,
        last_page_key="aa",
        num_tokens=100,
        codec="subspace",
        codec_params={"damage": 0.015},
        fingerprint="e" * 32,
    )
    (joined,) = conversations_of([FIRST, other])
    assert joined.spent_nats == pytest.approx(0.02)


def test_long_names_and_many_conversations_are_cut() -> None:
    many = [make_segment_info(number, idle_s=float(number), tenant="t" * 500) for number in range(1, 300)]
    shown = status_of(*many, num_segments=300)
    assert [line["idle_s"] for line in shown["conversations"]] == [
        float(n) for n in range(1, MAX_CONVERSATIONS + 1)
    ]
    assert shown["left_out"] == 299 - MAX_CONVERSATIONS
    assert {len(line["tenant"]) for line in shown["conversations"]} == {64}


def test_a_store_of_many_turns_is_not_listed() -> None:
    def fail() -> list[SegmentInfo]:
        raise AssertionError("it was asked")

    stats = make_store_stats(num_segments=MAX_LISTED_TURNS + 1, tiers=())
    page = StatusPage(lambda: (stats, make_daemon_stats()), fail)
    shown = json.loads(asyncio.run(page.status()))
    assert shown["conversations"] == []
    assert "2,001 turns are too many" in shown["not_listed"]


def test_however_many_ask_the_store_is_asked_once() -> None:
    asked = []

    def read() -> Any:
        asked.append(1)
        return make_store_stats(), make_daemon_stats()

    async def ask() -> list[bytes]:
        page = StatusPage(read, list)
        return await asyncio.gather(*(page.status() for _ in range(20)))

    assert len(set(asyncio.run(ask()))) == 1
    assert len(asked) == 1


def test_samples_go_on_when_the_store_cannot_say() -> None:
    answers: list[Any] = [DaemonError("it ends"), (make_store_stats(hit_pages=7), make_daemon_stats())]
    noted = asyncio.Event()

    def read() -> Any:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, DaemonError):
            raise answer
        noted.set()
        return answer

    async def run(patch: pytest.MonkeyPatch) -> Any:
        patch.setattr("krul_backend.daemon.server.status_page.SAMPLE_S", 0.001)
        page = StatusPage(read, list)
        sampling = asyncio.create_task(page.note_samples())
        while not noted.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        sampling.cancel()
        return json.loads(await page.status())["samples"]

    with pytest.MonkeyPatch.context() as patch:
        samples = asyncio.run(run(patch))
    assert SAMPLE_S > 1
    assert len(samples) >= 2
    assert {sample[1] for sample in samples} == {7}


def test_texts_only_become_text_nodes_and_nothing_comes_from_elsewhere() -> None:
    script = FILES.joinpath("page.js").read_text()
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", ".html"):
        assert way not in script
    page = FILES.joinpath("index.html").read_text()
    assert "http" not in page
    named = re.findall(r'(?:src|href)="/([^"]+)"', page)
    assert sorted(named) == ["page.css", "page.js", "uPlot.css", "uPlot.js"]
    assert all(FILES.joinpath(name).is_file() for name in (*named, "uPlot.LICENSE"))
