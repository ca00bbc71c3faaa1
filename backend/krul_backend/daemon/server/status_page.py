"""Makes what the daemon's web page shows: its files, and what the store holds, found and missed."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web

from krul_backend.daemon.server.metrics import ReadStats
from krul_backend.errors import KrulError
from krul_backend.tiers.common.conversations import MAX_LISTED_TURNS, Conversation, conversations_of
from krul_backend.tiers.common.interface import DRAM_TIER, SegmentInfo, StoreStats, TierStats

STATUS_PATH = "/v1/status"
"""The page asks here for what it shows; only whoever has the token gets an answer."""

MAX_AGE_S = 2.0
"""An answer is given again for so long: however many ask, the store is asked once."""
MAX_CONVERSATIONS = 50
_MAX_NAME = 64
"""Characters that are shown of a tenant, a model or a codec."""

SAMPLE_S = 5.0
MAX_SAMPLES = 720
"""Hits and misses are noted so often, and kept for an hour."""

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    # Only its own files run. The server that it asks is chosen by whoever opens it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; connect-src *; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class StatusPage:
    """The page of one daemon. Its coroutines belong to one event loop; the store is asked in threads.

    Args:
        read_stats: as of ``DaemonMetrics``.
        list_segments: all of the store, see ``TieredStore.list_segments``; asked if there are few.
    """

    def __init__(self, read_stats: ReadStats, list_segments: Callable[[], list[SegmentInfo]]) -> None:
        self._read_stats = read_stats
        self._list_segments = list_segments
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=MAX_SAMPLES)
        self._asking = asyncio.Lock()
        self._status = b""
        self._status_s = 0.0

    def add_files(self, router: web.UrlDispatcher) -> None:
        """Serve the files of the page, which say nothing of this daemon: they need no token."""
        for file in files(__package__).joinpath("page").iterdir():
            kind = _KINDS.get("." + file.name.rpartition(".")[2])
            if kind is not None:
                path = "/" if file.name == "index.html" else f"/{file.name}"
                router.add_get(path, _file_handler(file.read_bytes(), kind))

    async def status(self) -> bytes:
        """JSON of what the store holds, found and missed, at most ``MAX_AGE_S`` old.

        Raises:
            KrulError: the store cannot be asked.
        """
        async with self._asking:
            if not self._status or time.monotonic() - self._status_s >= MAX_AGE_S:
                self._status = msgspec.json.encode(await asyncio.to_thread(self._read))
                self._status_s = time.monotonic()
            return self._status

    async def note_samples(self) -> None:
        """Note hits and misses again and again, until it is cancelled."""
        while True:
            try:
                store, _ = await asyncio.to_thread(self._read_stats)
                self._samples.append((time.time(), store.hit_pages, store.missed_pages))
            except KrulError:
                # The store is ending, or a tier cannot say.
                pass
            await asyncio.sleep(SAMPLE_S)

    def _read(self) -> dict[str, Any]:
        store, daemon = self._read_stats()
        num_turns = max([store.num_segments, *(tier.num_segments for tier in store.tiers)])
        is_listed = num_turns <= MAX_LISTED_TURNS
        conversations = conversations_of(self._list_segments()) if is_listed else []
        names = [DRAM_TIER, *(tier.name for tier in store.tiers)]
        return {
            "uptime_s": daemon.uptime_s,
            "sessions": daemon.num_sessions,
            "tiers": _tiers(store),
            "samples": [*self._samples, (time.time(), store.hit_pages, store.missed_pages)],
            "conversations": [_line(each, names) for each in conversations[:MAX_CONVERSATIONS]],
            "left_out": max(0, len(conversations) - MAX_CONVERSATIONS),
            "not_listed": ""
            if is_listed
            else f"not listed: {num_turns:,} turns are too many for each time, see krul-backend list",
        }


def _file_handler(content: bytes, kind: str) -> Callable[[web.Request], Any]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=_HEADERS)

    return answer


def _tiers(store: StoreStats) -> list[dict[str, Any]]:
    every: list[StoreStats | TierStats] = [store, *store.tiers]
    dram: dict[str, Any] = {"name": DRAM_TIER, "states": (), "queued_bytes": 0}
    of_tiers: list[dict[str, Any]] = [
        {
            "name": tier.name,
            "states": [word for word in ("suspended", "opening") if getattr(tier, f"is_{word}")],
            "queued_bytes": tier.queued_bytes,
        }
        for tier in store.tiers
    ]
    return [
        {
            **about,
            "capacity_bytes": tier.capacity_bytes,
            "used_bytes": tier.used_bytes,
            "turns": tier.num_segments,
            "evicted": tier.evicted_segments,
            "hit_pages": store.tier_hit_pages.get(about["name"], 0),
        }
        for about, tier in zip((dram, *of_tiers), every, strict=True)
    ]


def _line(conversation: Conversation, tiers: list[str]) -> dict[str, Any]:
    return {
        "first_page": conversation.first_page[:_MAX_NAME],
        "tenant": conversation.segments[0].tenant[:_MAX_NAME],
        "codecs": [codec[:_MAX_NAME] for codec in conversation.codecs],
        "tokens": conversation.num_tokens,
        "turns": conversation.num_turns,
        "held": {tier: conversation.held_bytes(tier) for tier in tiers},
        "exact_copy_bytes": conversation.exact_copy_bytes,
        "spent_nats": conversation.spent_nats,
        "leases": conversation.num_leases,
        "idle_s": conversation.idle_s,
    }
