"""``krul-sglang top``: what a running server keeps, and what that saves, again and again.

The next request to the server comes after the answer to the last one. Beside each goes one to the daemon, if
that runs on this machine and holds few enough turns to list.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, ClassVar

import httpx
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.pilot import Pilot
from textual.widgets import Footer, Static

from krul_backend.atomic_file import replacing
from krul_backend.daemon.client import AdminClient
from krul_backend.errors import KrulError
from krul_backend.memory import format_bytes
from krul_backend.tiers.common.conversations import MAX_LISTED_TURNS, conversations_of
from krul_backend.tiers.common.interface import DRAM_TIER, SegmentInfo
from krul_sglang.cli.server_client import CannotRunError, printable, request, states_with_krul
from krul_sglang.traced_restore import RESTORES, TracedRestore

_MAX_CONVERSATIONS = 20
_MAX_RESTORES = 8
_DAEMON_TIMEOUT_S = 1.0
SECTIONS = ("tiers", "savings", "conversations", "restores")


@dataclass(frozen=True)
class Picture:
    """What one answer shows. ``num_requests``: that the server has sent to its daemon since it started."""

    title: str
    sections: Mapping[str, RenderableType]
    num_requests: int


def ask(client: httpx.Client) -> Picture:
    """Ask a server once.

    Raises:
        CannotRunError: there is no answer, or not one of a server with krul of this version.
    """
    info = request(client, "GET", "/server_info")
    states = states_with_krul(client, info)
    try:
        return picture(info, states)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CannotRunError(f"{client.base_url} runs another version of krul-sglang: {error!r}") from None


def list_turns(krul: Mapping[str, Any]) -> list[SegmentInfo]:
    """What the daemon of a server lists. Raises KrulError if it cannot be asked, or holds too many turns."""
    num_turns = max(tier["num_segments"] for tier in (krul, *krul["tiers"]))
    if num_turns > MAX_LISTED_TURNS:
        raise CannotRunError(f"{_count(num_turns)} turns are too many for each time, see krul-backend list")
    with AdminClient(krul["daemon"]["endpoint"], timeout_s=_DAEMON_TIMEOUT_S) as daemon:
        return daemon.list_segments()


def picture(
    info: Mapping[str, Any],
    states: Sequence[Mapping[str, Any]],
    list_of: Callable[[Mapping[str, Any]], list[SegmentInfo]] = list_turns,
) -> Picture:
    """Make a picture of what a server says.

    ``states`` are its ``internal_states``, one for each data-parallel rank; ranks may share a daemon.
    """
    ranks = [state["krul"] for state in states]
    daemons = list({krul["daemon"]["endpoint"]: krul for krul in ranks}.values())
    turns: list[SegmentInfo] = []
    notes = ""
    for krul in daemons:
        try:
            turns += list_of(krul)
        except (KrulError, OSError) as error:
            notes += f"not listed: {error}\n"
    restores = [
        TracedRestore.parse(value, index=index, rank=rank)
        for rank, state in enumerate(states)
        for index, value in enumerate(state[RESTORES])
    ]
    sections = (
        _tiers(daemons),
        _savings(ranks, daemons, info["page_size"]),
        _conversations(turns) if turns else Text(printable(notes.strip()) or "none yet", "dim"),
        _restores(restores[::-1][:_MAX_RESTORES]) if restores else Text("none yet", "dim"),
    )
    return Picture(
        title=printable(str(info["served_model_name"]).rstrip("/").rpartition("/")[2]),
        sections=dict(zip(SECTIONS, sections, strict=True)),
        num_requests=sum(krul["daemon"]["requests"] for krul in ranks),
    )


def plain(shown: Picture) -> RenderableType:
    """All sections one below the other, for a pipe."""
    parts = ((Rule(name, align="left"), section) for name, section in shown.sections.items())
    return Group(Text(shown.title, style="bold"), *(part for pair in parts for part in pair))


def _tiers(daemons: Iterable[Mapping[str, Any]]) -> RenderableType:
    table = _table("tier", "", "used", "of", "turns", "hit pages", "evicted", "to write", left=2)
    for krul in daemons:
        dram = {**krul, "name": DRAM_TIER, "is_silent": not krul["daemon"]["is_connected"]}
        for tier in (dram, *krul["tiers"]):
            states = [word for word in ("silent", "opening", "suspended") if tier.get(f"is_{word}")]
            table.add_row(
                Text(" ".join((tier["name"], *states)), "bold red" if states else ""),
                ProgressBar(tier["capacity_bytes"] or 1, tier["used_bytes"], width=12),
                format_bytes(tier["used_bytes"]),
                format_bytes(tier["capacity_bytes"]),
                _count(tier["num_segments"]),
                _count(krul["tier_hit_pages"].get(tier["name"], 0)),
                _count(tier["evicted_segments"]),
                format_bytes(tier["queued_bytes"]) if "queued_bytes" in tier else "-",
            )
    return table


def _savings(
    ranks: Sequence[Mapping[str, Any]], daemons: Sequence[Mapping[str, Any]], page_size: int
) -> RenderableType:
    def total(name: str, *rooms: str) -> Any:
        return sum(reduce(getitem, rooms, krul)[name] for krul in (ranks if rooms else daemons))

    plans = {name: total(name, "restore", "plans") for name in ranks[0]["restore"]["plans"]}
    hits, missed = total("hit_pages"), total("missed_pages")
    failed = total("rescued_requests", "restore", "forward")
    stored = total("num_bytes", "offload")
    exact = total("tokens", "offload") * ranks[0]["offload"]["page_bytes"] // page_size
    ratios = [krul["restore"]["forecasts"].get("median_ratio") for krul in ranks]
    took = ", ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None)
    dropped: Counter[str] = Counter()
    for krul in ranks:
        dropped.update(krul["offload"]["dropped_turns"])
    rows = {
        "compression": f"{exact / max(stored, 1):,.1f} times: {format_bytes(exact)} of KV in "
        f"{format_bytes(stored)} since the start",
        "hits": f"{_count(hits)} pages, {_count(missed)} missed ({hits / max(hits + missed, 1):.0%} hit)",
        "tokens saved": f"{_count(plans['prefix_tokens'] - plans['head_tokens'])} loaded; "
        f"{_count(plans['head_tokens'])} more recomputed in layer 0",
        "TTFT saved": f"{_seconds(plans['saved_s'])} by plan: computing these prefixes less restoring them",
        "restored": f"{_count(plans['loads'])} requests, {_count(failed)} failed"
        + (f"; took {took} of the planned time" if took else ""),
        "dropped turns": ", ".join(f"{_count(count)} {cause}" for cause, count in dropped.items()) or "none",
        "to encode": f"{_count(total('waiting_copies', 'offload'))} exact copies, "
        f"{format_bytes(total('waiting_bytes', 'offload'))}; {_count(total('pending', 'offload'))} to copy",
        "to restore": f"{_count(sum(krul['waiting_leases'] for krul in ranks))} waiting requests hold KV "
        f"or have it prefetched; {_count(total('pending', 'load'))} loads",
        "prefetched": f"{format_bytes(total('prefetch_useful_bytes'))} used, "
        f"{format_bytes(total('prefetch_wasted_bytes'))} not",
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    for name, value in rows.items():
        table.add_row(name, Text(value, "yellow" if name == "dropped turns" and dropped else ""))
    return table


def _conversations(turns: Sequence[SegmentInfo]) -> RenderableType:
    """A line for each conversation, the last used first."""
    tiers = sorted({tier for turn in turns for tier in turn.tiers})
    tenants = ["tenant"] if any(turn.tenant for turn in turns) else []
    names = ("first page", *tenants, "tokens", "turns", *tiers, "exact", "leases", "idle")
    table = _table(*names, left=1 + len(tenants))
    latest = conversations_of(turns)
    for conversation in latest[:_MAX_CONVERSATIONS]:
        table.add_row(
            printable(conversation.first_page)[:10],
            *(printable(conversation.segments[0].tenant)[:12] or "-" for _ in tenants),
            _count(conversation.num_tokens),
            str(conversation.num_turns),
            *(_held(conversation.held_bytes(tier)) for tier in tiers),
            _held(conversation.exact_copy_bytes),
            str(conversation.num_leases),
            _seconds(conversation.idle_s),
        )
    left_out = len(latest) - _MAX_CONVERSATIONS
    return Group(table, Text(f"and {left_out} more", "dim")) if left_out > 0 else table


def _restores(latest: Sequence[TracedRestore]) -> RenderableType:
    table = _table("tokens", "first/last head", "planned ms", "took ms", "load", "compute", "note", left=0)
    for restore in latest:
        note = ("load failed",) if restore.was_rescued else ("beside others",) if restore.is_mixed else ()
        table.add_row(
            _count(restore.prefix_tokens),
            f"{_count(restore.head_tokens(0))} / {_count(restore.head_tokens(restore.num_layers - 1))}",
            f"{1e3 * restore.planned_s:,.1f}",
            f"{1e3 * restore.end_s:,.1f}",
            f"{restore.load_busy:.0%}",
            f"{restore.compute_busy:.0%}",
            *note,
        )
    return table


def _table(*names: str, left: int) -> Table:
    """``left`` columns begin at the left; the others are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column, name in enumerate(names):
        table.add_column(name, justify="left" if column < left else "right", no_wrap=True)
    return table


