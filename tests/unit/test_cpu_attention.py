"""The attention backend of the CPU platform against SGLang's ``torch_native``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_sglang.adapter.platforms.cpu_attention import CpuAttention, DraftSteps, branch_rows, decode_groups
from krul_sglang.engine.common import span_attention

NUM_SLOTS = 256
HEAD_DIM = 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class Case:
    """A batch of requests whose tokens lie anywhere in a pool, and both backends over pools of their own.

    ``lengths``: of each request, its tokens in the pool and its new ones.
    """

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        num_kv_heads: int = 2,
        group: int = 2,
        value_dim: int = HEAD_DIM,
        dtype: torch.dtype = torch.float32,
        pool_dtype: torch.dtype | None = None,
        window: int = -1,
    ) -> None:
        from sglang.srt.layers.radix_attention import AttentionType

        self.generator = torch.Generator().manual_seed(len(lengths))
        self.lengths = lengths
        self.dtype = dtype
        self.num_q_heads, self.num_kv_heads, self.value_dim = num_kv_heads * group, num_kv_heads, value_dim
        seq_lens = [num_cached + num_new for num_cached, num_new in lengths]
        rows = torch.zeros(len(lengths) + 1, max(seq_lens) + 3, dtype=torch.int32)
        self.request_rows = torch.arange(len(lengths)).flip(0) + 1
        slots = torch.randperm(NUM_SLOTS, generator=self.generator).int() + 1
        own = []
        for row, seq_len, (num_cached, _) in zip(self.request_rows, seq_lens, lengths, strict=True):
            rows[row, :seq_len], slots = slots[:seq_len], slots[seq_len:]
            own.append(rows[row, num_cached:seq_len].long())
        self.req_to_token = rows
        self.own_slots = torch.cat(own)
        self.past = [self.random(NUM_SLOTS + 16, num_kv_heads, dim) for dim in (HEAD_DIM, value_dim)]
        self.pool_dtype = dtype if pool_dtype is None else pool_dtype
        self.layer = SimpleNamespace(
            layer_id=0,
            tp_q_head_num=self.num_q_heads,
            tp_k_head_num=num_kv_heads,
            tp_v_head_num=num_kv_heads,
            qk_head_dim=HEAD_DIM,
            v_head_dim=value_dim,
            scaling=0.3,
            k_scale=None,
            v_scale=None,
            k_scale_float=None,
            v_scale_float=None,
            is_cross_attention=False,
            attn_type=AttentionType.DECODER,
            sliding_window_size=window,
        )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def pool(self) -> Any:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        pool = MHATokenToKVPool(
            size=NUM_SLOTS,
            page_size=16,
            dtype=self.pool_dtype,
            head_num=self.num_kv_heads,
            head_dim=HEAD_DIM,
            v_head_dim=self.value_dim,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        for buffer, rows in zip((pool.k_buffer[0], pool.v_buffer[0]), self.past, strict=True):
            buffer.copy_(rows.to(self.pool_dtype).view(buffer.dtype))
        return pool

    def outputs(self, *, decode: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Of ``torch_native`` and of krul's backend; checks that both leave the same KV in their pools."""
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        cached, new = ([pair[i] for pair in self.lengths] for i in (0, 1))
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            req_pool_indices=self.request_rows,
            seq_lens=torch.tensor(cached) + torch.tensor(new),
            extend_prefix_lens=torch.tensor(cached),
            extend_seq_lens=torch.tensor(new),
            out_cache_loc=self.own_slots,
            encoder_lens=None,
        )
        q = self.random(len(self.own_slots), self.num_q_heads * HEAD_DIM)
        k = self.random(len(self.own_slots), self.num_kv_heads, HEAD_DIM)
        v = self.random(len(self.own_slots), self.num_kv_heads, self.value_dim)
        outputs, pools = [], []
        for kind in (TorchNativeAttnBackend, CpuAttention):
            runner = self.runner()
            backend = kind(runner)
            backend.init_forward_metadata(batch)
            forward = backend.forward_decode if decode else backend.forward_extend
            outputs.append(forward(q.clone(), k.clone(), v.clone(), self.layer, batch))
            pools.append(runner.token_to_kv_pool)
        for native, own in zip(*([*pool.k_buffer, *pool.v_buffer] for pool in pools), strict=True):
            assert torch.equal(native.view(torch.uint8), own.view(torch.uint8))
        return outputs[0], outputs[1]

    def runner(self) -> Any:
        return SimpleNamespace(
            device="cpu",
            dtype=self.dtype,
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
            token_to_kv_pool=self.pool(),
        )

    def drafted(self, num_steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each step that decodes a request's drafted tokens one after another: as SGLang has it, with the
        length of the request alone, and as if the drafted ones were its own."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        runner = self.runner()
        steps, plain, outputs = DraftSteps(runner, num_steps), CpuAttention(runner), []
        cached = torch.tensor([num_cached for num_cached, _ in self.lengths])
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=self.request_rows,
            seq_lens=cached,
            encoder_lens=None,
        )
        steps.init_forward_metadata(batch)
        for step, backend in enumerate(steps.attn_backends):
            q = self.random(len(cached), self.num_q_heads * HEAD_DIM)
            own = SimpleNamespace(**{**vars(batch), "seq_lens": cached + step + 1})
            plain.init_forward_metadata(own)
            of_step = (backend, batch), (plain, own)
            ours, theirs = (
                attention.forward_decode(q, None, None, self.layer, seen) for attention, seen in of_step
            )
            outputs.append((ours, theirs))
        return outputs

    def verified(self, trees: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of new tokens that see what ``trees`` (bool ``[batch, n, n]``) say, within the layer's window: by
        the definition of attention, and by krul's backend."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        num_drafted, window = trees.shape[1], self.layer.sliding_window_size
        batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            req_pool_indices=self.request_rows,
            seq_lens=torch.tensor([num_cached for num_cached, _ in self.lengths]),
            out_cache_loc=self.own_slots,
            encoder_lens=None,
            spec_info=SimpleNamespace(draft_token_num=num_drafted, custom_mask=trees.flatten()),
        )
        q = self.random(len(self.own_slots), self.num_q_heads, HEAD_DIM)
        k = self.random(len(self.own_slots), self.num_kv_heads, HEAD_DIM)
        v = self.random(len(self.own_slots), self.num_kv_heads, self.value_dim)
        runner = self.runner()
        backend = CpuAttention(runner)
        backend.init_forward_metadata(batch)
        own = backend.forward_extend(q.flatten(1), k, v, self.layer, batch)
        buffers = runner.token_to_kv_pool.k_buffer[0], runner.token_to_kv_pool.v_buffer[0]
        defined = []
        of_requests = zip(self.request_rows, self.lengths, trees, q.split(num_drafted), strict=True)
        for row, (num_cached, _), tree, queries in of_requests:
            sees = torch.cat([tree.new_ones(num_drafted, num_cached), tree], dim=1)
            positions = torch.cat([torch.arange(num_cached), sees.sum(dim=1) - 1])
            if window > 0:
                sees &= positions[num_cached:, None] - positions <= window
            slots = self.req_to_token[row, : len(positions)].long()
            # [T, Hkv, D] -> [T, Hq, D]
            group = self.num_q_heads // self.num_kv_heads
            keys, values = (buffer[slots].repeat_interleave(group, dim=1) for buffer in buffers)
            scores = torch.einsum("qhd,thd->qth", queries, keys) * self.layer.scaling
            shares = scores.masked_fill(~sees[:, :, None], -torch.inf).softmax(1)
            defined.append(torch.einsum("qth,thd->qhd", shares, values).flatten(1))
        return torch.cat(defined), own


