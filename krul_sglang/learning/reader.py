"""Reads text with a Hugging Face model: its attention, and gradients that weigh errors in its KV."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache, LinearAttentionAndFullAttentionLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from krul_backend.attention.rows import QueryRows, attention_drawn, sample_positions
from krul_backend.codec.layout import LayerKV, ReadLayer
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.learning import LearningText
from krul_sglang.learning import model_kv

logger = logging.getLogger(__name__)

_NAME = "krul_capture"

OnLayer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""``(layer, queries [R, H, D], keys [T, Hkv, D], values [T, Hkv, D], scaling)`` of the first sequence."""


@contextmanager
def observed_attention(model: Any, on_layer: OnLayer) -> Iterator[None]:
    """Within this context, ``on_layer`` is called with what each layer's attention reads. The model computes
    as before.

    For models that take their attention from the library's registry (Llama, Qwen2, Qwen3), with any
    implementation. Queries and keys carry rotary embedding and norm; keys and values include the cache's.
    """
    before = model.config._attn_implementation

    def observe(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        # Each [1, heads, tokens, D] -> [tokens, heads, D].
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        on_layer(module.layer_idx, q, k, v, options["scaling"])
        # The plain implementation is no entry of the registry: each model's file has its own.
        plain = sys.modules[type(module).__module__].eager_attention_forward
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(before, plain)
        return attend(module, query, key, value, mask, **options)

    # Without a mask function of its own, an implementation is given no mask at all.
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[before])
    AttentionInterface.register(_NAME, observe)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@dataclass(frozen=True, eq=False)
class History:
    """The KV of a text, ``layers`` as a server's pool holds it, and ``attention [L, Hkv, T]``; see
    ``GroupBasis.token_worth``. All of it on the host. For latent KV, of which servers record no attention,
    that is 1 everywhere."""

    layers: Sequence[LayerKV]
    attention: torch.Tensor


class States(tuple[torch.Tensor, ...]):
    """The states that a layer without KV has after a history: of its convolution, of its recurrence."""


@dataclass(frozen=True, eq=False)
class ReadText:
    """A text that was read: its ``history``, and the tokens ``after`` it, which the model predicts there.

    ``before``: what each of the model's layers has of the history, its KV or its states. ``inputs``: of the
    tokens after it the hidden states ``[N, any]`` at the entrance of each of these layers and behind the last
    one; none without such tokens. All of it on the host.
    """

    history: History
    after: Sequence[int]
    before: Sequence[LayerKV | States]
    inputs: Sequence[torch.Tensor]


