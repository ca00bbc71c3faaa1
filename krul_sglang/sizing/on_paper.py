"""Computes the costs of restores from published figures of hardware and the shape of a model.

Every share of a peak is an assumption, stated where it stands. Nothing here was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from krul_backend.codec.subspace.restore import MOST_WAVE_BYTES
from krul_backend.errors import ConfigError
from krul_backend.planner import (
    ComputeCost,
    DecodeCost,
    RestoreCosts,
    RestoreProblem,
    StoredRun,
    TierCost,
    make_planner,
)
from krul_sglang.learning.bases import LearningPlan

ELEMENT_BYTES = 2
"""bf16 weights and KV."""
MATMUL_SHARE = 0.5
"""Assumed: share of the peak that the matrix products of a prefill reach."""
ATTENTION_SHARE = 0.4
"""Assumed: share of the peak that attention kernels reach over a long context."""
HBM_SHARE = 0.7
"""Assumed: share of the memory bandwidth that reading weights and decoding KV reach."""
LAYER_LAUNCH_S = 5e-5
"""Assumed: about ten kernels of 5 us each; a layer takes at least this."""
BASES_RATIO = 12.0
"""Assumed: KV in bases is so much smaller than in bf16. SmolLM2 was measured at 12.6 and 18.7 with the
default budget: docs/measured.md, "Quality against bytes"."""
CODED_SHARE = 0.25
"""Assumed: coefficients of a group, as a share of its channels."""
COEFFICIENT_S = 1.6e-6
"""Seen on an H200: four dependent reads of memory for each coefficient; tokens are decoded side by side."""
MOST_WAVE_GROUPS = 8
"""Groups that are decoded side by side: as many as are checked ahead of the copies."""
PRODUCT_SHARE = 0.2
"""Assumed: share of the peak that the products of coefficients and bases reach."""
PAGE_SIZE = 16
WHOLE, PLANNED = "full-load", "local-search"


@dataclass(frozen=True)
class Gpu:
    """``peak_flops``: dense bf16. ``hbm_bytes_s``: device memory."""

    name: str
    peak_flops: float
    hbm_bytes_s: float


# NVIDIA's data sheets: A100 80GB SXM, H100 SXM, H200 SXM. bf16 without sparsity.
A100 = Gpu("A100", 312e12, 2.04e12)
H100 = Gpu("H100", 989e12, 3.35e12)
H200 = Gpu("H200", 989e12, 4.8e12)
GPUS = {gpu.name: gpu for gpu in (A100, H100, H200)}


@dataclass(frozen=True)
class Link:
    """What KV comes through. ``is_shared``: the rate is that of all GPUs together, not of each."""

    name: str
    bytes_s: float
    latency_s: float
    is_shared: bool


# 16 lanes: 32 GB/s (gen 4) and 64 GB/s (gen 5) each way; assumed: 80% of it reaches the device from pinned
# memory, and a copy takes 20 us to start.
PCIE4 = Link("PCIe 4 x16", 0.8 * 32e9, 2e-5, is_shared=False)
PCIE5 = Link("PCIe 5 x16", 0.8 * 64e9, 2e-5, is_shared=False)
# Sequential reads of data-centre drives, gen 4 and gen 5; assumed: 90% of it, 100 us to start.
NVME4 = Link("NVMe 7 GB/s", 0.9 * 7e9, 1e-4, is_shared=True)
NVME5 = Link("NVMe 14 GB/s", 0.9 * 14e9, 1e-4, is_shared=True)


@dataclass(frozen=True)
class Model:
    """Shape of a decoder with gated MLPs. ``num_gpus``: tensor-parallel; heads and bytes are split evenly.

    ``intermediate_size``: of the MLP, or of all experts together that a token meets. ``latent_size``:
    channels of latent KV (MLA), which is stored once and copied to each GPU; 0 for heads.
    ``latent_parameters``: of its attention, which has other projections.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    num_gpus: int = 1
    element_bytes: int = ELEMENT_BYTES
    latent_size: int = 0
    latent_parameters: int = 0

    @property
    def layer_parameters(self) -> int:
        """Of the projections of attention and of the three matrices of the MLP."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        return (self.latent_parameters or attention) + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_channels(self) -> int:
        """Numbers of a token's native KV in one layer, on all GPUs: each has at least one head."""
        return self.latent_size or 2 * max(self.num_kv_heads, self.num_gpus) * self.head_dim

    @property
    def layer_token_bytes(self) -> int:
        """K and V of a token in one layer, native."""
        return self.layer_channels * self.element_bytes


