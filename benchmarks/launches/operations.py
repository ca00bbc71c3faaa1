"""Sets up the operations that are counted, of the product's own objects, on a pool of one model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.launches.counter import DEVICE, LaunchCounter
from krul_backend.attention.rows import attention_drawn
from krul_backend.codec.layout import LayerShape
from krul_backend.codec.pairs.selectors import UnsharedSelector
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import GroupBasis, ModelBases, vector_size
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.planner.interface import RestorePlan
from krul_backend.segment import ModelIdentity
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.dram.host_store import HostStore
from krul_sglang.engine.budget.error_budget import ErrorBudget
from krul_sglang.engine.budget.provenance import KvProvenance
from krul_sglang.engine.budget.served_bases import ServedBases, TextDrift
from krul_sglang.engine.capture.query_capture import DECODE_INTERVAL, CapturedRows, CapturePlan, QueryCapture
from krul_sglang.engine.capture.turn_capture import QueryShape
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.common.span_attention import Span
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.restore.load_batch import Forecast, Load
from krul_sglang.engine.restore.loading import LayerWiseLoader
from krul_sglang.engine.restore.segment_reader import open_segments
from krul_sglang.engine.save.offload import TurnOffloader
from krul_sglang.engine.save.strategy_choice import Decision, SelectorDecision
from krul_sglang.engine.save.turn import Turn

_GROUP_LAYERS = 2
_MOST_COEFFICIENTS = 256
_MAX_POSITIONS = 2048
_QUERY_ROWS = 64
NUM_DECODING = 32
_LIMIT_NATS = 0.05


@dataclass(frozen=True)
class Shape:
    """The attention of one rank of a model; KV and queries are bf16."""

    name: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = (
    Shape("SmolLM2-135M", 30, 9, 3, 64),
    Shape("Llama-3-8B", 32, 32, 8, 128),
    Shape("Llama-3-70B, TP 8", 80, 8, 1, 128),
    Shape("Qwen3-30B-A3B", 48, 32, 4, 128),
)


def make_rotary(head_dim: int) -> RotaryTable:
    """A plain table of angles."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(_MAX_POSITIONS, dtype=torch.float64).outer(frequencies)
    return RotaryTable(angles.cos().float(), angles.sin().float(), is_neox=True)


