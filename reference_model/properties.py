"""Properties of the model's KV cache and attention that matter to cache compression."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from reference_model.evaluation_items import Item

_LAST_QUERIES = 64


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


@torch.no_grad()
def adjacent_cosine(model: LlamaForCausalLM, items: list[Item]) -> dict[str, list[float]]:
    """Cosine of K (after rotary embedding) and of V between layers l and l + 1.

    Cosines are taken per token and KV head over the 64 channels and averaged, signed and absolute; each
    list has one entry per pair of layers.
    """
    sums: dict[str, Tensor] = {}
    for item in items:
        cache = model(torch.tensor([item.ids]), use_cache=True).past_key_values
        for name, states in (
            ("k", torch.stack([layer.keys for layer in cache.layers])),
            ("v", torch.stack([layer.values for layer in cache.layers])),
        ):
            # [L, 1, 2, T, 64] -> [L - 1, 2 * T]
            cosines = torch.cosine_similarity(states[:-1].float(), states[1:].float(), dim=-1).flatten(1)
            for key, values in ((name, cosines), (f"{name}_absolute", cosines.abs())):
                sums[key] = sums.get(key, torch.zeros(len(values))) + values.mean(1)
    return {key: _rounded(value / len(items)) for key, value in sums.items()}


@torch.no_grad()
def attention_mass(model: LlamaForCausalLM, items: list[Item]) -> dict[str, dict[str, list[float]]]:
    """Share of attention on parts of each query's own causal context, per layer, averaged over heads.

    Keys: the first token, the first 10% and the last 10% of the positions the query can see. Queries:
    `last_64` are the last 64 positions (question and answer), `second_half` all positions from the middle on.
    The model must use eager attention.
    """
    sums: dict[str, dict[str, Tensor]] = {}
    for item in items:
        num_tokens = len(item.ids)
        # L times [1, 4, T, T] -> [L, T, T], averaged over heads
        attentions = model(torch.tensor([item.ids]), output_attentions=True).attentions
        mass = torch.stack([layer[0].float().mean(0) for layer in attentions])
        positions = torch.arange(num_tokens)
        tenth = (positions + 1 + 9) // 10
        is_first_tenth = positions[None, :] < tenth[:, None]
        is_last_tenth = positions[None, :] > (positions - tenth)[:, None]
        for name, start in (("last_64", num_tokens - _LAST_QUERIES), ("second_half", num_tokens // 2)):
            shares = {
                "first_token": mass[:, start:, 0],
                "first_10_percent": (mass * is_first_tenth)[:, start:].sum(-1),
                "last_10_percent": (mass * is_last_tenth)[:, start:].sum(-1),
            }
            group = sums.setdefault(name, {})
            for key, share in shares.items():
                group[key] = group.get(key, torch.zeros(len(share))) + share.mean(-1)
    return {
        name: {key: _rounded(value / len(items)) for key, value in group.items()}
        for name, group in sums.items()
    }


@contextmanager
def history_removed(model: LlamaForCausalLM, layers: list[int], item: Item) -> Iterator[None]:
    """Within the context, question and answer of `item` cannot attend to its history in `layers`."""
    num_tokens, start = len(item.ids), item.question_start
    blocked = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    blocked[start:, :start] = True
    mask = torch.zeros(1, 1, num_tokens, num_tokens, dtype=model.dtype)
    mask.masked_fill_(blocked, torch.finfo(model.dtype).min)

    def replace_mask(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "attention_mask": mask}

    handles = [
        model.model.layers[layer].self_attn.register_forward_pre_hook(replace_mask, with_kwargs=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
