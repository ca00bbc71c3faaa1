"""Compares decoder layers with a prefill one by one: each is given the hidden states that it had there."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from krul_sglang.adapter.decoder_layers import DecoderLayers
from krul_sglang.adapter.head_attention import NoHeadsError

_MAX_ROUTED_ELSEWHERE = 1 / 8
"""Largest share of a layer's tokens that may go to other experts than in the prefill. Where the scores of two
experts are nearly equal, a rounding decides. A router that is computed wrongly sends nearly all elsewhere."""


@dataclass(frozen=True, eq=False)
class LayerOutputs:
    """How the layers' outputs in a replay differ from those of the prefill.

    ``errors`` ``[layer, token]`` are of what enters each layer, NaN where nothing does. ``elsewhere`` is 1
    where the layer chose other experts, 0 where the same, NaN where that is not known.
    """

    errors: torch.Tensor
    elsewhere: torch.Tensor
    has_experts: Sequence[bool]

    def compare(self, allowed: float) -> tuple[float, int, int]:
        """The largest error, of how many rows the experts are known, and how many of these had the same ones.

        The error of a layer is the 99th percentile of its rows; ``allowed`` is the largest one that passes.
        Rows with other experts than in the prefill are left out, and so are rows that are wrong in a layer
        with experts of which nothing is known.

        Raises:
            NoHeadsError: an error is larger, or too many rows are left out.
        """
        largest = 0.0
        for layer, errors in enumerate(self.errors):
            entered = ~errors.isnan()
            left_out = torch.zeros_like(entered)
            if layer and self.has_experts[layer - 1]:
                other = self.elsewhere[layer - 1]
                left_out = entered & ((other == 1) | (other.isnan() & (errors > allowed)))
            share = float(left_out.sum() / entered.sum())
            kept = errors[entered & ~left_out]
            error = float(kept.quantile(0.99)) if len(kept) else torch.inf
            if not error <= allowed or share > _MAX_ROUTED_ELSEWHERE:
                raise NoHeadsError(
                    "they are not what a prefill computes: "
                    + (f"the output of layer {layer - 1}" if layer else "the embedding")
                    + f" differs by {error:.3g}, and {share:.0%} of its tokens went to other experts"
                )
            largest = max(largest, error)
        known = self.elsewhere[~self.elsewhere.isnan()]
        return largest, len(known), int((known == 0).sum())


class WatchedLayers(DecoderLayers):
    """Decoder layers that have seen a prefill, and compare what they compute later with it.

    ::

        prefill    x0 -> layer 0 -> x1 -> layer 1 -> x2 -> ...       all x are kept, on the host
        replay     x0 -> layer 0 -> x1'
                                    x1 -> layer 1 -> x2'             x1' is compared with x1, x2' with x2, ...

    So a token that a router sends to another expert, because of a rounding, differs in the output of that one
    layer, and in nothing that comes after it.
    """

    def __init__(self, model_runner: Any, num_layers: int, num_tokens: int) -> None:
        """``num_tokens``: of the prefill, whose first position is 0."""
        super().__init__(model_runner.model, num_layers)
        self._runner = model_runner
        self._num_tokens = num_tokens
        self._entering: list[dict[str, torch.Tensor]] = [{} for _ in range(num_layers)]
        self._experts: list[torch.Tensor | None] = [None] * num_layers
        self._chosen: torch.Tensor | None = None
        self._outputs = LayerOutputs(torch.empty(0), torch.empty(0), ())

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Keep what the engine's own forward inside hands from layer to layer.

        It runs without a graph, and changes nothing but that sums over ranks are completed between layers.

        Raises:
            NoHeadsError: it did not call the layers.
        """
        graphs = self._runner.prefill_cuda_graph_runner
        with ExitStack() as stack:
            for index, layer in enumerate(self._layers):
                hooks = (
                    layer.register_forward_pre_hook(self._keeper(index, layer), with_kwargs=True),
                    layer.register_forward_hook(lambda *args, index=index: self._keep_experts(index)),
                )
                for hook in hooks:
                    stack.callback(hook.remove)
            stack.enter_context(self._seeing_experts())
            stack.callback(setattr, self._runner, "prefill_cuda_graph_runner", graphs)
            self._runner.prefill_cuda_graph_runner = None
            yield
        if not all(self._entering):
            raise NoHeadsError("a prefill does not call its layers one by one")

    @contextmanager
    def replay(self) -> Iterator[LayerOutputs]:
        """Compare what ``run`` computes inside with the prefill."""
        unknown = torch.full((len(self._layers), self._num_tokens), torch.nan)
        has_experts = [bool(_routers(layer)) for layer in self._layers]
        self._outputs = LayerOutputs(unknown, unknown.clone(), has_experts)
        with self._seeing_experts():
            yield self._outputs

    def run(self, layer: int, positions: torch.Tensor, hidden: Any, batch: Any) -> Any:
        """Hidden states after ``layer`` if it starts from those of the prefill."""
        from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

        rows = positions.cpu()
        wanted = {name: part[rows] for name, part in self._entering[layer].items()}
        hidden, found = _complete(hidden, batch)
        # [n, hidden size]: what entered the layer before, so that only what that layer has added counts
        before = sum(part[rows].float() for part in self._entering[layer - 1].values()) if layer else 0.0
        self._outputs.errors[layer, rows] = _errors(found, wanted, before)
        if layer:
            given = {name: part.to(positions.device) for name, part in wanted.items()}
            hidden = self.from_stage(layer, PPProxyTensors(given), batch)
        hidden = super().run(layer, positions, hidden, batch)
        known, chosen = self._experts[layer], self._take_chosen(len(rows))
        if known is not None and chosen is not None:
            self._outputs.elsewhere[layer, rows] = (known[rows] != chosen).any(1).float()
        return hidden

    def _keeper(self, index: int, layer: Any) -> Any:
        signature = inspect.signature(layer.forward)

        def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = signature.bind(*args, **kwargs)
            of_layer = given.arguments
            hidden, found = _complete(of_layer["hidden_states"], of_layer["forward_batch"])
            of_layer["hidden_states"] = hidden
            # The model adds to these in place. Of a large model they would take hundreds of MiB of a GPU.
            self._entering[index] = {
                name: part.detach().clone().cpu()[: self._num_tokens] for name, part in found.items()
            }
            return given.args, given.kwargs

        return keep

    def _keep_experts(self, index: int) -> None:
        self._experts[index] = self._take_chosen(self._num_tokens)

    @contextmanager
    def _seeing_experts(self) -> Iterator[None]:
        """Note what the routers inside choose."""

        def note(router: Any, args: tuple[Any, ...], output: Any) -> None:
            chosen = getattr(output, "topk_ids", None)
            # Their order is that of their scores, or none.
            self._chosen = None if chosen is None else chosen.sort(-1).values.cpu()

        with ExitStack() as stack:
            for layer in self._layers:
                for router in _routers(layer):
                    stack.callback(router.register_forward_hook(note).remove)
            yield

    def _take_chosen(self, num_rows: int) -> torch.Tensor | None:
        """The experts that the layer which just ran has chosen ``[num_rows, k]``; None if it did not say."""
        chosen, self._chosen = self._chosen, None
        return None if chosen is None or len(chosen) < num_rows else chosen[:num_rows]


