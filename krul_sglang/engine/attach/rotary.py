"""Reads the model's rotary embedding as a table, and checks that the table undoes it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from krul_backend.codec.rotary import RotaryTable

logger = logging.getLogger(__name__)

_CHECKED_POSITIONS = 64
_TOLERANCE = 1e-4


def read_rotary_table(model: Any) -> RotaryTable | None:
    """The table of cosines and sines with which ``model`` rotates its keys; None if it cannot be undone.

    The table is tried first: it must turn back vectors that the model's own module has rotated in float32.
    None also for a model without rotary embedding, with more than one table, or with positions that are
    not token indices (multimodal rotary embeddings).
    """
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    modules = {
        id(module): module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "rotary_emb"
    }
    if len(modules) != 1:
        logger.warning("krul: keys keep their rotary embedding: the model has %d of them", len(modules))
        return None
    module = next(iter(modules.values()))
    table = None
    if isinstance(getattr(module, "cos_sin_cache", None), torch.Tensor) and not isinstance(
        module, MRotaryEmbedding
    ):
        cos, sin = module.cos_sin_cache.float().chunk(2, dim=-1)
        table = RotaryTable(cos, sin, is_neox=module.is_neox_style)
    if table is None or not _undoes(table, module):
        logger.warning("krul: keys keep their rotary embedding: %s cannot be undone", type(module).__name__)
        return None
    return table


def _undoes(table: RotaryTable, module: Any) -> bool:
    """Whether the table undoes what the module does, up to float32 rounding."""
    num_positions = min(_CHECKED_POSITIONS, table.cos.shape[0])
    device = table.cos.device
    positions = torch.linspace(0, table.cos.shape[0] - 1, num_positions, device=device).long()
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(num_positions, 1, module.head_size, generator=generator).to(device)
    _, rotated = module.forward_native(positions, key.flatten(1), key.flatten(1))
    restored = table.unrotate(rotated.view_as(key), positions)
    return bool((restored - key).abs().max() < _TOLERANCE)