class TextReader:
    """Reads with a model of the Llama, Qwen2 or Qwen3 family, or one of ``LATENT_MODELS`` or
    ``HYBRID_MODELS``, whose parameters need no gradients.

    Of models that see images the text is read. It goes through the model layer by layer, each time with all
    texts, so that one layer at a time needs to be there. The ``num_layers`` that bases are learned of are
    numbered as in a pool; ``layer_ids`` are their numbers in the model. What the others hand on, states or
    windows, is always the truth, as it is stored.

    ``load_layer``: gives a layer's module on the model's device, of a model that is here without
    its layers; None if it has them. Between layers hidden states lie on the host.

    ``query_rows``: queries of a text by which the attention that its tokens draw is measured.
    """

    def __init__(
        self, model: Any, *, query_rows: int = 256, load_layer: Callable[[int], Any] | None = None
    ) -> None:
        self._model = model
        self._base = base = model_kv.text_model(model)
        self._query_rows = query_rows
        self._load_layer = base.layers.__getitem__ if load_layer is None else load_layer
        config = base.config
        self._num_model_layers: int = config.num_hidden_layers
        self._with_kv = model_kv.layers_with_kv(config)
        self.layer_ids = model_kv.pool_layers(config)
        self.num_layers = len(self.layer_ids)
        self.shape = model_kv.kv_shape(config)
        self.is_latent = model_kv.is_latent(config)
        self.rotary: RotaryTable | None = None
        if config.model_type not in model_kv.BARE_MODELS:
            on_device = model_kv.rotary_table(model, config.max_position_embeddings)
            self.rotary = RotaryTable(on_device.cos.cpu(), on_device.sin.cpu(), is_neox=on_device.is_neox)
        model.requires_grad_(False)

    def read_histories(self, texts: Sequence[Sequence[int]]) -> list[History]:
        """The KV of texts as a server's pool would hold it, and the attention that their tokens draw."""
        return [read.history for read in self.read([(ids, ()) for ids in texts])]

    @torch.no_grad()
    def read(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[ReadText]:
        """Read the first tokens of each text, and then the others, which see the first ones as a server's
        pool would hold them.

        Raises:
            ValueError: a text without first tokens.
        """
        if not all(history for history, _ in texts):
            raise ValueError("a text without tokens cannot be read")
        hidden = [self._embedded(ids) for ids, _ in texts]
        inputs = [[self._embedded(after)] if after else [] for _, after in texts]
        before: list[list[Any]] = [[] for _ in texts]
        attention: list[list[torch.Tensor]] = [[] for _ in texts]
        for layer in range(self._num_model_layers):
            read_layer = self._read_layer if layer in self._with_kv else self._read_states
            with self._only(layer):
                for number, (_, after) in enumerate(texts):
                    hidden[number], found, drawn = read_layer(hidden[number])
                    before[number].append(found)
                    attention[number].append(drawn)
                    if after:
                        inputs[number].append(self._after(found, inputs[number][-1]).cpu())
            logger.info("read layer %d of %d", layer + 1, self._num_model_layers)
        histories = [
            History(
                [of_text[layer] for layer in self.layer_ids],
                torch.cat([drawn[layer] for layer in self.layer_ids]),
            )
            for of_text, drawn in zip(before, attention, strict=True)
        ]
        return [
            ReadText(history, after, of_text, entered)
            for history, (_, after), of_text, entered in zip(histories, texts, before, inputs, strict=True)
        ]

    def _read_states(self, hidden: torch.Tensor) -> tuple[torch.Tensor, States, torch.Tensor]:
        """Read a text through a layer without KV: as ``_read_layer``, with its states, and no attention."""
        cache = _cache_of_states(())
        left = self._passed(hidden, cache).cpu()
        (layer,) = cache.layers
        states = (*layer.conv_states.values(), *layer.recurrent_states.values())
        return left, States(state.cpu() for state in states if state is not None), torch.empty(0)

    def _read_layer(self, hidden: torch.Tensor) -> tuple[torch.Tensor, LayerKV, torch.Tensor]:
        """What leaves the layer that is here when the hidden states of a text enter it; its KV, and the
        attention ``[1, Hkv, T]`` that its tokens draw there. All of it on the host."""
        taken: list[Any] = []
        cache = DynamicCache()
        with observed_attention(self._base, lambda *of_layer: taken.append(of_layer)):
            left = self._passed(hidden, cache).cpu()
        (layer,) = cache.layers
        kv = model_kv.from_cache(self._base.config, layer.keys.cpu(), layer.values.cpu())
        if self.is_latent:
            return left, kv, torch.ones(1, 1, len(kv.k))
        ((_, queries, keys, _, scaling),) = taken
        num_tokens, num_heads, _ = queries.shape
        positions = sample_positions(0, num_tokens, self._query_rows)
        kv_heads = torch.arange(num_heads) // (num_heads // keys.shape[1])
        rows = QueryRows(queries[positions.to(queries.device)][None], positions, kv_heads, scaling)
        return left, kv, attention_drawn(rows, lambda _: keys, 0, num_tokens).cpu()

    def to_learn(self, texts: Sequence[ReadText], seeds: Sequence[int]) -> Iterator[list[LearningText]]:
        """What bases are learned from, of each text one layer after the other, the last layer first. Each has
        tokens after its history; its seed draws the predicted tokens.
        """
        with self._only(None):
            gradients = [self._of_predictions(text, seed) for text, seed in zip(texts, seeds, strict=True)]
        for layer in reversed(range(self._num_model_layers)):
            found = []
            with self._only(layer):
                for number, text in enumerate(texts):
                    before, entering = text.before[layer], self._leaf(text.inputs[layer])
                    leaves: LayerKV | None = None
                    if layer in self.layer_ids:
                        kv = text.history.layers[self.layer_ids.index(layer)]
                        before = leaves = LayerKV(self._leaf(kv.k.float()), self._leaf(kv.v.float()))
                    left, gradient = self._after(before, entering), gradients[number]
                    torch.autograd.backward(left, gradient.to(left.device))
                    gradients[number] = _gradient(entering).cpu()
                    if leaves is not None:
                        found.append(self._weighed(text.history, self.layer_ids.index(layer), leaves))
            logger.info("weighed errors in layer %d of %d", layer + 1, self._num_model_layers)
            if found:
                yield found

    def _weighed(self, history: History, layer: int, leaves: LayerKV) -> LearningText:
        """Return what is learned from a layer with KV, whose ``leaves`` have their gradients."""
        kv, positions = history.layers[layer], torch.arange(len(leaves.k))
        keys, k, v = kv.k, _gradient(leaves.k).cpu(), _gradient(leaves.v).cpu()
        if self.rotary is not None:
            keys, k = self.rotary.unrotate(keys, positions), self.rotary.pull_back(k, positions)
        attention = history.attention[layer : layer + 1]
        return LearningText([LayerKV(keys, kv.v)], [LayerKV(k, v)], attention)

    @torch.no_grad()
    def divergences(self, texts: Sequence[tuple[ReadText, ReadLayer]]) -> list[float]:
        """Of each text: predict the tokens after its history, and the same tokens after another one, both
        layer by layer. Returns the KL divergence of these predictions, in nats per token."""
        hidden = [self._embedded(text.after) for text, _ in texts for _ in range(2)]
        for layer in range(self._num_model_layers):
            befores = []
            for text, replaced in texts:
                own, is_replaced = text.before[layer], layer in self.layer_ids
                befores += [own, replaced(self.layer_ids.index(layer)) if is_replaced else own]
            with self._only(layer):
                pairs = zip(befores, hidden, strict=True)
                hidden = [self._after(before, entering).cpu() for before, entering in pairs]
        found = []
        with self._only(None):
            for true, other in zip(hidden[::2], hidden[1::2], strict=True):
                expected, changed = (self._logits(each).double().log_softmax(-1) for each in (true, other))
                found.append(float(F.kl_div(changed, expected, reduction="batchmean", log_target=True)))
        return found

    def _of_predictions(self, text: ReadText, seed: int) -> torch.Tensor:
        """The gradients ``[N, any]`` of a sample of a text's predictions with respect to what enters the
        model's end."""
        entering = self._leaf(text.inputs[-1])
        log_probabilities = self._logits(entering).float().log_softmax(-1)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.multinomial(log_probabilities.detach().exp().cpu(), 1, generator=generator)
        chosen = log_probabilities.gather(1, drawn.to(log_probabilities.device))
        (chosen.sum() / len(text.after) ** 0.5).backward()
        return _gradient(entering).cpu()

    def _leaf(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on the model's device that gets gradients."""
        return values.detach().to(self._model.device, copy=True).requires_grad_()

    def _embedded(self, ids: Sequence[int]) -> torch.Tensor:
        """What enters the first layer, on the host: ``[T, any]``."""
        of_model = torch.tensor(list(ids), device=self._model.device)
        entering: torch.Tensor = self._model.get_input_embeddings()(of_model)
        return entering.cpu()

    def _after(self, before: LayerKV | States, hidden: torch.Tensor) -> torch.Tensor:
        """What leaves the layer that is here when ``hidden [T, any]`` enters it, after the KV or the states
        ``before``."""
        if not isinstance(before, States):
            return self._passed(hidden, model_kv.dynamic_cache(self._base, [before]))
        copies = [state.to(self._model.device, copy=True) for state in before]
        return self._passed(hidden, _cache_of_states(copies))

    def _passed(self, hidden: torch.Tensor, cache: Any) -> torch.Tensor:
        """The same after what the layer's ``cache`` has, to which the KV of ``hidden`` is added."""
        entering = hidden.to(self._model.device)[None]
        passed = self._base(inputs_embeds=entering, past_key_values=cache, use_cache=True)
        left: torch.Tensor = passed.last_hidden_state[0]
        return left

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, V]``, of what leaves the last layer."""
        passed = self._model(inputs_embeds=hidden.to(self._model.device)[None], use_cache=False)
        logits: torch.Tensor = passed.logits[0]
        return logits

    @contextmanager
    def _only(self, layer: int | None) -> Iterator[None]:
        """Within this context the model is this one layer without the end; or only the end, if None."""
        base, config = self._base, self._base.config
        layers, types = base.layers, getattr(config, "layer_types", None)
        last_norm = getattr(base, model_kv.norm_name(base))
        modules: list[Any] = []
        if layer is not None:
            modules = [self._load_layer(layer)]
            setattr(base, model_kv.norm_name(base), nn.Identity())
            if types is not None:
                config.layer_types = types[layer : layer + 1]
        mixers = [each for module in modules for each in module.modules() if hasattr(each, "layer_idx")]
        for mixer in mixers:
            # In a cache of one layer it is the first.
            mixer.layer_idx = 0
        base.layers = nn.ModuleList(modules)
        try:
            yield
        finally:
            base.layers = layers
            setattr(base, model_kv.norm_name(base), last_norm)
            if types is not None:
                config.layer_types = types
            for mixer in mixers:
                mixer.layer_idx = layer


class _Recurrence(LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """The states of a layer without KV, in a cache that has no other layer. A new state of the recurrence
    takes the place of the one before, which stays as it was: gradients need it."""

    def update_recurrent_state(self, state: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.recurrent_states[0] = state
        return state


def _cache_of_states(states: Sequence[torch.Tensor]) -> Any:
    """A Hugging Face cache of one layer, which has these states: none, or as in ``States``."""
    layer = _Recurrence()
    for state, update in zip(states, (layer.update_conv_state, layer.update_recurrent_state), strict=False):
        update(state)
    return Cache(layers=[layer])


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None, "the predictions depend on all KV before them"
    return leaf.grad