def read_model(config: Mapping[str, Any], name: str, num_gpus: int, element_bytes: int) -> Model:
    """The shape that a model's ``config.json`` describes.

    Raises:
        ConfigError: the shape is not there, or krul does not serve such layers.
    """
    shape = config.get("text_config", config)
    if set(shape.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError(f"{name} has layers without full attention, which krul does not serve")
    try:
        hidden, heads, width = (
            int(shape[key]) for key in ("hidden_size", "num_attention_heads", "intermediate_size")
        )
        met = shape.get("num_experts_per_tok")
        if met:
            width = (met + (shape.get("n_shared_experts") or 0)) * shape.get("moe_intermediate_size", width)
        head_dim = int(shape.get("head_dim") or hidden // heads)
        latent = {}
        if shape.get("kv_lora_rank"):
            rank, rotary, plain, value = (
                int(shape[key])
                for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
            )
            head_dim = (plain + rotary + value) // 2
            queries = heads * (plain + rotary)
            through = shape.get("q_lora_rank")
            asking = through * (hidden + queries) if through else hidden * queries
            keeping = hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden
            latent = {"latent_size": rank + rotary, "latent_parameters": asking + keeping}
        return Model(
            name,
            int(shape["num_hidden_layers"]),
            hidden,
            width,
            heads,
            int(shape.get("num_key_value_heads") or heads),
            head_dim,
            num_gpus,
            element_bytes,
            **latent,
        )
    except KeyError as error:
        raise ConfigError(f"config.json of {name} has no {error}") from error


def restore_costs(gpu: Gpu, link: Link, model: Model) -> RestoreCosts:
    """Costs of one layer on all GPUs of the model together; the tier is named as the link.

    A token takes ``2 * parameters`` operations in a layer, and ``4 * heads * head_dim`` for each token that
    it sees. Communication between GPUs is left out. The weights' reading is added to each layer although a
    long prefill hides it: that makes short heads look a little too expensive.
    """
    flops = gpu.peak_flops * model.num_gpus
    weights_s = model.layer_parameters * ELEMENT_BYTES / (HBM_SHARE * gpu.hbm_bytes_s * model.num_gpus)
    layer = ComputeCost(
        launch_s=max(LAYER_LAUNCH_S, weights_s),
        token_s=2 * model.layer_parameters / (MATMUL_SHARE * flops),
        context_s=4 * model.num_heads * model.head_dim / (ATTENTION_SHARE * flops),
    )
    num_links = 1 if link.is_shared or model.latent_size else model.num_gpus
    tier = TierCost(link.latency_s, 1 / (link.bytes_s * num_links))
    return RestoreCosts(head=layer, own=layer, tiers={link.name: tier})


@dataclass(frozen=True)
class Steps:
    """What the host spends on one copied block: a layer as it is (``layer_s``), or a group (``group_s``)."""

    layer_s: float
    group_s: float


COUNTED = Steps(1.1e-5, 1.75e-5)
"""For Llama-3-8B, from the launches and waits that ``benchmarks.launches`` has counted."""


def predict(
    model: Model,
    link: Link,
    steps: Steps,
    history_tokens: int,
    new_tokens: int,
    gpu: Gpu = H100,
    ratio: float = BASES_RATIO,
) -> dict[str, float]:
    """Seconds to the first token of a returning prompt: computed, and restored in each way that is kept.

    The history is one segment. Launches, copies and decoding of a block are added, as if the host did nothing
    ahead; communication between GPUs is left out.
    """
    costs = restore_costs(gpu, link, model)
    byte_s = costs.tiers[link.name].byte_s
    bases, coder_s = _in_bases(model, gpu, link, history_tokens, ratio)
    ends_s = {}
    for kept, run, latency_s in (
        ("native", _as_it_is(model, gpu, link, history_tokens), steps.layer_s),
        ("bases", bases, steps.group_s + coder_s),
    ):
        problem = RestoreProblem(
            num_layers=model.num_layers,
            page_size=PAGE_SIZE,
            device_tokens=0,
            total_tokens=history_tokens,
            new_tokens=new_tokens,
            runs=(run,),
            costs=replace(costs, tiers={link.name: TierCost(link.latency_s + latency_s, byte_s)}),
        )
        ends_s["recompute"] = problem.recompute_s
        ends_s |= {f"{kept}, {name}": make_planner(name).plan(problem).end_s for name in (WHOLE, PLANNED)}
    return ends_s


def _as_it_is(model: Model, gpu: Gpu, link: Link, history_tokens: int) -> StoredRun:
    """The history as the pool has it: read on the device, and written to its slots."""
    sizes = (float(model.layer_token_bytes),) * model.num_layers
    decode_s = (2 * _write_s(model, gpu),) * model.num_layers
    return _run(link, history_tokens, sizes, decode_s, tuple(range(model.num_layers)))


def _write_s(model: Model, gpu: Gpu) -> float:
    """Seconds to write a token's KV of one layer."""
    return model.layer_token_bytes / (HBM_SHARE * gpu.hbm_bytes_s * model.num_gpus)


def _in_bases(
    model: Model, gpu: Gpu, link: Link, history_tokens: int, ratio: float
) -> tuple[StoredRun, float]:
    """The history in bases, and the seconds of the coder for each group, whatever the number of tokens: those
    of a wave are decoded side by side.

    A group's block comes with its first layer, and is decoded for all of them.
    """
    channels = model.layer_channels // model.num_gpus
    ends = [0, *LearningPlan().group_ends(model.num_layers, channels)]
    sizes, decode_s, last_use = [0.0] * model.num_layers, [0.0] * model.num_layers, [0] * model.num_layers
    coder_s = 0.0
    for first, end in pairwise(ends):
        coefficients = CODED_SHARE * channels * (end - first)
        product_s = 2 * coefficients * channels / (PRODUCT_SHARE * gpu.peak_flops)
        sizes[first] = (end - first) * model.layer_channels * ELEMENT_BYTES / ratio
        decoded_bytes = history_tokens * (ELEMENT_BYTES * coefficients + sizes[first] / model.num_gpus)
        num_together = min(MOST_WAVE_GROUPS, max(1, int(MOST_WAVE_BYTES // decoded_bytes)))
        coder_s = max(coder_s, coefficients * COEFFICIENT_S / num_together)
        for layer in range(first, end):
            decode_s[layer] = product_s / (end - first) + _write_s(model, gpu)
            last_use[layer] = end - 1 if layer == first else layer
    return _run(link, history_tokens, tuple(sizes), tuple(decode_s), tuple(last_use)), coder_s


def _run(
    link: Link,
    history_tokens: int,
    sizes: tuple[float, ...],
    decode_s: tuple[float, ...],
    last_use: tuple[int, ...],
) -> StoredRun:
    costs = tuple(DecodeCost(0.0, token_s) for token_s in decode_s)
    return StoredRun(link.name, 0, history_tokens, sizes, costs, last_use, (0,) * len(sizes))
