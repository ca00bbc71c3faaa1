"""The text of ``docs/support.md``. What is refused comes from the engine's own table, what was seen to be
served and what nobody has tried from here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.tables import ROOT, table
from krul_sglang.adapter import unsupported
from krul_sglang.adapter.hook_targets import SUPPORTED_SGLANG
from krul_sglang.adapter.unsupported import LAUNCH_RULES, MODEL_RULES, SMALL_PAGES

FOUND_LATER = [value for value in vars(unsupported).values() if type(value) is unsupported.Refusal]
"""Refusals that are known only in the scheduler, when the pool or the estimator is built."""

PAGE = ROOT / "docs" / "support.md"

_HEAD = f"""# What is served, refused, and untested

Written by `python -m benchmarks.pages` from `benchmarks/support.py` and the tables of
`krul_sglang/adapter/unsupported.py`; a test compares them. SGLang {", ".join(SUPPORTED_SGLANG)}.

What is served was seen on SGLang's server on a CPU. **Of GPUs, an H200 and an H100 were seen for minutes**:
[what ran there](gpu.md#what-was-seen).
"""

_REFUSED = """
## Refused at start

By one line that names the setting, because krul would store or restore wrong KV, answer otherwise than the
engine alone, or hang. What follows from the arguments stops the launch before any process starts:
"""

_LATER = """
What shows only when the arguments are resolved, the model is read, or a part is built stops the server in the
scheduler, and with it every process:
"""


@dataclass(frozen=True)
class Served:
    """Says that ``setting`` was tested: answers were those of a server that never evicts, in ``seen_on``."""

    setting: str
    seen_on: str


@dataclass(frozen=True)
class Untested:
    """Says that nobody has tried ``setting``; nothing speaks against it. ``note``: where to look first."""

    setting: str
    note: str = ""


SERVED = (
    Served("--device cpu (krul's CPU platform and its attention backend)", "all of tests/integration"),
    Served("Llama (random weights, and the bundled model)", "tests/integration/test_bundled_model.py"),
    Served("Qwen3-MoE (random weights)", "tests/integration/test_restoring.py"),
    Served(
        "latent KV (MLA): DeepSeek-V2, DeepSeek-V3, Kimi-K2 and GLM-4.7-Flash (with DeepSeek-V3's layers), "
        "also in bases (fp8 KV, too); MiniCPM3, by whole loads (random weights)",
        "tests/integration/test_latent_serving.py",
    ),
    Served("adapters (--lora-paths), by whole loads", "tests/integration/test_adapters.py"),
    Served(
        "images: Qwen2-VL, text also in bases; sounds: Qwen2-Audio (random weights), by whole loads",
        "tests/integration/test_images_and_sounds.py",
    ),
    Served(
        "sliding windows: Mellum, whose windows have a pool of their own (random weights), by whole loads up "
        "to the ends of turns and of prompts; with --speculative-algorithm NGRAM, STANDALONE, EAGLE; KV of "
        "its other layers also in bases, without probes",
        "tests/integration/test_hybrid_serving.py",
    ),
    Served(
        "sliding windows in the pool of all tokens: Gemma-3, and with --disable-hybrid-swa-memory others, by "
        "whole loads up to any page (random weights)",
        "tests/integration/test_windows.py",
    ),
    Served(
        "recurrent layers beside attention: LFM2's short convolutions, Qwen3-Next's gated delta rule, "
        "Kimi-Linear's (KDA, beside latent KV), Mamba-2 of Nemotron-H, Granite-4 and Falcon-H1 (random "
        "weights), by whole loads up to the ends of turns and of prompts; with --mamba-radix-cache-strategy "
        "extra_buffer, --page-size 16 and the overlap scheduler up to the last state that SGLang keeps "
        "there; so with extra_buffer_lazy, seen with Qwen3-Next and Nemotron-H; KV of LFM2, Qwen3-Next and "
        "Nemotron-H also in bases, without probes",
        "tests/integration/test_hybrid_serving.py",
    ),
    Served(
        "recurrent layers and --speculative-algorithm NGRAM: Qwen3-Next and Nemotron-H, with "
        "--speculative-ngram-max-bfs-breadth 4 and --page-size 1; NEXTN: Qwen3-Next with drafts of its own "
        "checkpoint (MTP), --speculative-eagle-topk 1 and --page-size 1, 16",
        "tests/integration/test_hybrid_serving.py",
    ),
    Served("a model whose heads cannot be proven: whole loads", "tests/integration/test_unproven_heads.py"),
    Served("--page-size 1, 16, 64", "tests/integration/test_restoring.py"),
    Served("--chunked-prefill-size", "tests/integration/test_restoring.py"),
    Served("--enable-mixed-chunk", "tests/integration/test_restoring.py"),
    Served("--schedule-policy fcfs, lpm", "tests/integration/test_restoring.py"),
    Served("--tp-size 2 on one host", "tests/integration/test_restoring.py"),
    Served(
        "--enable-dp-attention, --attn-dp-size 2, by whole loads; also with latent KV, MTP, and bases",
        "tests/integration/test_dp_attention.py",
    ),
    Served(
        "--disaggregation-mode prefill, Mooncake sending over TCP, and a server without krul that decodes",
        "tests/integration/test_disaggregation.py",
    ),
    Served("--dp-size 2 with endpoint", "tests/integration/test_tiers_serving.py"),
    Served("--dtype float32, bfloat16", "tests/integration/test_lossless.py"),
    Served("the radix tree in Rust and in Python", "tests/integration/test_lossless.py"),
    Served("--kv-cache-dtype fp8_e4m3, fp8_e5m2 without scales", "tests/integration/test_fp8_serving.py"),
    Served('strategy = "subspace" with an fp8 pool', "tests/integration/test_fp8_serving.py"),
    Served("the overlap scheduler, --disable-overlap-schedule", "tests/integration/test_fp8_serving.py"),
    Served("--radix-eviction-policy lru, lfu", "tests/integration/test_fp8_serving.py"),
    Served("cache_salt, extra_key; aborts, disconnects, flushes", "tests/integration/test_serving.py"),
    Served("/update_weights_from_disk", "tests/integration/test_weight_updates.py"),
    Served("--enable-streaming-session", "tests/integration/test_weight_updates.py"),
    Served("--speculative-algorithm NGRAM", "tests/integration/test_speculation.py"),
    Served(
        "--speculative-algorithm STANDALONE, EAGLE, EAGLE3; NEXTN (SGLang's other name of EAGLE), with "
        "trees: --speculative-eagle-topk 2 and --page-size 1; DeepSeek-V3's own layer that drafts (MTP)",
        "tests/integration/test_draft_models.py",
    ),
    Served("ssd_dir, and a daemon that several servers join", "tests/integration/test_tiers_serving.py"),
)

UNTESTED = (
    Untested(
        "GPUs other than an H100 and an H200; attention backends other than krul's own, torch_native and "
        "triton"
    ),
    Untested(
        "CUDA graphs of prefill that are not breakable, as those by default are",
        "such a graph waits for all layers of a load",
    ),
    Untested(
        "models other than Llama, Qwen3-MoE and DeepSeek-V2 and V3",
        "the proof of recomputed heads at every start; without it whole prefixes are loaded",
    ),
    Untested(
        "other models with a pool of sliding windows: gpt-oss, also in bases; Gemma-4, MiMo, Step; such a "
        "pool and EAGLE3",
        "krul copies rows of SGLang's two pools, whatever the layers compute from them",
    ),
    Untested(
        "recurrent layers of models other than LFM2, Qwen3-Next, Kimi-Linear, Nemotron-H, Granite-4 and "
        "Falcon-H1; Kimi-Linear and Granite-4 with experts; recurrent layers and STANDALONE, EAGLE3, or "
        "--speculative-eagle-topk over 1",
        "boundaries are where SGLang's tree has states; the bytes of a state against those of KV",
    ),
    Untested("MoE: --ep-size, --moe-a2a-backend, --enable-eplb, --moe-dp-size, --dwdp-size", "the proof"),
    Untested("videos, and other models that see or hear", "SGLang names them in the token ids like images"),
    Untested("adapters that are loaded while the server runs", "each has an id that nothing else has"),
    Untested("--enable-two-batch-overlap, --enable-single-batch-overlap", "heads run as one batch"),
    Untested(
        "drafts of targets' own checkpoints (MTP) other than DeepSeek-V3's and Qwen3-Next's; "
        "--speculative-eagle-topk over 1 with larger pages",
        "a draft's pool must be one that krul knows, too",
    ),
    Untested("--enable-dp-attention with EAGLE3", "draft KV comes before the batch, too"),
    Untested(
        "--disaggregation-mode prefill with other ways to send, --tp-size, speculation, latent KV or states",
        "what is sent is read from the pool after the forward that waited for its loads",
    ),
    Untested("--enable-torch-compile"),
    Untested("--quantization of weights"),
    Untested("fp8 KV with scales in the checkpoint", "tested without a server"),
    Untested("--tp-size over several hosts (--nnodes), --use-ray"),
    Untested("--enable-session-radix-cache"),
    Untested(
        "/update_weights_from_tensor, _from_distributed, _from_ipc", "the same hook as of those from disk"
    ),
    Untested("--enable-priority-scheduling, and preemption by it"),
    Untested("--enable-prefill-delayer, --num-continuous-decode-steps"),
    Untested("beam search (beam_width)"),
    Untested("--cpu-offload-gb", "layers are wrapped: whole prefixes are loaded"),
    Untested("--enable-paged-experts, --kt-weight-path"),
    Untested("--startup-weight-load-mode overlap", "weights must be there when krul proves heads"),
    Untested("--enable-torch-symm-mem, --enable-symm-mem, --enable-mscclpp, --enable-nccl-nvls"),
    Untested("--enable-flashinfer-allreduce-fusion", "sums between layers are completed where heads are cut"),
    Untested("--enable-nvidia-megakernel, --enable-amd-monokernel", "they decode only"),
    Untested("--language-model-only"),
    Untested("--forward-hooks, --debug-tensor-dump-*", "they see recomputed heads, too"),
    Untested("--kv-events-config"),
    Untested("--enable-return-hidden-states, --enable-return-aux-hidden-states"),
    Untested("--model-impl transformers"),
)


def page() -> str:
    """The text of ``docs/support.md``."""
    served = [(row.setting, row.seen_on) for row in SERVED]
    before = [(row.setting, row.reason) for row in LAUNCH_RULES]
    later = [(row.setting, row.reason) for row in (*MODEL_RULES, *FOUND_LATER)]
    untested = [(row.setting, row.note) for row in UNTESTED]
    return "\n".join(
        (
            _HEAD,
            _table(("served", "seen on a CPU server, in"), served),
            f"\nWith a warning: {_code(SMALL_PAGES.removeprefix('krul: '))}.",
            _REFUSED,
            _table(("refused", "why"), before),
            _LATER,
            _table(("refused", "why"), later),
            "\n## Untested\n\nNothing is known against these, and nobody has seen them work.\n",
            _table(("untested", "where to look first"), untested),
            "",
        )
    )


def _table(head: tuple[str, str], lines: list[tuple[str, str]]) -> str:
    return table(head, ([_code(text).replace("|", "\\|") for text in line] for line in lines), left=(0, 1))


def _code(text: str) -> str:
    """``text`` with flags, paths and other words that have underscores set as code."""
    return re.sub(r"--[\w-]+\*?|tests/[\w/.]+|/?\w+_\w*\*?", lambda found: f"`{found[0]}`", text)
