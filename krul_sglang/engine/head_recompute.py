"""Recomputing the heads of layers: a forward of its own, shorter from layer to layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from krul_sglang.engine.head_attention import HeadAttention, HeadSpan
from krul_sglang.engine.kv_pool import DevicePool
from krul_sglang.engine.turn_capture import TurnCapture
from krul_sglang.engine.unsupported import UnsupportedSetupError


@dataclass(frozen=True, eq=False)
class Head:
    """What is recomputed of one request.

    ::

        [0, start)            in the pool: attended to, not touched
        [start, ends[l])      recomputed in layer l and written to its slots
        [ends[l], ...)        not touched in layer l: loads write there meanwhile

    ``token_ids`` (int64 ``[ends[0] - start]``) are the tokens from ``start`` on, ``slots`` (int64
    ``[ends[0]]``) where the KV of the tokens from 0 on lies, both on the pool's device. ``ends`` never grow.
    """

    token_ids: torch.Tensor
    slots: torch.Tensor
    start: int
    ends: tuple[int, ...]

    def part(self, first: int, end: int) -> Head | None:
        """Tokens ``[first, end)`` of the head, counted from its start; None if it has none of them.

        Parts run one after another: each attends to the parts before it in the pool.
        """
        begin, stop = self.start + first, min(self.start + end, self.ends[0])
        if begin >= stop:
            return None
        ends = tuple(min(max(layer_end, begin), stop) for layer_end in self.ends)
        return Head(self.token_ids[first : stop - self.start], self.slots[:stop], begin, ends)


class HeadRecompute:
    """Runs heads through the engine's own layers.

    Hidden states are cut between layers as pipeline stages hand them over (sum and residual complete), so
    that the rounding of an ordinary prefill is kept.

    Raises:
        UnsupportedSetupError: a model whose layers are not called as those of Llama are.
    """

    def __init__(self, model_runner: Any, pool: DevicePool, capture: TurnCapture | None) -> None:
        self._runner = model_runner
        self._pool = pool
        self._capture = capture
        self._stack = _layer_stack(model_runner.model, pool.num_layers)
        self._attention = HeadAttention(pool)

    @torch.no_grad()
    def run(self, heads: Sequence[Head], on_layer: Callable[[int], None] = lambda layer: None) -> None:
        """Recompute ``heads`` together. On every tensor-parallel rank with the same lengths.

        ``on_layer(l)`` is called before layer ``l`` is launched, and with ``num_layers`` at the end.
        """
        from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
        from sglang.srt.runtime_context import get_model

        lengths = [head.ends[0] - head.start for head in heads]
        token_ids = torch.cat([head.token_ids for head in heads])
        positions = torch.cat(
            [torch.arange(head.start, head.ends[0], device=self._pool.device) for head in heads]
        )
        batch = self._forward_batch(heads, lengths, token_ids, positions)
        suspended: AbstractContextManager[None] = (
            nullcontext() if self._capture is None else self._capture.suspended()
        )
        with suspended, get_model().override(shared_experts=self._runner.model.shared_experts_config):
            try:
                residual_batch.start(batch)
                hidden = self._stack.embed_tokens(token_ids)
                for layer in range(self._pool.num_layers):
                    wanted = [max(0, head.ends[layer] - head.start) for head in heads]
                    if not any(wanted):
                        break
                    on_layer(layer)
                    if wanted != lengths:
                        # rows [total of lengths] -> rows [total of wanted]: the first ones of each request
                        rows = _leading_rows(lengths, wanted, self._pool.device)
                        proxy = residual_batch.to_pp(hidden, batch)
                        proxy = type(proxy)({name: part[rows] for name, part in proxy.tensors.items()})
                        token_ids, positions = token_ids[rows], positions[rows]
                        lengths = wanted
                        batch = self._forward_batch(heads, lengths, token_ids, positions)
                        hidden = self._stack.layers[layer].attn_boundary.from_pp(proxy, batch)
                    with forward_context(ForwardContext(attn_backend=self._attention), forward_batch=batch):
                        hidden = self._stack.layers[layer](positions, hidden, batch)
            finally:
                residual_batch.clear(batch)
                self._attention.spans = ()
        on_layer(self._pool.num_layers)

    def _forward_batch(
        self, heads: Sequence[Head], lengths: Sequence[int], token_ids: torch.Tensor, positions: torch.Tensor
    ) -> Any:
        """What layers want to know of a forward of ``lengths`` tokens of each request; sets the spans."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

        spans = []
        first_row = 0
        for head, length in zip(heads, lengths, strict=True):
            if length:
                past, slots = head.slots[: head.start], head.slots[head.start : head.start + length]
                spans.append(HeadSpan(first_row, length, past, slots))
                first_row += length
        self._attention.spans = spans
        seq_lens = torch.tensor([len(span.past_slots) + span.num_tokens for span in spans])
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(spans),
            input_ids=token_ids,
            # Nothing looks a request up by these: attention has its slots.
            req_pool_indices=torch.zeros(len(spans), dtype=torch.int64, device=self._pool.device),
            seq_lens=seq_lens.to(self._pool.device),
            seq_lens_cpu=seq_lens,
            seq_lens_sum=int(seq_lens.sum()),
            out_cache_loc=torch.cat([span.slots for span in spans]),
            positions=positions,
            extend_num_tokens=first_row,
            extend_seq_lens_cpu=[span.num_tokens for span in spans],
            extend_prefix_lens_cpu=[len(span.past_slots) for span in spans],
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )


def _leading_rows(lengths: Sequence[int], wanted: Sequence[int], device: torch.device) -> torch.Tensor:
    """Of rows laid out by ``lengths``, the first ``wanted[i]`` of each request: int64 ``[sum(wanted)]``."""
    rows = []
    first = 0
    for length, keep in zip(lengths, wanted, strict=True):
        rows.append(torch.arange(first, first + keep, device=device))
        first += length
    return torch.cat(rows)


def _layer_stack(model: Any, num_layers: int) -> Any:
    """The module with ``embed_tokens`` and ``layers`` of a causal language model."""
    from sglang.srt.layers.radix_attention import RadixAttention

    stack: Any = getattr(model, "model", None)
    layers = getattr(stack, "layers", None)
    if not hasattr(stack, "embed_tokens") or layers is None or len(layers) != num_layers:
        raise _unsupported(model, "has no stack of decoder layers that krul knows")
    for layer in layers:
        parameters = list(inspect.signature(layer.forward).parameters)
        if parameters[:3] != ["positions", "hidden_states", "forward_batch"] or not hasattr(
            getattr(layer, "attn_boundary", None), "from_pp"
        ):
            raise _unsupported(model, f"has layers of another kind ({type(layer).__name__})")
    for module in stack.modules():
        if isinstance(module, RadixAttention) and (
            module.logit_cap or module.sliding_window_size > 0 or module.is_cross_attention
        ):
            raise _unsupported(model, "has attention with soft caps, windows or an encoder")
    return stack


def _unsupported(model: Any, what: str) -> UnsupportedSetupError:
    return UnsupportedSetupError(
        f"--radix-cache-backend krul: heads of {type(model).__name__} cannot be recomputed, it {what}; "
        'start with planner = "full-load" to load whole prefixes'
    )
