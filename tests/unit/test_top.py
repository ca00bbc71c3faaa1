"""``krul-sglang top`` on recorded answers: of servers that work, are empty, huge, restarted or silent."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from textual.pilot import Pilot
from textual.widgets import Static
from typer.testing import CliRunner

from krul_backend.tiers.common.conversations import MAX_LISTED_TURNS
from krul_backend.tiers.common.interface import SegmentInfo
from krul_sglang.cli import app as cli
from krul_sglang.cli.server_client import CannotRunError
from krul_sglang.cli.top import SECTIONS, Picture, TopApp, ask, draw, picture, plain
from tests.support.stats_builders import make_segment_info
from tests.unit.test_trace import RECORDED, RESCUED

SSD: dict[str, Any] = {
    "name": "ssd",
    "capacity_bytes": 268_435_456,
    "used_bytes": 134_217_728,
    "num_segments": 19,
    "evicted_segments": 2,
    "queued_bytes": 4096,
    "is_suspended": False,
    "is_opening": False,
}
KRUL: dict[str, Any] = {
    "capacity_bytes": 33_554_432,
    "used_bytes": 9_856_614,
    "num_segments": 17,
    "evicted_segments": 5,
    "hit_pages": 90,
    "missed_pages": 10,
    "tier_hit_pages": {"dram": 70, "ssd": 20},
    "prefetch_useful_bytes": 2048,
    "prefetch_wasted_bytes": 1024,
    "tiers": [SSD],
    "daemon": {"endpoint": "/nowhere/krul-1", "is_connected": True, "requests": 196},
    "offload": {
        "page_bytes": 16_384,
        "tokens": 16_000,
        "num_bytes": 1_638_400,
        "dropped_turns": {"evicted": 3, "no room": 1},
        "waiting_copies": 2,
        "waiting_bytes": 32_768,
        "pending": 4,
    },
    "load": {"pending": 6},
    "restore": {
        "plans": {"loads": 34, "prefix_tokens": 8000, "head_tokens": 1000, "saved_s": 75.5},
        "forecasts": {"restores": 34, "median_ratio": 0.97},
        "forward": {"rescued_requests": 7},
    },
    "waiting_leases": 5,
}
INFO = {"served_model_name": "/models/tiny-1b/", "page_size": 16, "radix_cache_backend": "krul"}
EMPTY: dict[str, Any] = {
    **KRUL,
    "used_bytes": 0,
    "num_segments": 0,
    "hit_pages": 0,
    "missed_pages": 0,
    "tier_hit_pages": {},
    "tiers": [],
    "offload": {**dict.fromkeys(KRUL["offload"], 0), "page_bytes": 16_384, "dropped_turns": {}},
    "restore": {
        "plans": dict.fromkeys(KRUL["restore"]["plans"], 0),
        "forecasts": {"restores": 0},
        "forward": {"rescued_requests": 0},
    },
}
CONVERSATION = [
    make_segment_info(1, last_page_key="aa01", num_tokens=64, num_bytes=4096, tiers=("dram", "ssd")),
    make_segment_info(
        2, parent_key="aa01", last_page_key="aa02", start_token=64, num_bytes=1024, tiers=("ssd",)
    ),
    make_segment_info(
        3, parent_key="aa01", last_page_key="aa02", start_token=64, num_bytes=8192, is_fast_copy=True
    ),
]
OTHER = make_segment_info(4, last_page_key="bb01", tenant="blue\x1b[2J", num_bytes=2048, idle_s=7500.0)


def listing(*turns: SegmentInfo) -> Callable[[Any], list[SegmentInfo]]:
    return lambda krul: list(turns)


def show(
    krul: Any = KRUL, restores: Any = (RECORDED, RESCUED), turns: Any = (*CONVERSATION, OTHER)
) -> Picture:
    return picture(INFO, [{"krul": krul, "krul_restores": list(restores)}], listing(*turns))


def text_of(shown: Picture, width: int = 160) -> str:
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(plain(shown))
    return captured.get()


def row(text: str, name: str) -> str:
    """The line that begins with ``name``, with single blanks."""
    (line,) = [" ".join(line.split()) for line in text.splitlines() if line.startswith(f"{name} ")]
    return line


def test_every_number_stands_where_it_belongs() -> None:
    text = text_of(show())
    assert text.startswith("tiny-1b\n")
    assert row(text, "dram").endswith("9.4 MiB 32.0 MiB 17 70 5 -")
    assert row(text, "ssd").endswith("128.0 MiB 256.0 MiB 19 20 2 4.0 KiB")
    assert row(text, "compression") == "compression 10.0 times: 15.6 MiB of KV in 1.6 MiB since the start"
    assert row(text, "hits") == "hits 90 pages, 10 missed (90% hit)"
    assert row(text, "tokens saved") == "tokens saved 7,000 loaded; 1,000 more recomputed in layer 0"
    assert row(text, "TTFT saved").startswith("TTFT saved 1m15s by plan")
    assert row(text, "restored") == "restored 34 requests, 7 failed; took 0.97 of the planned time"
    assert row(text, "dropped turns") == "dropped turns 3 evicted, 1 no room"
    assert row(text, "to encode") == "to encode 2 exact copies, 32.0 KiB; 4 to copy"
    assert row(text, "to restore") == "to restore 5 waiting requests hold KV or have it prefetched; 6 loads"
    assert row(text, "prefetched") == "prefetched 2.0 KiB used, 1.0 KiB not"


def test_turns_are_joined_to_conversations() -> None:
    text = text_of(show())
    assert row(text, "aa01") == "aa01 - 128 2 4.0 KiB 5.0 KiB 8.0 KiB 0 1.0s"
    assert row(text, "bb01") == "bb01 blue?[2J 64 1 2.0 KiB - - 0 2h05m"
    assert text.index("aa01") < text.index("bb01"), "the last used comes first"


def test_a_turn_whose_beginning_is_gone_is_shown_on_its_own() -> None:
    assert row(text_of(show(turns=CONVERSATION[1:2])), "aa02") == "aa02 128 1 1.0 KiB - 0 1.0s"


def test_only_the_last_used_conversations_are_shown() -> None:
    turns = [make_segment_info(i, idle_s=float(i)) for i in range(1, 24)]
    text = text_of(show(turns=turns))
    assert row(text, "01")
    assert "\n15 " not in text
    assert "and 3 more" in text


def test_restores_are_shown_the_latest_first() -> None:
    last, first = text_of(show()).splitlines()[-2:]
    assert last.split() == ["64", "32", "/", "0", "1.5", "10.0", "0%", "20%", "load", "failed"]
    assert first.split() == ["96", "48", "/", "0", "1.5", "2.0", "75%", "70%"]


def test_ranks_of_one_daemon_count_its_pages_once() -> None:
    states = [{"krul": KRUL, "krul_restores": []}] * 2
    text = text_of(picture(INFO, states, listing()))
    assert row(text, "dram").endswith("32.0 MiB 17 70 5 -")
    assert row(text, "hits") == "hits 90 pages, 10 missed (90% hit)"
    assert row(text, "dropped turns") == "dropped turns 6 evicted, 2 no room"


def test_an_empty_server() -> None:
    text = text_of(show(EMPTY, restores=(), turns=()))
    assert text.count("none yet") == 2
    assert row(text, "compression") == "compression 0.0 times: 0 B of KV in 0 B since the start"
    assert row(text, "dropped turns") == "dropped turns none"


def test_no_daemon() -> None:
    """Neither does it answer the server, nor is it on this machine."""
    silent = copy.deepcopy(KRUL)
    silent["daemon"]["is_connected"] = False
    text = text_of(picture(INFO, [{"krul": silent, "krul_restores": []}]))
    assert row(text, "dram silent")
    assert "not listed: " in text
    assert "/nowhere/krul-1" in text


def test_a_daemon_of_many_turns_is_not_asked_for_a_list() -> None:
    many = {**KRUL, "num_segments": MAX_LISTED_TURNS + 1}
    text = text_of(picture(INFO, [{"krul": many, "krul_restores": []}]))
    assert "not listed: 2,001 turns are too many" in text


def client_of(answer: Any) -> httpx.Client:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answer))
    return httpx.Client(transport=transport, base_url="http://server")


def test_one_request_makes_a_picture() -> None:
    asked = ask(client_of({**INFO, "internal_states": [{"krul": KRUL, "krul_restores": []}]}))
    assert (asked.title, asked.num_requests, tuple(asked.sections)) == ("tiny-1b", 196, SECTIONS)


@pytest.mark.parametrize("krul", [{}, {**KRUL, "offload": {}}, {**KRUL, "tiers": 7}])
def test_another_version_is_told_from_a_silent_server(krul: Any) -> None:
    with pytest.raises(CannotRunError, match="another version"):
        ask(client_of({**INFO, "internal_states": [{"krul": krul, "krul_restores": []}]}))


def lines_of(app: TopApp, name: str) -> str:
    widget = app.query_one(f"#{name}", Static)
    return "\n".join(widget.render_line(y).text for y in range(widget.size.height))


def in_app(
    source: Callable[[], Picture],
    check: Callable[[TopApp, Pilot[None]], Any],
    size: tuple[int, int] = (80, 24),
) -> None:
    async def main() -> None:
        app = TopApp(source, url="http://server", interval_s=0.01)
        async with app.run_test(size=size) as pilot:
            await check(app, pilot)

    asyncio.run(main())


async def wait_for(pilot: Pilot[None], app: TopApp, text: str) -> str:
    """The status line, as soon as it contains ``text``."""
    deadline_s = time.monotonic() + 10.0
    while text not in lines_of(app, "status"):
        assert time.monotonic() < deadline_s, lines_of(app, "status")
        await pilot.pause(0.01)
    return lines_of(app, "status")


HUGE = {
    **KRUL,
    "capacity_bytes": 2**54,
    "used_bytes": 2**53,
    "num_segments": 10**9,
    "evicted_segments": 10**13,
    "hit_pages": 10**15,
    "tier_hit_pages": {"dram": 10**12},
}


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (140, 40)])
def test_a_narrow_terminal_cuts_no_number_of_a_huge_server(size: tuple[int, int]) -> None:
    """What is wider than the terminal is reached by scrolling."""

    async def check(app: TopApp, pilot: Pilot[None]) -> None:
        await wait_for(pilot, app, "tiny-1b")
        await pilot.pause()
        tiers = lines_of(app, "tiers")
        assert "8192.0 TiB  16384.0 TiB   1.0G       1.0T    10.0T" in tiers
        assert "1,000.0T pages" in lines_of(app, "savings")
        assert "…" not in tiers + lines_of(app, "conversations") + lines_of(app, "restores")

    in_app(lambda: show(HUGE), check, size)


def test_it_goes_on_when_no_answer_comes() -> None:
    """What came last stays; a server that counts anew was restarted."""
    answers: list[Any] = [show()]

    def source() -> Picture:
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        shown: Picture = answers[-1]
        return shown

    async def check(app: TopApp, pilot: Pilot[None]) -> None:
        assert "restarted" not in await wait_for(pilot, app, "tiny-1b")
        answers.append(CannotRunError("refused \x1b[2J"))
        silent = (await wait_for(pilot, app, "no answer since")).strip()
        assert silent.endswith("refused ?[2J")
        assert "9.4 MiB" in lines_of(app, "tiers")
        await pilot.pause(1.1)
        assert lines_of(app, "status").strip() == silent, "since when stays"
        answers.append(show({**EMPTY, "daemon": {**KRUL["daemon"], "requests": 3}}, (), ()))
        await wait_for(pilot, app, "restarted before")
        await pilot.pause()
        assert "none yet" in lines_of(app, "conversations")

    in_app(source, check)


def test_it_ends_while_a_server_is_busy() -> None:
    asked, answer = threading.Event(), threading.Event()

    def source() -> Picture:
        asked.set()
        answer.wait(30.0)
        return show()

    async def check(app: TopApp, pilot: Pilot[None]) -> None:
        while not asked.is_set():
            await pilot.pause(0.01)
        await pilot.press("q")

    start_s = time.monotonic()
    in_app(source, check)
    answer.set()
    assert time.monotonic() - start_s < 20.0


def test_a_drawing_fetches_nothing(tmp_path: Path) -> None:
    draw(show(), tmp_path / "top.svg", url="http://server", size=(80, 24))
    svg = (tmp_path / "top.svg").read_text()
    assert "9.4\u00a0MiB" in svg
    assert "url(http" not in svg


@pytest.mark.parametrize("arguments", [["top", "--once"], ["top", "--svg", "top.svg"], ["top"]])
def test_without_a_server_one_picture_is_one_line_of_error(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.app, [*arguments, "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert result.stderr.startswith("krul-sglang: error: the server at http://127.0.0.1:9 cannot be reached")
    assert result.stderr.count("\n") == 1
