"""Models whose layers are similar by construction, made from a Llama-like model: controls for sharing.

They say whether a selector finds similar layers and what sharing then costs. They are no evidence that the
layers of ordinary models are similar.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from krul_backend.errors import KrulError

COPY_SCALE = 0.55
"""Weight of each copy's two updates of the residual stream: one copy alone would have 1, and the second copy
reads a stream that the first has already moved, so the value that keeps the function best lies above 1/2."""


class VariantError(KrulError):
    """A variant that cannot be made of this model, or an unknown name."""


def make_variant(model: Any, name: str) -> Any:
    """The model that ``name`` asks for, made of a Llama-like ``model``, which is left as it is.

    ``depth-doubled``: see ``depth_doubled``. ``rotated:ANGLE``: depth-doubled, and in each second copy the
    basis of keys and values is rotated by ANGLE degrees, which leaves the function as it is and multiplies
    the cosine between the two copies' KV by about ``cos(ANGLE)``.

    Raises:
        VariantError: an unknown name, an angle that is no number, or a model that cannot be changed so.
    """
    kind, _, angle = name.partition(":")
    if kind == "depth-doubled" and not angle:
        return depth_doubled(model)
    if kind == "rotated":
        try:
            degrees = float(angle)
        except ValueError:
            raise VariantError(f"rotated:ANGLE needs an angle in degrees, got {angle!r}") from None
        doubled = depth_doubled(model)
        rotate_bases(doubled, math.radians(degrees), range(1, doubled.config.num_hidden_layers, 2))
        return doubled
    raise VariantError(f"variant {name!r} is unknown (accepted: depth-doubled, rotated:ANGLE)")


def depth_doubled(model: Any, scale: float = COPY_SCALE) -> Any:
    """A model in which layer k of ``model`` stands twice, as layers 2k and 2k + 1.

    The output projections of attention and MLP of both copies are multiplied by ``scale``. Of the first layer
    the first copy stays as it is and the second adds nothing: there the stream moves so much that two halves
    do not make a whole (on the bundled model, value NLL 0.01 this way and 0.30 with halves).
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers *= 2
    if getattr(config, "layer_types", None):
        config.layer_types = [kind for kind in config.layer_types for _ in range(2)]
    doubled = copy.deepcopy(model)
    doubled.config = doubled.model.config = config
    layers = [copy.deepcopy(layer) for layer in model.model.layers for _ in range(2)]
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index
        layer.self_attn.config = config
        factor = (1.0, 0.0)[index] if index < 2 else scale
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            for parameter in projection.parameters():
                parameter.data *= factor
    doubled.model.layers = nn.ModuleList(layers)
    return doubled


def rotate_bases(model: Any, angle: float, layers: Iterable[int]) -> None:
    """Rotates the basis of keys and values in ``layers`` by ``angle`` radians, in place; logits stay.

    Channels c and c + D/2 of a head form a plane. In keys and queries that is a plane of the rotary
    embedding, whose own rotation commutes with this one, so that attention scores stay; in values the
    output projection takes the rotation back.

    Raises:
        VariantError: for a model that normalises queries and keys per head, where scores would change.
    """
    for index in layers:
        attention = model.model.layers[index].self_attn
        if hasattr(attention, "q_norm") or hasattr(attention, "k_norm"):
            raise VariantError("the bases of a model with query and key norms cannot be rotated")
        head_dim = attention.head_dim
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight.data = _rotated_rows(projection.weight.data, angle, head_dim)
            if projection.bias is not None:
                projection.bias.data = _rotated_rows(projection.bias.data, angle, head_dim)
        weight = attention.o_proj.weight.data
        attention.o_proj.weight.data = _rotated_rows(weight.T, angle, head_dim).T.contiguous()


def _rotated_rows(rows: Tensor, angle: float, head_dim: int) -> Tensor:
    """``rows [heads * head_dim, ...]`` with channels c and c + head_dim / 2 of each head rotated."""
    # [heads, 2, head_dim / 2, ...]
    planes = rows.double().view(-1, 2, head_dim // 2, *rows.shape[1:])
    first, second = planes.unbind(1)
    cosine, sine = math.cos(angle), math.sin(angle)
    rotated = torch.stack((cosine * first - sine * second, sine * first + cosine * second), dim=1)
    return rotated.flatten(0, 2).to(rows.dtype)
