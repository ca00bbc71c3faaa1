"""What was computed on top of moved KV counts as moved, whatever becomes of the moved KV itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from krul_backend.device import Device
from krul_sglang.engine.budget.provenance import KvProvenance
from tests.support.forward_builders import Mode

NUM_SLOTS = 40


class Pool:
    """Requests in rows of SGLang's table, and forwards that compute their next tokens."""

    def __init__(self) -> None:
        self.rows = torch.zeros((2, NUM_SLOTS), dtype=torch.int32)
        self.loads: dict[str, Any] = {}
        batch = SimpleNamespace(loads=self.loads, is_abandoned=False)
        self.provenance = KvProvenance(NUM_SLOTS, Device(torch.device("cpu")), lambda index: batch, self.rows)

    def forward(self, mode: str, *spans: tuple[int, int, list[int]]) -> None:
        """Compute tokens from a given one on of some rows, into these slots."""
        for row, start, slots in spans:
            self.rows[row, start : start + len(slots)] = torch.tensor(slots, dtype=torch.int32)
        batch = SimpleNamespace(
            forward_mode=Mode(mode),
            hicache_consumer_index=0,
            out_cache_loc=torch.tensor([slot for *_, slots in spans for slot in slots]),
            prefix_lens=[start for _, start, _ in spans],
            extend_lens=[len(slots) for *_, slots in spans],
            # Drafted tokens that are verified are not counted yet.
            seq_lens=torch.tensor(
                [start + (0 if mode == "verify" else len(slots)) for _, start, slots in spans]
            ),
            req_pool_indices=torch.tensor([row for row, *_ in spans]),
        )
        self.provenance.after_forward(batch)
        self.loads.clear()

    def load_moved(self, row: int, start: int, slots: list[int], num_head: int) -> None:
        """Bring a moved run back, of which the first tokens are computed, with the next forward."""
        self.rows[row, start : start + len(slots)] = torch.tensor(slots, dtype=torch.int32)
        tensor = torch.tensor(slots)
        self.loads["r"] = SimpleNamespace(
            slots=tensor, tail_slots=lambda layer: tensor[num_head:], moved=True, readers=()
        )

    def first_moved(self, row: int, num_tokens: int) -> int | None:
        return self.provenance.first_moved(self.rows[row, :num_tokens].long())


@pytest.fixture
def pool() -> Pool:
    """Row 0: 4 tokens, a run of 8 of which 2 are computed, then 3 new ones. Row 1: 15 tokens of its own."""
    pool = Pool()
    pool.forward("extend", (0, 0, [0, 1, 2, 3]))
    pool.load_moved(0, 4, [4, 5, 6, 7, 8, 9, 10, 11], num_head=2)
    pool.forward("extend", (0, 12, [12, 13, 14]), (1, 0, list(range(20, 35))))
    return pool


def test_what_is_computed_on_a_moved_run_is_moved(pool: Pool) -> None:
    assert pool.first_moved(0, 15) == 6
    assert pool.first_moved(0, 6) is None
    assert pool.first_moved(1, 15) is None
    pool.forward("decode", (0, 15, [15]), (1, 15, [35]))
    assert pool.first_moved(1, 16) is None
    # The same tokens were computed by another request too, and the tree keeps that one's slots.
    pool.rows[0, :12] = pool.rows[1, :12]
    assert pool.first_moved(0, 12) is None
    assert pool.first_moved(0, 16) == 12
    pool.forward("decode", (0, 16, [16]))
    pool.rows[0, :16] = pool.rows[1, :16]
    assert pool.first_moved(0, 17) == 16


def test_a_prompt_in_chunks_stays_moved_and_slots_are_exact_again_for_others(pool: Pool) -> None:
    pool.forward("extend", (0, 15, [15, 16]))
    pool.rows[0, :15] = pool.rows[1, :15]
    assert pool.first_moved(0, 17) == 15
    pool.forward("extend", (1, 0, [12, 13, 14, 15, 16]))
    assert pool.first_moved(1, 5) is None


def test_drafted_tokens_on_a_moved_run_are_moved(pool: Pool) -> None:
    """All of them lie in the slots of the request then: SGLang moves those that it accepts among these."""
    # Only the last token before them is moved still.
    pool.rows[0, :14] = pool.rows[1, :14]
    pool.forward("verify", (0, 15, [15, 16, 17]), (1, 15, [35, 36, 37]))
    assert pool.first_moved(1, 18) is None
    pool.rows[0, :15] = pool.rows[1, :15]
    assert pool.first_moved(0, 18) == 15


def test_a_forward_that_verifies_does_not_load_again_what_its_prompt_has_loaded(pool: Pool) -> None:
    """SGLang's batch keeps the number of that load."""
    pool.load_moved(1, 4, [24, 25, 26, 27], num_head=0)
    pool.forward("verify", (1, 15, [35, 36, 37]))
    assert pool.first_moved(1, 18) is None
