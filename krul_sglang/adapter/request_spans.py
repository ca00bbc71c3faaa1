"""Adds krul's spans to the traces of requests, on a server that traces them (``--enable-trace``)."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang.srt.observability.trace import (
    TraceSliceContext,
    get_global_tracing_enabled,
    trace_set_thread_info,
)

logger = logging.getLogger(__name__)

MAX_WATCHED = 4096
"""Requests of which it is known when they were looked up; the oldest are forgotten."""

_WHOLE, _PART = 1, 2
"""Levels of spans, as SGLang has them: ``SGLANG_TRACE_LEVEL`` says up to which there are any."""


@dataclass(slots=True)
class _Watched:
    """``context`` is SGLang's, for another thread; None until a load is planned."""

    looked_up_ns: int
    planned_ns: int = 0
    context: Any = None


class RequestSpans:
    """Makes spans of the restores and saves of one rank, by SGLang's own tracing, on a thread of its own.

    Each has a span of that thread around it, as SGLang's have. Scheduler and storing thread only note times.
    """

    @classmethod
    def if_traced(cls, tp_rank: int) -> RequestSpans | None:
        """None if this server traces nothing."""
        return cls(tp_rank) if get_global_tracing_enabled() else None

    def __init__(self, tp_rank: int) -> None:
        self._watched: OrderedDict[str, _Watched] = OrderedDict()
        self._has_failed = False
        self._thread = ThreadPoolExecutor(
            1, "krul-spans", initializer=partial(trace_set_thread_info, "krul", tp_rank)
        )

    def look_up(self, req: Any) -> None:
        """SGLang's request ``req`` is looked up, in this round again. For the scheduler's thread."""
        if req.rid not in self._watched:
            self._watched[req.rid] = _Watched(time.time_ns())
            if len(self._watched) > MAX_WATCHED:
                self._watched.popitem(last=False)

    def plan(self, req: Any) -> None:
        """A load is planned for it."""
        watched = self._watched.get(req.rid)
        if watched is not None:
            watched.planned_ns = time.time_ns()
            watched.context = req.time_stats.trace_ctx.copy_for_thread()

    def restored(self, begin_ns: int, restore: Mapping[str, Any]) -> None:
        """A batch was restored, whose times (``RestoreTrace.as_dict``) count from ``begin_ns`` on."""
        for request in restore["requests"]:
            watched = self._watched.pop(request["rid"], None)
            if watched is not None and watched.context is not None and watched.context.tracing_enable:
                self._submit(self._add_restore, watched, begin_ns, restore, request)

    def saving(self, req: Any, num_tokens: int) -> Callable[[Future[bool]], None]:
        """A turn of ``req`` waits to be stored; call what is returned when that has ended."""
        context, begin_ns = req.time_stats.trace_ctx.copy_for_thread(), time.time_ns()

        def end(done: Future[bool]) -> None:
            if context.tracing_enable:
                is_stored = not done.cancelled() and done.result()
                attributes = {"krul.tokens": num_tokens, "krul.is_stored": is_stored}
                self._submit(self._add, context, "krul save", begin_ns, time.time_ns(), attributes)

        return end

    def _submit(self, add: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            try:
                add(*args)
            except Exception:
                if not self._has_failed:
                    self._has_failed = True
                    logger.exception("krul: spans cannot be added to traces; this is not logged again")

        # The server may be ending.
        with suppress(RuntimeError):
            self._thread.submit(run)

    def _add_restore(
        self, watched: _Watched, begin_ns: int, restore: Mapping[str, Any], request: Mapping[str, Any]
    ) -> None:
        streams = restore["streams"]
        spans = [
            ("krul lookup", watched.looked_up_ns, watched.planned_ns),
            *_span_of("krul load", begin_ns, streams["load"]),
            *_span_of("krul heads", begin_ns, streams["head"]),
        ]
        attributes = {
            "krul.device_tokens": request["device_tokens"],
            "krul.restored_tokens": request["restored_tokens"],
            "krul.first_layer_head_tokens": request["head_ends"][0] - request["device_tokens"],
            "krul.tiers": request["tiers"],
            "krul.planned_ms": 1e3 * request["planned_s"],
            "krul.forward_waited_ms": 1e3 * sum(end - begin for _, begin, end in streams["wait"]),
            "krul.requests": len(restore["requests"]),
            "krul.load_failed": restore["was_rescued"],
        }
        end_ns = begin_ns + int(1e9 * restore["end_s"])
        self._add(watched.context, "krul restore", watched.looked_up_ns, end_ns, attributes, spans)

    def _add(
        self,
        context: Any,
        name: str,
        begin_ns: int,
        end_ns: int,
        attributes: dict[str, Any],
        parts: Iterable[tuple[str, int, int]] = (),
    ) -> None:
        """A span of the trace of ``context``, with parts in it."""
        context.rebuild_thread_context(begin_ns)
        context.trace_slice_start(name, _WHOLE, begin_ns)
        for part, first_ns, last_ns in parts:
            context.trace_slice(TraceSliceContext(part, first_ns, last_ns, level=_PART))
        context.trace_slice_end(name, _WHOLE, end_ns, attributes)
        context.abort(end_ns)


def _span_of(name: str, begin_ns: int, parts: Iterable[Any]) -> list[tuple[str, int, int]]:
    """From the begin of the first part of a stream to the end of the last one; nothing if it has none."""
    times = [(begin, end) for _, begin, end in parts]
    if not times:
        return []
    first_s, last_s = min(begin for begin, _ in times), max(end for _, end in times)
    return [(name, begin_ns + int(1e9 * first_s), begin_ns + int(1e9 * last_s))]
