"""Published figures of hardware and models, and the costs that follow from them.

Every share of a peak is an assumption, stated where it stands. Nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from krul_backend.planner.interface import ComputeCost, RestoreCosts, TierCost

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


def network(gbit_s: int) -> Link:
    """One network card; assumed: 90% of its rate, 50 us to start."""
    return Link(f"network {gbit_s} Gb/s", 0.9 * gbit_s * 1e9 / 8, 5e-5, is_shared=True)


@dataclass(frozen=True)
class Model:
    """Shape of a decoder with gated MLPs. ``num_gpus``: tensor-parallel; heads and bytes are split evenly."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    num_gpus: int = 1

    @property
    def layer_parameters(self) -> int:
        """Of query, key, value and output projections and of the three matrices of the MLP."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_token_bytes(self) -> int:
        """K and V of a token in one layer, native."""
        return 2 * self.num_kv_heads * self.head_dim * ELEMENT_BYTES


# The models' published configurations. Qwen1.5-7B has the shape of Llama-7B; Qwen2-72B that of Llama-3-70B
# but for an MLP 3% wider.
LLAMA_7B = Model("Llama-7B, Qwen1.5-7B (MHA)", 32, 4096, 11008, 32, 32)
LLAMA_13B = Model("Llama-13B (MHA)", 40, 5120, 13824, 40, 40)
LLAMA3_8B = Model("Llama-3-8B (GQA)", 32, 4096, 14336, 32, 8)
LLAMA_30B = Model("LLaMA-30B (MHA)", 60, 6656, 17920, 52, 52, num_gpus=2)
LLAMA3_70B = Model("Llama-3-70B, Qwen2-72B (GQA)", 80, 8192, 28672, 64, 8, num_gpus=4)
MODELS = (LLAMA_7B, LLAMA3_8B, LLAMA_30B, LLAMA3_70B)

# The paper's figure 17: on LLaMA-7B and A100 the streams meet at 2 parts recomputed to 3 loaded, so loading
# everything takes 2/3 of recomputing everything. Its PCIe 4 link then moves KV at this rate, far below the
# link's own, if its GPUs compute as assumed here.
_RECOMPUTE_TOKEN_S = 2 * LLAMA_7B.layer_parameters / (MATMUL_SHARE * A100.peak_flops)
PAPER_LINK = Link(
    "PCIe 4 as in the paper's figure 17",
    1.5 * LLAMA_7B.layer_token_bytes / _RECOMPUTE_TOKEN_S,
    2e-5,
    is_shared=False,
)

PLATFORMS: tuple[tuple[Gpu, Link], ...] = (
    (A100, PAPER_LINK),
    (A100, PCIE4),
    (A100, NVME4),
    (A100, network(10)),
    (A100, network(100)),
    (H100, PCIE5),
    (H100, NVME5),
    (H100, network(100)),
    (H100, network(400)),
    (H200, PCIE5),
)


def rate(gb_s: float) -> Link:
    """Whatever brings a GPU so many GB/s."""
    return Link(f"{gb_s:g} GB/s", gb_s * 1e9, 2e-5, is_shared=False)


MACHINES: tuple[tuple[Model, Gpu, Link], ...] = (
    (LLAMA_13B, A100, PCIE4),
    (LLAMA_7B, A100, PCIE4),
    (LLAMA_7B, H100, PCIE5),
    (LLAMA_7B, A100, PAPER_LINK),
    (LLAMA_7B, H100, rate(25)),
    (LLAMA_7B, A100, rate(6)),
    (LLAMA_7B, H100, rate(6)),
)
"""By how long loading takes against computing: see ``load_ratio``."""


def load_ratio(gpu: Gpu, link: Link, model: Model) -> float:
    """How many times as long a token's native KV takes to load as to compute, apart from attention, whose
    share grows with the prompt: of a long prompt it is less."""
    costs = restore_costs(gpu, link, model)
    return costs.tiers[link.name].byte_s * model.layer_token_bytes / costs.own.token_s


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
    num_links = 1 if link.is_shared else model.num_gpus
    tier = TierCost(link.latency_s, 1 / (link.bytes_s * num_links))
    return RestoreCosts(head=layer, own=layer, tiers={link.name: tier})
