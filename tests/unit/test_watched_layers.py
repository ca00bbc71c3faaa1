"""The proof of heads layer by layer: a token at other experts is none's fault, and a wrong layer is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.moe.topk import TopK

from krul_sglang.adapter import start_proof
from krul_sglang.adapter.head_attention import NoHeadsError
from krul_sglang.adapter.start_proof import Prefilled, prove_heads
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.restore import Head, HeadProof
from tests.support.head_rig import HIDDEN_SIZE, NUM_LAYERS, NUM_SLOTS, VOCAB_SIZE, Layer, Rig, fake_engine

NUM_TOKENS, NUM_EXPERTS = NUM_SLOTS // 2, 6
WITH_EXPERTS = (1, 2)
ROUTED = sum(NUM_TOKENS - NUM_TOKENS * layer // (2 * NUM_LAYERS) for layer in WITH_EXPERTS)
"""Rows of the layers with experts in the head that ``prove_heads`` recomputes."""

Mistake = Callable[[Rig], None]


class Router(TopK):  # type: ignore[misc]
    """Sends each token to its two best experts; tokens at ``elsewhere`` to the second and the third."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.elsewhere: tuple[int, ...] = ()
        self.tells = True

    def forward(self, logits: torch.Tensor, positions: torch.Tensor) -> Any:
        best = logits.topk(3).indices
        others = torch.isin(positions, torch.tensor(self.elsewhere, dtype=torch.int64))
        ids = torch.where(others[:, None], best[:, 1:], best[:, :2])
        return SimpleNamespace(topk_ids=ids) if self.tells else SimpleNamespace(ids=ids)


class ExpertsLayer(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index, writes_kv=False)
        self.gate = torch.nn.Linear(HIDDEN_SIZE, NUM_EXPERTS)
        self.router = Router()
        self.experts = torch.nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN_SIZE, HIDDEN_SIZE) / 2)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        hidden = super().forward(positions, hidden_states, forward_batch)
        chosen = self.router(self.gate(hidden), positions)
        experts = self.experts[chosen.topk_ids if self.router.tells else chosen.ids]
        output = hidden + torch.einsum("tkij,tj->ti", experts, hidden)
        return residual_batch.stream_of(forward_batch).write(output)  # type: ignore[no-any-return]


def prove(monkeypatch: pytest.MonkeyPatch, mistake: Mistake, *, tells: bool = True) -> HeadProof:
    """The proof of a model to which ``mistake`` happens after its prefill."""
    fake_engine(monkeypatch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        rig = Rig()
        for index in WITH_EXPERTS:
            rig.model.model.layers[index] = ExpertsLayer(index)
            rig.model.model.layers[index].router.tells = tells
    buffers = [rig.pool.buffers(layer) for layer in range(NUM_LAYERS)]
    pool = DevicePool(
        [k for k, _ in buffers],
        [v for _, v in buffers],
        num_tokens=NUM_SLOTS,
        write=rig.pool.write,
        scales=lambda layer: (1.0, 1.0),
    )
    slots = torch.randperm(NUM_SLOTS)[:NUM_TOKENS]

    @contextmanager
    def prefill(runner: Any, tree_cache: Any, token_ids: Sequence[int]) -> Iterator[Prefilled]:
        ids = torch.tensor(token_ids)

        def again_s(first: int) -> float:
            assert runner.prefill_cuda_graph_runner is None, "hooks do not run in a graph"
            rig.heads.run([Head(ids, slots, 0, (NUM_TOKENS,) * NUM_LAYERS)])
            mistake(rig)
            return 0.0

        yield Prefilled(ids, slots, 0.0, again_s)

    monkeypatch.setattr(start_proof, "ordinary_prefill", prefill)
    runner = SimpleNamespace(
        model=rig.model,
        model_config=SimpleNamespace(vocab_size=VOCAB_SIZE),
        dtype=torch.float32,
        prefill_cuda_graph_runner="a graph",
    )
    try:
        return prove_heads(runner, None, pool, rig.heads)
    finally:
        assert runner.prefill_cuda_graph_runner == "a graph"
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in rig.model.modules()]
        assert sum(hooks) == 0


def elsewhere(*positions: int, layer: int = 1) -> Mistake:
    def mistake(rig: Rig) -> None:
        rig.model.model.layers[layer].router.elsewhere = positions

    return mistake


def nothing(rig: Rig) -> None:
    """No mistake."""


def test_a_head_like_its_prefill_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = prove(monkeypatch, nothing)
    assert proof.routed_rows == proof.routed_alike == ROUTED
    assert proof.max_relative_error < 1e-5
    assert proof.max_output_error < 1e-5


@pytest.mark.parametrize("tells", [True, False])
def test_tokens_at_other_experts_are_no_failure(tells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = prove(monkeypatch, elsewhere(2, 11, 17), tells=tells)
    assert (proof.routed_rows, proof.routed_alike) == ((ROUTED, ROUTED - 3) if tells else (0, 0))
    # Each layer started from what the prefill gave it, so that nothing of it has come further.
    assert proof.max_relative_error < 1e-5
    assert proof.max_output_error < 1e-5


def swap_layers(rig: Rig) -> None:
    layers = rig.model.model.layers
    layers[1], layers[2] = layers[2], layers[1]
    layers[1].attn.layer_id, layers[2].attn.layer_id = 1, 2


def mix_up_experts(rig: Rig) -> None:
    rig.model.model.layers[2].experts.data = rig.model.model.layers[2].experts.data.roll(1, 0)


def spoil_some_rows(rig: Rig) -> None:
    """One expert in six: the others are right."""
    rig.model.model.layers[2].experts.data[3] *= 1.2


def attend_wrongly(rig: Rig) -> None:
    """Keys and values are right, and what is made of them is not."""
    rig.model.model.layers[0].out.weight.data *= 1.1


WRONG: dict[str, tuple[Mistake, str]] = {
    "layers swapped": (swap_layers, "K of layer 1 differs"),
    "experts mixed up": (mix_up_experts, "output of layer 2 differs"),
    "one expert spoiled": (spoil_some_rows, "output of layer 2 differs"),
    "attention": (attend_wrongly, "output of layer 0 differs"),
    "a router that sends many elsewhere": (elsewhere(*range(0, NUM_TOKENS, 4)), "25% .* other experts"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_layer_fails_the_proof(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    happens, message = WRONG[mistake]
    with pytest.raises(NoHeadsError, match=message):
        prove(monkeypatch, happens)


def test_what_a_layer_adds_is_compared_however_little_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sum with what comes from before it would be a thousandth, and pass."""

    def mistake(rig: Rig) -> None:
        out = rig.model.model.layers[0].out
        out.weight.data *= 0.5
        out.bias.data *= 0.5

    monkeypatch.setattr(torch.nn.Embedding, "forward", big(torch.nn.Embedding.forward))
    with pytest.raises(NoHeadsError, match="output of layer 0 differs"):
        prove(monkeypatch, mistake)


def big(forward: Any) -> Any:
    return lambda embedding, ids: 1000 * forward(embedding, ids)


def test_a_prefill_that_does_not_call_the_layers_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "__call__", lambda layer, *args: layer.forward(*args))
    with pytest.raises(NoHeadsError, match="one by one"):
        prove(monkeypatch, nothing)
