"""Python's garbage collector in a process of millions of long-lived objects."""

from __future__ import annotations

import gc


def tune_garbage_collection() -> None:
    """Keep the collector from walking the page index in the middle of a request.

    The store's millions of long-lived objects have no cycles; reference counts free what leaves. A full
    collection would stop every client for a good part of a second and find nothing, so it gets rare.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1_000)
