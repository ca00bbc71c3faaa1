"""Calls the decoder layers of SGLang's models one by one, as each family of models calls its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from krul_sglang.adapter.head_attention import NoHeadsError


def _run_plain(layer: Any, positions: torch.Tensor, hidden: Any, batch: Any) -> Any:
    return layer(positions, hidden, batch)


def _run_latent(layer: Any, positions: torch.Tensor, hidden: Any, batch: Any) -> Any:
    """Layers of DeepSeek V2 and its descendants: latent KV, and scratch memory that the model hands on."""
    from sglang.srt.layers.layer_boundary import get_attn_tp_context
    from sglang.srt.utils import BumpAllocator

    scratch = BumpAllocator(_SCRATCH_SIZE, torch.float32, positions.device)
    with get_attn_tp_context().maybe_input_scattered(batch):
        left = layer(positions, hidden, batch, scratch)
    # Those of some models also return what an index has chosen.
    return left[0] if type(left) is tuple else left


_SCRATCH_SIZE = 2
"""Numbers of scratch memory that SGLang's DeepSeek model gives to each layer."""

_FAMILIES: dict[tuple[str, ...], Callable[..., Any]] = {(): _run_plain, ("zero_allocator",): _run_latent}
"""Maps the arguments that a layer requires after positions, hidden states and batch to a function that calls
it."""


class DecoderLayers:
    """The decoder layers of a causal language model. Hidden states carry their residual as SGLang's do.

    Raises:
        NoHeadsError: layers of no known family, or attention that krul cannot compute.
    """

    def __init__(self, model: Any, num_layers: int) -> None:
        self._stack: Any = getattr(model, "model", None)
        layers = getattr(self._stack, "layers", None)
        if not hasattr(self._stack, "embed_tokens") or layers is None or len(layers) != num_layers:
            raise NoHeadsError("it has no stack of decoder layers that krul knows")
        self._layers = layers
        self._run = [_family_of(layer) for layer in layers]
        if getattr(self._stack, "llama_4_scaling_config", None) is not None:
            raise NoHeadsError("it scales queries by position")
        for module in self._attention():
            if module.logit_cap or module.sliding_window_size > 0 or module.is_cross_attention:
                raise NoHeadsError("it has attention with soft caps, windows or an encoder")

    def embed_tokens(self, token_ids: torch.Tensor) -> Any:
        """Hidden states before the first layer."""
        return self._stack.embed_tokens(token_ids)

    def from_stage(self, layer: int, proxy: Any, batch: Any) -> Any:
        """Hidden states before ``layer``, as it takes them from an earlier pipeline stage."""
        return self._layers[layer].attn_boundary.from_pp(proxy, batch)

    def run(self, layer: int, positions: torch.Tensor, hidden: Any, batch: Any) -> Any:
        """Hidden states after ``layer``."""
        return self._run[layer](self._layers[layer], positions, hidden, batch)

    def some_attention(self) -> Any:
        """Some attention module: all have the shapes of their pool."""
        return next(self._attention())

    def _attention(self) -> Iterator[Any]:
        from sglang.srt.layers.radix_attention import RadixAttention

        return (module for module in self._stack.modules() if isinstance(module, RadixAttention))


def _family_of(layer: Any) -> Callable[..., Any]:
    parameters = list(inspect.signature(layer.forward).parameters.values())
    names = [parameter.name for parameter in parameters[:3]]
    needed = tuple(
        parameter.name
        for parameter in parameters[3:]
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    )
    run = _FAMILIES.get(needed)
    has_stages = hasattr(getattr(layer, "attn_boundary", None), "from_pp")
    if names != ["positions", "hidden_states", "forward_batch"] or not has_stages or run is None:
        raise NoHeadsError(f"it has layers of another kind ({type(layer).__name__})")
    return run