def _routers(layer: Any) -> list[Any]:
    from sglang.srt.layers.moe.topk import TopK

    return [module for module in layer.modules() if isinstance(module, TopK)]


def _complete(hidden: Any, batch: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """``hidden`` with its sums over ranks complete, and its parts as pipeline stages hand them over."""
    from sglang.srt.layers.layer_boundary.residual import batch as residual_batch

    hidden, residual = residual_batch.stream_of(batch).export(hidden)
    parts = {"hidden_states": hidden}
    return hidden, parts if residual is None else {**parts, "residual": residual}


def _errors(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], before: torch.Tensor | float
) -> torch.Tensor:
    """``[n]``: how far each row's largest part is off, relative to what one layer has added to it.

    What entered the layer is ``before``, ``[n, hidden size]``. It is much larger than what is added: a
    wrong layer would hardly change the sum; and the sum is rounded, which is no error of the layer.
    """
    if found.keys() != wanted.keys():
        return torch.full((len(wanted["hidden_states"]),), torch.inf)
    errors = []
    for name, part in wanted.items():
        holds_sum = name == "residual" or len(wanted) == 1
        added = part.float() - before if holds_sum else part.float()
        difference = (found[name].cpu().float() - part.float()).norm(dim=1)
        rounding = torch.finfo(part.dtype).eps * part.float().norm(dim=1)
        errors.append((difference - rounding).clamp_min(0) / added.norm(dim=1).clamp_min(1e-6))
    return torch.stack(errors).amax(0)
