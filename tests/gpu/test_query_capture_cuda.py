"""Query capture inside CUDA graphs: prompts and decode steps, captured once and replayed for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from krul_sglang.engine.capture.query_capture import DECODE_INTERVAL, CapturePlan, QueryCapture
from krul_sglang.engine.capture.turn_capture import QueryShape
from tests.support.forward_builders import decode_batch, extend_batch
from tests.support.present import present

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a CUDA device")

SHAPE = QueryShape(
    num_layers=3, num_query_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, scaling=0.125
)
WIDTH = SHAPE.num_query_heads * SHAPE.head_dim
GRAPH_SIZES = (1, 4, 64, 1024)


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: None, v: None, forward_batch: None) -> torch.Tensor:
        return q * 2


class Engine:
    """Hooked modules in graphs of a few sizes; ``breaks``: each layer in a graph of its own."""

    def __init__(self, *, breaks: bool) -> None:
        self.capture = QueryCapture(SHAPE, CapturePlan(3, 32, 0), device=torch.device("cuda"))
        self.modules = [Attention() for _ in range(SHAPE.num_layers)]
        self.capture.install(self.modules)
        self.inputs = {
            size: torch.zeros(SHAPE.num_layers, size, WIDTH, dtype=SHAPE.dtype, device="cuda")
            for size in GRAPH_SIZES
        }
        # What SGLang does before it captures: nothing of this may be recorded, or allocated in the graph.
        for size in GRAPH_SIZES:
            self._run_layers(size, range(SHAPE.num_layers))
        torch.cuda.synchronize()
        parts = [[layer] for layer in range(SHAPE.num_layers)] if breaks else [range(SHAPE.num_layers)]
        self.graphs = {size: [self._captured(size, part) for part in parts] for size in GRAPH_SIZES}
        self.generator = torch.Generator().manual_seed(0)
        self.queries: dict[tuple[str, int], torch.Tensor] = {}

    def forward(self, batch: Any, tokens: Sequence[tuple[str, int]]) -> None:
        for token in tokens:
            self.queries[token] = torch.randn(SHAPE.num_layers, WIDTH, generator=self.generator).bfloat16()
        size = min(size for size in GRAPH_SIZES if size >= len(tokens))
        with self.capture.recording(batch):
            self.inputs[size].fill_(torch.nan)
            self.inputs[size][:, : len(tokens)] = torch.stack([self.queries[t] for t in tokens], 1).cuda()
            for graph in self.graphs[size]:
                graph.replay()

    def extend(self, *chunks: tuple[str, int, int, int]) -> None:
        tokens = [(rid, position) for rid, _, start, end in chunks for position in range(start, end)]
        self.forward(extend_batch(*chunks), tokens)

    def decode(self, *requests: tuple[str, int, int]) -> None:
        self.forward(decode_batch(*requests), [(rid, position) for rid, _, position in requests])

    def positions(self, rid: str, slot: int) -> list[int]:
        """Of the rows kept of a request, each of which is checked."""
        turn = present(self.capture.take(rid, slot))
        rows = present(turn.rows(10**9))
        kept: list[int] = rows.positions.tolist()
        for row, position in enumerate(kept):
            expected = self.queries[rid, position].view(SHAPE.num_layers, SHAPE.num_query_heads, -1)
            assert torch.equal(rows.queries[:, row].cpu(), expected), (rid, position)
        turn.release()
        return kept

    def _run_layers(self, size: int, layers: Sequence[int]) -> None:
        for layer in layers:
            self.modules[layer](self.inputs[size][layer], None, None, None)

    def _captured(self, size: int, layers: Sequence[int]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run_layers(size, layers)
        return graph


@pytest.mark.parametrize("breaks", [False, True])
def test_replayed_graphs_record_what_each_forward_keeps(breaks: bool) -> None:
    engine = Engine(breaks=breaks)
    engine.extend(("a", 5, 0, 900))
    engine.extend(("b", 2, 16, 20))
    engine.extend(("a", 5, 900, 950), ("c", 1, 0, 7))
    for step in range(2 * DECODE_INTERVAL):
        engine.decode(("b", 2, 20 + step), ("a", 5, 950 + step), ("c", 1, 7 + step))
    for rid, slot, prompt_end in (("a", 5, 950), ("b", 2, 20), ("c", 1, 7)):
        positions = engine.positions(rid, slot)
        assert any(position < prompt_end for position in positions)
        assert sum(position >= prompt_end for position in positions) == 2


def test_a_slot_that_is_used_again_and_a_replay_without_a_batch_mix_nothing() -> None:
    engine = Engine(breaks=False)
    engine.extend(("a", 5, 0, 40))
    engine.extend(("b", 5, 0, 30))
    assert engine.capture.take("a", 5) is None
    for graphs in engine.graphs.values():
        graphs[0].replay()
    for step in range(DECODE_INTERVAL):
        engine.decode(("b", 5, 30 + step))
    positions = engine.positions("b", 5)
    assert positions[-1] == 30 + DECODE_INTERVAL - 1
    assert positions[-2] == 29
