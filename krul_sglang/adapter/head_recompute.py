"""Recomputes heads in a forward of its own, over fewer tokens from layer to layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from krul_backend.device import Device
from krul_sglang.adapter.decoder_layers import DecoderLayers
from krul_sglang.adapter.head_attention import HeadAttention, span_attention
from krul_sglang.engine.capture import QueryCapture, unrecorded
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.span_attention import Span
from krul_sglang.engine.restore import Head


class HeadRecompute:
    """Runs heads through the engine's own layers.

    Hidden states are cut between layers as pipeline stages hand them over (sum and residual complete), so
    that the rounding of an ordinary prefill is kept.

    Raises:
        NoHeadsError: see ``DecoderLayers``.
    """

    def __init__(self, model_runner: Any, pool: DevicePool, capture: QueryCapture | None) -> None:
        self._runner = model_runner
        self._pool = pool
        self._capture = capture
        self._layers = DecoderLayers(model_runner.model, pool.num_layers)
        buffers = pool.attended(0)
        self._device = Device.of(buffers[0])
        kernel = span_attention(buffers, self._layers.some_attention(), model_runner.dtype)
        self.kernel = kernel.name
        self._attention = HeadAttention(pool, kernel, model_runner.token_to_kv_pool)

    @contextmanager
    def through(self, layers: DecoderLayers) -> Iterator[None]:
        """Run heads through these layers of the same model inside."""
        own, self._layers = self._layers, layers
        try:
            yield
        finally:
            self._layers = own

    @torch.no_grad()
    def run(self, heads: Sequence[Head], on_layer: Callable[[int], None] = lambda layer: None) -> None:
        """Recompute ``heads`` together. On every tensor-parallel rank with the same lengths.

        ``on_layer(l)`` is called before layer ``l`` is launched, and with ``num_layers`` at the end.
        """
        from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
        from sglang.srt.runtime_context import get_model

        device = self._device.torch_device
        cuts = list(_cuts(heads))
        # What differs from cut to cut on the device, in one copy for all of them.
        seq_lens = torch.split(
            self._device.from_list([length for cut in cuts for length in cut.seq_lens]),
            [len(cut.seq_lens) for cut in cuts],
        )
        token_ids = torch.cat([head.token_ids for head in heads])
        positions = torch.cat([torch.arange(head.start, head.ends[0], device=device) for head in heads])
        hidden = batch = lengths = None
        with (
            unrecorded(self._capture),
            get_model().override(shared_experts=self._runner.model.shared_experts_config),
        ):
            try:
                for cut, of_cut in zip(cuts, seq_lens, strict=True):
                    if lengths is None:
                        batch = self._forward_batch(heads, cut, of_cut, token_ids, positions)
                        residual_batch.start(batch)
                        hidden = self._layers.embed_tokens(token_ids)
                    else:
                        # rows [sum(lengths)] -> rows [sum(cut.lengths)]: the first ones of each request
                        rows = _leading_rows(lengths, cut.lengths, device)
                        proxy = residual_batch.to_pp(hidden, batch)
                        proxy = type(proxy)({name: part[rows] for name, part in proxy.tensors.items()})
                        token_ids, positions = token_ids[rows], positions[rows]
                        batch = self._forward_batch(heads, cut, of_cut, token_ids, positions)
                        hidden = self._layers.from_stage(cut.first_layer, proxy, batch)
                    lengths = cut.lengths
                    for layer in range(cut.first_layer, cut.end_layer):
                        on_layer(layer)
                        with forward_context(
                            ForwardContext(attn_backend=self._attention), forward_batch=batch
                        ):
                            hidden = self._layers.run(layer, positions, hidden, batch)
            finally:
                if batch is not None:
                    residual_batch.clear(batch)
                self._attention.clear()
        on_layer(self._pool.num_layers)

    def _forward_batch(
        self,
        heads: Sequence[Head],
        cut: _Cut,
        seq_lens: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> Any:
        """Make SGLang's batch for one cut, and plan attention over the cut's spans."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

        spans = []
        first_row = 0
        for head, length in zip(heads, cut.lengths, strict=True):
            if length:
                spans.append(Span(first_row, length, head.slots[: head.start + length]))
                first_row += length
        own_slots = torch.cat([span.slots[-span.num_tokens :] for span in spans])
        self._attention.use(spans, own_slots)
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(spans),
            input_ids=token_ids,
            # Nothing looks a request up by these: attention has its slots.
            req_pool_indices=torch.zeros_like(seq_lens),
            seq_lens=seq_lens,
            seq_lens_cpu=torch.tensor(cut.seq_lens),
            seq_lens_sum=sum(cut.seq_lens),
            # Models that write KV themselves write it there.
            out_cache_loc=own_slots,
            positions=positions,
            extend_num_tokens=first_row,
            extend_seq_lens_cpu=[span.num_tokens for span in spans],
            extend_prefix_lens_cpu=[len(span.slots) - span.num_tokens for span in spans],
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )


@dataclass(frozen=True)
class _Cut:
    """Layers ``[first_layer, end_layer)`` recompute the first ``lengths[i]`` tokens of head ``i``.

    ``seq_lens`` are the tokens of those heads that recompute any, with what is before them.
    """

    first_layer: int
    end_layer: int
    lengths: tuple[int, ...]
    seq_lens: tuple[int, ...]


def _cuts(heads: Sequence[Head]) -> Iterator[_Cut]:
    """The layers of ``heads`` in groups of equal lengths, without those that recompute nothing."""
    of_layers = [
        tuple(max(0, end - head.start) for end, head in zip(ends, heads, strict=True))
        for ends in zip(*(head.ends for head in heads), strict=True)
    ]
    first_layer = 0
    for lengths, group in groupby(of_layers):
        end_layer = first_layer + len(list(group))
        if any(lengths):
            seq_lens = (head.start + length for head, length in zip(heads, lengths, strict=True) if length)
            yield _Cut(first_layer, end_layer, lengths, tuple(seq_lens))
        first_layer = end_layer


def _leading_rows(lengths: Sequence[int], wanted: Sequence[int], device: torch.device) -> torch.Tensor:
    """Of rows laid out by ``lengths``, the first ``wanted[i]`` of each request: int64 ``[sum(wanted)]``."""
    rows = []
    first = 0
    for length, keep in zip(lengths, wanted, strict=True):
        rows.append(torch.arange(first, first + keep, device=device))
        first += length
    return torch.cat(rows)
