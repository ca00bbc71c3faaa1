"""What the protocol bounds, whatever the message."""

from __future__ import annotations

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 64 << 20
MAX_PAGES = 1_000_000
MAX_LAYERS = 1024
MAX_LISTED_SEGMENTS = 10_000
MAX_MODELS = 64
"""The daemon knows as many of a session, those that said hello last; a client counts on half of them."""
