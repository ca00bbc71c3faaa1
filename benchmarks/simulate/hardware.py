"""Published models, and machines that they are restored on. Nothing here was measured."""

from __future__ import annotations

from krul_sglang.sizing.on_paper import (
    A100,
    H100,
    H200,
    MATMUL_SHARE,
    NVME4,
    NVME5,
    PCIE4,
    PCIE5,
    Gpu,
    Link,
    Model,
    restore_costs,
)


def network(gbit_s: int) -> Link:
    """One network card; assumed: 90% of its rate, 50 us to start."""
    return Link(f"network {gbit_s} Gb/s", 0.9 * gbit_s * 1e9 / 8, 5e-5, is_shared=True)


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