def make_bases(shape: Shape, of_layer: LayerShape) -> ModelBases:
    """Bases of random orthogonal directions on the host: the same tensors for each group."""
    generator = torch.Generator().manual_seed(0)
    dim, heads = _GROUP_LAYERS * vector_size(of_layer), (_GROUP_LAYERS, of_layer.num_kv_heads)
    rank = min(_MOST_COEFFICIENTS, dim // 2)
    directions = torch.linalg.qr(torch.randn(dim, rank + 8, generator=generator)).Q
    tensors = {
        "mean": torch.randn(dim, generator=generator),
        "encoder": (0.1 * directions[:, :rank]).contiguous(),
        "decoder": (10 * directions[:, :rank]).T.contiguous(),
        "outside": (1e-3 * directions[:, rank:]).contiguous(),
        "shift_costs": torch.full((dim,), 1e-6),
        "magnitudes": 0.5 * 0.98 ** torch.arange(rank),
        "attention_means": torch.full(heads, -math.log(500)),
        "attention_slopes": torch.ones(heads),
        "attention_levels": torch.full(heads, 1 / math.prod(heads)),
    }
    firsts = range(0, shape.num_layers, _GROUP_LAYERS)
    return ModelBases(
        of_layer, tuple(GroupBasis(first, first + _GROUP_LAYERS, **tensors) for first in firsts)
    )


class Server:
    """The product's objects around a counted pool, in which all groups of layers share their memory."""

    def __init__(self, shape: Shape, num_tokens: int, counter: LaunchCounter) -> None:
        self.shape, self.num_tokens, self.counter = shape, num_tokens, counter
        of_layer = LayerShape(shape.num_kv_heads, shape.head_dim, shape.head_dim, torch.bfloat16)
        rotary = make_rotary(shape.head_dim)
        on_host = make_bases(shape, of_layer)
        one_group = ModelBases(of_layer, on_host.groups[:1])
        drawn = SubspaceCodec(one_group, rotary).draw(num_tokens)
        # Slots 0 to T are those of turns that are saved, the others of turns that return.
        rooms = [(torch.cat([kv.k, kv.k]), torch.cat([kv.v, kv.v])) for kv in drawn]
        on_device = [tuple(map(counter.on_device, room)) for room in rooms]
        layers = [on_device[layer % _GROUP_LAYERS] for layer in range(shape.num_layers)]
        self.pool = DevicePool(
            [k for k, _ in layers],
            [v for _, v in layers],
            num_tokens=2 * num_tokens,
            write=lambda layer, slots, k, v: None,
            scales=lambda layer: (1.0, 1.0),
        )
        self.slots = counter.on_device(torch.arange(2 * num_tokens))
        subspace = SubspaceCodec(on_host.to(DEVICE), rotary)
        self.codec = ModelCodecs(of_layer, shape.num_layers, rotary)
        self.codec.add_bases(subspace)
        self.bases = ServedBases(TextDrift("counted", 0))
        self.bases.have(subspace, "made here")
        identity = ModelIdentity(
            *("counted", "d" * 64, "bfloat16", shape.num_layers, shape.num_kv_heads),
            *(shape.head_dim, shape.head_dim, 1, 0, 1),
        )
        self.model = ServedModel(identity)
        pool_bytes = num_tokens * shape.num_layers * (of_layer.k_token_bytes + of_layer.v_token_bytes)
        self.store = TieredStore(HostStore(6 * pool_bytes + (1 << 20)), ())
        self.loader = LayerWiseLoader(self.store, self.pool, TransferGate(), patience_s=600.0)
        self.capture = QueryCapture(
            QueryShape(
                *(shape.num_layers, shape.num_query_heads, shape.num_kv_heads, shape.head_dim),
                *(torch.bfloat16, shape.head_dim**-0.5),
            ),
            CapturePlan(NUM_DECODING, _QUERY_ROWS, 0),
            device=DEVICE,
        )
        self.token_ids = np.arange(num_tokens, dtype=np.int64)
        self._num_turns = 0

    def close(self) -> None:
        self.loader.close()
        self.store.close()

    def budget(self) -> ErrorBudget:
        """What stores turns in bases."""
        no_prober: Any = None
        provenance = KvProvenance(2 * self.num_tokens, self.pool.streams, self.loader.batch, torch.empty(0))
        return ErrorBudget(
            limit=_LIMIT_NATS,
            probe_share=0.0,
            store=self.store,
            provenance=provenance,
            model=self.model,
            pool=self.pool,
            codec=self.codec,
            bases=self.bases,
            prober=no_prober,
        )

    def plain(self) -> SelectorDecision:
        """What stores turns as they are."""
        agreement = RankAgreement(None, 1)
        return SelectorDecision(UnsharedSelector(), self.codec, self.pool, agreement, num_heads=0)

    def keys(self) -> list[str]:
        """Those of the pages of another conversation."""
        self._num_turns += 1
        return [f"{self._num_turns}/{page}" for page in range(self.num_tokens)]

    def prompt_and_answer(self) -> CapturedRows:
        """What was captured of a turn: rows of its prompt."""
        q = self.queries(self.num_tokens)
        with self.capture.recording(batch("extend", [("turn", 0, 0, self.num_tokens)])):
            for layer in range(self.shape.num_layers):
                self.capture.record(layer, q)
        rows = self.capture.take("turn", 0)
        assert rows is not None
        return rows

    def queries(self, num_rows: int) -> torch.Tensor:
        """Of one layer and so many tokens: on the device."""
        width = self.shape.num_query_heads * self.shape.head_dim
        return self.counter.on_device(torch.randn(num_rows, width).bfloat16())

    def save(self, decision: Decision, *, is_observed: bool = False) -> Callable[[], None]:
        """Returns what stores a turn, and encodes it."""
        attention = self.prompt_and_answer() if is_observed else None
        offloader = TurnOffloader(
            self.store, self.model.identity.page_size, self.pool, self.codec, decision, keeps_copies=False
        )
        self._saved = self.keys()
        turn = Turn(
            self._saved,
            self.token_ids,
            self.slots[: self.num_tokens],
            [],
            attention,
            model=self.model.identity,
        )

        def store_turn() -> None:
            offloader.submit(turn)
            offloader.wait()
            if not offloader.pop_completed() or offloader.counters.failed_encodings:
                raise RuntimeError("the turn was not stored")
            offloader.close()

        return store_turn

    def restore(self, codec: str) -> Callable[[], None]:
        """Returns what brings the turn back that was saved last."""
        identity = self.model.identity
        lease = self.store.lease(identity, self._saved, self.token_ids)
        if lease is None or lease.slices[0].header.codec_params["codec"] != codec:
            raise RuntimeError(f"the turn was not stored with codec {codec}")
        readers = open_segments(lease, self.codec, self.num_tokens)
        plan = RestorePlan((0,) * self.shape.num_layers, 1.0)
        slots = self.slots[self.num_tokens :]
        load = Load(lease, readers, slots, 0, plan, Forecast(0.0, 0.0, 0.0))

        def bring_back() -> None:
            index = self.loader.start({"turn": load})
            loaded = self.loader.batch(index)
            assert loaded is not None
            for layer in range(self.shape.num_layers):
                loaded.wait_layer(layer)
            self.loader.finish(index)
            self.loader.discard_all()

        return bring_back

    def statistics(self) -> Callable[[], None]:
        """Returns what measures the attention that a turn draws."""
        attention, slots = self.prompt_and_answer(), self.slots[: self.num_tokens]

        def measure() -> None:
            rows = attention.rows(self.num_tokens)
            assert rows is not None
            attention_drawn(rows, lambda layer: self.pool.gather_keys(layer, slots), 0, self.num_tokens)
            attention.release()

        return measure

    def replay(self) -> Callable[[], None]:
        """Returns what a CUDA graph of a decode step contains of the capture: it runs in every step."""
        q = self.queries(NUM_DECODING)

        def record() -> None:
            with self.counter.capturing():
                for layer in range(self.shape.num_layers):
                    self.capture.record(layer, q)

        return record

    def heads(self) -> Callable[[], None]:
        """Returns what krul does for heads of all tokens in all layers, beside the model's own layers."""
        from krul_sglang.adapter.head_attention import HeadAttention, PagedAttention

        shape, q, k = self.shape, self.queries(self.num_tokens), self.pool.buffers(0)[0]
        layers = [
            SimpleNamespace(
                layer_id=layer,
                tp_q_head_num=shape.num_query_heads,
                tp_k_head_num=shape.num_kv_heads,
                tp_v_head_num=shape.num_kv_heads,
                qk_head_dim=shape.head_dim,
                v_head_dim=shape.head_dim,
                scaling=shape.head_dim**-0.5,
            )
            for layer in range(shape.num_layers)
        ]
        kernel = PagedAttention(self.pool.streams, self.counter.flash_attention)
        attention, slots = HeadAttention(self.pool, kernel, None), self.slots[: self.num_tokens]

        def recompute() -> None:
            attention.use([Span(0, self.num_tokens, slots)], slots)
            for layer in layers:
                attention.forward(q, k[: self.num_tokens], k[: self.num_tokens], layer)
            attention.clear()

        return recompute

    def decode_step(self, *, is_kept: bool) -> Callable[[], None]:
        """Returns what captures of a decode step, one of those that are kept or one of the others."""
        requests = [(f"request {place}", place, 0, 16) for place in range(NUM_DECODING)]
        with self.capture.recording(batch("extend", requests)):
            pass
        q, step = self.queries(NUM_DECODING), [(rid, slot, 16, 17) for rid, slot, _, _ in requests]
        for _ in range(DECODE_INTERVAL - 1 if is_kept else 0):
            with self.capture.recording(batch("decode", step)):
                pass

        def decode() -> None:
            with self.capture.recording(batch("decode", step)):
                for layer in range(self.shape.num_layers):
                    self.capture.record(layer, q)
            self.capture._decode_steps = 0
            for rid, slot, _, _ in requests:
                self.capture.forget(rid, slot)

        return decode


def batch(mode: str, requests: Sequence[tuple[str, int, int, int]]) -> Any:
    """What captures ask of SGLang's ``ScheduleBatch``; ``(rid, slot, start, end)`` of each request."""
    forward_mode = SimpleNamespace(
        is_decode=lambda: mode == "decode", is_extend_without_speculative=lambda: mode == "extend"
    )
    return SimpleNamespace(
        forward_mode=forward_mode,
        reqs=[SimpleNamespace(rid=rid) for rid, _, _, _ in requests],
        req_pool_indices_cpu=torch.tensor([slot for _, slot, _, _ in requests]),
        seq_lens_cpu=torch.tensor([end for _, _, _, end in requests]),
        prefix_lens=[start for _, _, start, _ in requests],
        extend_lens=[end - start for _, _, start, end in requests],
        decoding_reqs=None,
    )
