"""Conversations whose pages, tokens and bytes follow from their names: nothing must be kept to check them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from krul_backend.segment import ModelIdentity, SegmentManifest

PAGE_SIZE = 16
NUM_LAYERS = 3
TOKEN_BYTES = 512
"""Stored bytes of a token in the first layer; the others have a little more, for sizes of all kinds."""


def model_of(engine: int) -> ModelIdentity:
    """Engines have models of their own: when one forgets its model, the others keep theirs."""
    return ModelIdentity(f"crash-{engine}", "0" * 8, "bfloat16", NUM_LAYERS, 2, 64, 64, PAGE_SIZE, 0, 1)


@dataclass(frozen=True)
class Turn:
    """Pages ``[first_page, end_page)`` of a conversation, stored as one segment."""

    conversation: str
    first_page: int
    end_page: int

    @property
    def keys(self) -> tuple[str, ...]:
        return page_keys(self.conversation, self.first_page, self.end_page)

    @property
    def layer_num_bytes(self) -> tuple[int, ...]:
        num_tokens = (self.end_page - self.first_page) * PAGE_SIZE
        return tuple(num_tokens * TOKEN_BYTES + 7 * layer for layer in range(NUM_LAYERS))

    def block(self, layer: int) -> npt.NDArray[np.uint8]:
        """What layer ``layer`` holds, uint8 ``[layer_num_bytes[layer]]``."""
        rng = np.random.Generator(np.random.Philox(_number(f"{self}/{layer}")))
        return rng.integers(0, 256, self.layer_num_bytes[layer], dtype=np.uint8)

    def manifest(self, model: ModelIdentity) -> SegmentManifest:
        keys = self.keys
        return SegmentManifest(
            model=model,
            page_keys=keys,
            parent_key=page_keys(self.conversation, self.first_page - 1, self.first_page)[0]
            if self.first_page
            else None,
            start_token=self.first_page * PAGE_SIZE,
            token_ids=tokens_of(keys),
            codec="raw",
            layer_num_bytes=self.layer_num_bytes,
            # Read back to know which turn a found segment is.
            codec_params={"turn": [self.conversation, self.first_page, self.end_page]},
        )


def page_keys(conversation: str, first: int, end: int) -> tuple[str, ...]:
    return tuple(hashlib.sha256(f"{conversation}/{page}".encode()).hexdigest() for page in range(first, end))


def tokens_of(keys: tuple[str, ...]) -> npt.NDArray[np.int64]:
    pages = [np.arange(PAGE_SIZE) + int(key[:6], 16) for key in keys]
    return np.concatenate([np.zeros(0), *pages]).astype(np.int64)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