def _held(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _count(number: float) -> str:
    """``12,345``; from a million on ``12.3M``, so that columns stay narrow."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= factor:
            return f"{number / factor:,.1f}{unit}"
    return f"{number:,}"


def _seconds(seconds: float) -> str:
    """``3.2s``, ``4m05s``, ``1h02m``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes = int(seconds // 60)
    return f"{minutes}m{int(seconds % 60):02d}s" if minutes < 60 else f"{minutes // 60:,}h{minutes % 60:02d}m"


class TopApp(App[None]):
    """Shows pictures as they come, and since when there are none.

    ``source()`` returns one, or raises CannotRunError; a thread of its own calls it, ``interval_s`` after the
    last answer.
    """

    CSS = """
    #status { height: 1; background: $panel; padding: 0 1; }
    VerticalScroll { scrollbar-size-vertical: 1; overflow-x: auto; }
    VerticalScroll Static { width: auto; min-width: 100%; height: auto; padding: 0 1; }
    VerticalScroll Static { border-top: solid $primary; }
    .-wide VerticalScroll { layout: grid; grid-size: 2; grid-rows: auto; }
    .-wide VerticalScroll Static { width: 100%; }
    """
    TITLE = "krul-sglang top"
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "Quit"), ("r", "ask", "Ask now")]
    ENABLE_COMMAND_PALETTE = False

    class Answer(Message):
        def __init__(self, answer: Picture | CannotRunError) -> None:
            super().__init__()
            self.answer = answer

    def __init__(self, source: Callable[[], Picture], *, url: str, interval_s: float) -> None:
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (150, "-wide")]
        self._source, self._url, self._interval_s = source, url, interval_s
        self._wanted = threading.Event()
        self.shown: Picture | None = None
        self._silent_since: str | None = None
        self._restarted = ""
        # Kept, not looked up: while the app ends, answers still come.
        self._status = Static("asking ...", id="status", markup=False)
        self._sections = {name: Static(id=name) for name in SECTIONS}

    def compose(self) -> ComposeResult:
        yield self._status
        for name, section in self._sections.items():
            section.border_title = name
        yield VerticalScroll(*self._sections.values())
        yield Footer()

    def on_mount(self) -> None:
        # A daemon: whoever quits does not wait for a server that is busy.
        threading.Thread(target=self._ask_again, daemon=True).start()

    def action_ask(self) -> None:
        self._wanted.set()

    def _ask_again(self) -> None:
        while self.is_running:
            answer: Picture | CannotRunError
            try:
                answer = self._source()
            except CannotRunError as error:
                answer = error
            self.post_message(self.Answer(answer))
            self._wanted.wait(self._interval_s)
            self._wanted.clear()

    def on_top_app_answer(self, message: Answer) -> None:
        now, answer = time.strftime("%H:%M:%S"), message.answer
        if isinstance(answer, CannotRunError):
            self._silent_since = self._silent_since or now
            self._status.update(
                Text(f"no answer since {self._silent_since}: {printable(str(answer))}", "bold red")
            )
            return
        if self.shown is not None and answer.num_requests < self.shown.num_requests:
            self._restarted = f", restarted before {now}"
        self.shown, self._silent_since = answer, None
        self._status.update(Text.assemble((answer.title, "bold"), f" at {self._url}, {now}{self._restarted}"))
        for name, section in answer.sections.items():
            self._sections[name].update(section)


def draw(shown: Picture, path: Path, *, url: str, size: tuple[int, int] = (110, 36)) -> None:
    """Write the view as an SVG, as a terminal of ``size`` columns and rows shows it."""
    app = TopApp(lambda: shown, url=url, interval_s=60.0)

    async def save(pilot: Pilot[object]) -> None:
        while app.shown is None:
            await pilot.pause(0.02)
        await pilot.pause()
        # Fonts of the machine that shows it: none are fetched.
        svg = re.sub(r"@font-face \{.*?\}", "", app.export_screenshot(simplify=True), flags=re.DOTALL)
        svg = svg.replace("&#160;", "\u00a0").replace("<svg ", '<svg xml:space="preserve" ', 1)
        with replacing(path) as file:
            file.write(svg.encode())
        app.exit()

    app.run(headless=True, size=size, auto_pilot=save)