@settings(max_examples=150)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=4),
    decode=st.booleans(),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    value_dim=st.sampled_from([HEAD_DIM, 8]),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
)
def test_results_equal_those_of_torch_native(
    lengths: list[tuple[int, int]],
    decode: bool,
    num_kv_heads: int,
    group: int,
    value_dim: int,
    dtype: torch.dtype,
) -> None:
    if decode:
        lengths = [(num_cached, 1) for num_cached, _ in lengths]
    case = Case(lengths, num_kv_heads=num_kv_heads, group=group, value_dim=value_dim, dtype=dtype)
    native, own = case.outputs(decode=decode)
    assert own.dtype == native.dtype
    torch.testing.assert_close(own, native, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_branches_of_drafts_follow_their_request() -> None:
    requests = torch.stack([torch.arange(20), torch.arange(100, 120)])
    rows, lengths = branch_rows(requests, [3, 5], 2, 4)
    assert lengths == [3, 3, 5, 5]
    of_branches = ((0, 3, 3), (0, 3, 7), (100, 5, 5), (100, 5, 9))
    for row, (first, length, start) in zip(rows.tolist(), of_branches, strict=True):
        slots = [*range(length), *range(start, start + 4)]
        assert row[: length + 4] == [first + slot for slot in slots]
    assert torch.equal(requests[0], torch.arange(20)), "SGLang's own table is not changed"


def test_each_drafted_token_sees_those_before_it() -> None:
    outputs = Case([(5, 3), (17, 3)]).drafted(3)
    for ours, theirs in outputs:
        torch.testing.assert_close(ours, theirs)
    assert len({tuple(ours.flatten().tolist()) for ours, _ in outputs}) == 3


@settings(max_examples=60)
@given(
    cached=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    num_drafted=st.integers(1, 6),
    window=st.sampled_from([-1, 1, 3, 20]),
    data=st.data(),
)
def test_drafted_tokens_see_their_request_and_their_path(
    cached: list[int], num_drafted: int, window: int, data: st.DataObject
) -> None:
    trees = torch.eye(num_drafted, dtype=torch.bool).repeat(len(cached), 1, 1)
    for tree in trees:
        for node in range(1, num_drafted):
            tree[node] |= tree[data.draw(st.integers(0, node - 1))]
    defined, own = Case([(num_cached, num_drafted) for num_cached in cached], window=window).verified(trees)
    torch.testing.assert_close(own, defined, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decode", [False, True])
def test_a_pool_of_fp8(decode: bool) -> None:
    case = Case([(20, 1), (7, 1)], dtype=torch.bfloat16, pool_dtype=torch.float8_e5m2)
    native, own = case.outputs(decode=decode)
    torch.testing.assert_close(own, native, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("decode", [False, True])
def test_a_window_equals_torch_native(decode: bool) -> None:
    """Without the window the results would differ: the test checks that, too."""
    lengths = [(30, 1), (25, 1), (2, 1)] if decode else [(30, 9), (0, 25), (2, 1)]
    windowed, own = Case(lengths, window=4).outputs(decode=decode)
    torch.testing.assert_close(own, windowed, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(own, Case(lengths).outputs(decode=decode)[1], atol=1e-2)


def test_an_extend_computes_no_more_rows_than_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[int, int]] = []
    original = span_attention._attend

    def counted(output: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *args: Any) -> None:
        computed.append((len(q), len(k)))
        original(output, q, k, *args)

    monkeypatch.setattr(span_attention, "_attend", counted)
    _, own = Case([(50, 3), (40, 2)]).outputs(decode=False)
    assert len(own) == 5
    assert computed == [(3, 53), (2, 42)]


@given(seq_lens=st.lists(st.integers(1, 64), min_size=1, max_size=12))
def test_groups_hold_each_request_once_and_little_padding(seq_lens: list[int]) -> None:
    rows = torch.arange(len(seq_lens) * 64).view(len(seq_lens), 64)
    seen = []
    for group in decode_groups(rows, seq_lens, torch.float32):
        longest = group.slots.shape[1]
        for row, slots, index in zip(group.rows.tolist(), group.slots, range(len(group.rows)), strict=True):
            seen.append(row)
            length = seq_lens[row]
            assert slots[:length].tolist() == rows[row, :length].tolist()
            assert set(slots[length:].tolist()) <= {int(rows[row, length - 1])}
            assert longest <= 2 * length
            if group.bias is None:
                assert length == longest
            else:
                assert group.bias[index, 0, 0].isneginf().tolist() == [p >= length for p in range(longest)]
    assert sorted(seen) == list(range(len(seq_lens)))
