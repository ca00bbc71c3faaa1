"""Attention estimators: ``python -m benchmarks.estimator --json FILE [--model PATH] [--conversations N]``.

Accuracy on held-out conversations against the exact statistics over all rows, and cost beside the forward.
The figure is drawn from the JSON by ``python -m benchmarks.figures estimator``.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.baselines import ExactEstimator, SampledEstimator
from benchmarks.estimator_cost import DECODE_ARMS, CostBenchmark, decode_rounds
from benchmarks.samples import without_samples
from benchmarks.similarity_worker import HeterogeneousEstimator, SimilarityWorker
from krul_backend.attention.rows import Phase, sample_positions
from krul_backend.attention.statistics import AttentionStatistics
from krul_sglang.demo import environment
from krul_sglang.json_file import write_result
from krul_sglang.learning.reader import CapturedAttention, capture_attention
from reference_model.evaluation_items import make_item
from reference_model.facts import KINDS

Pairs = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Agreement:
    """One estimate beside the exact statistics of the same conversation.

    ``spearman`` is over the distances of all pairs of layers. ``overlap`` is the share of the exact choice of
    pairs that the estimate chooses, too; ``excess_distance`` is by how much the exact distances of the pairs
    chosen exceed those of the exact choice, relative to it: what an exchange of nearly equal pairs costs.
    ``ir_mass_error`` is the largest difference of a layer's initial-recent mass.
    """

    estimator: str
    num_rows: int
    spearman: float
    overlap: float
    excess_distance: float
    ir_mass_error: float


def closest_pairs(distances: torch.Tensor, num_layers: int) -> Pairs:
    """Disjoint pairs by ascending distance until they hold ``num_layers`` layers (Krul, Algorithm 1)."""
    total = len(distances)
    chosen: set[tuple[int, int]] = set()
    taken: set[int] = set()
    every_pair = [(i, j) for i in range(total) for j in range(i + 1, total)]
    for i, j in sorted(every_pair, key=lambda pair: float(distances[pair])):
        if len(taken) >= num_layers:
            break
        if taken.isdisjoint((i, j)):
            chosen.add((i, j))
            taken |= {i, j}
    return frozenset(chosen)


def agreements(
    captured: CapturedAttention, row_counts: Sequence[int], worker: SimilarityWorker
) -> list[Agreement]:
    """All estimators on one conversation, of which every row was captured."""
    rows = captured.rows()
    num_layers, num_heads = rows.num_layers, rows.num_heads
    exact_estimator = ExactEstimator(num_layers, num_heads)
    exact_estimator.add(rows, Phase.PREFILL, captured.read_keys)
    exact = exact_estimator.finish(captured.read_keys)

    heterogeneous = HeterogeneousEstimator(num_layers, num_heads, worker)
    middle = captured.num_tokens // 2
    for phase, start, end in ((Phase.PREFILL, 0, middle), (Phase.DECODE, middle, captured.num_tokens)):
        heterogeneous.add(captured.rows(torch.arange(start, end)), phase, captured.read_keys)
    results = [_compare("heterogeneous", heterogeneous.finish(captured.read_keys), exact)]

    for count in row_counts:
        sampled = SampledEstimator(num_layers, num_heads, max_rows=count)
        positions = sample_positions(0, captured.num_tokens, count)
        sampled.add(captured.rows(positions), Phase.PREFILL, captured.read_keys)
        results.append(_compare(f"sampled-{count}", sampled.finish(captured.read_keys), exact))
    return results


def _compare(name: str, estimate: AttentionStatistics, exact: AttentionStatistics) -> Agreement:
    expected, actual = exact.distances(), estimate.distances()
    upper = torch.triu_indices(exact.num_layers, exact.num_layers, offset=1).unbind()
    correlation = spearmanr(actual[upper].numpy(), expected[upper].numpy()).statistic
    best = closest_pairs(expected, exact.num_layers // 2)
    chosen = closest_pairs(actual, exact.num_layers // 2)
    best_distance = sum(float(expected[pair]) for pair in best)
    chosen_distance = sum(float(expected[pair]) for pair in chosen)
    mass_error = (estimate.initial_recent_mass() - exact.initial_recent_mass()).abs().max()
    return Agreement(
        name,
        estimate.num_rows,
        float(correlation),
        len(best & chosen) / len(best),
        chosen_distance / best_distance - 1,
        float(mass_error),
    )


def summarise(results: Sequence[Agreement]) -> list[dict[str, Any]]:
    """Mean, minimum, quartiles and maximum of every measure, per estimator."""
    summary = []
    for name in dict.fromkeys(result.estimator for result in results):
        chosen = [result for result in results if result.estimator == name]
        row: dict[str, Any] = {"estimator": name, "conversations": len(chosen)}
        for measure in ("num_rows", "spearman", "overlap", "excess_distance", "ir_mass_error"):
            values = torch.tensor([getattr(result, measure) for result in chosen], dtype=torch.float64)
            shares = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64)
            labels = ("min", "q25", "median", "q75", "max")
            quantiles = dict(zip(labels, values.quantile(shares).tolist(), strict=True))
            row[measure] = {"mean": float(values.mean()), **quantiles}
        summary.append(row)
    return summary


logger = logging.getLogger(__name__)

REFERENCE_MODEL = Path(__file__).parents[1] / "krul_sglang" / "assets" / "reference-model"
HISTORY_TOKENS = (256, 448, 640, 832, 960)
ROW_COUNTS = (16, 32, 64, 128, 192, 256, 384)
SAMPLED_ROWS = 256
COST_TOKENS = (256, 512, 1024, 2048)


def conversations(model_folder: Path, count: int) -> Iterator[list[int]]:
    """Token ids of held-out conversations; for another model, their text in its own tokens."""
    tokenizer = Tokenizer.from_file(str(REFERENCE_MODEL / "tokenizer.json"))
    own_tokenizer = None
    if model_folder.resolve() != REFERENCE_MODEL.resolve():
        own_tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for i in range(count):
        history_tokens = HISTORY_TOKENS[i % len(HISTORY_TOKENS)]
        ids = list(make_item(tokenizer, KINDS[i % len(KINDS)], history_tokens, f"estimator/{i}").ids)
        yield ids if own_tokenizer is None else own_tokenizer.encode(tokenizer.decode(ids))


def measure_accuracy(
    model: Any, model_folder: Path, count: int, worker: SimilarityWorker
) -> list[dict[str, Any]]:
    """Raw agreements, one entry per conversation."""
    rows = []
    for i, ids in enumerate(conversations(model_folder, count)):
        results = agreements(capture_attention(model, ids), ROW_COUNTS, worker)
        rows.append({"num_tokens": len(ids), "agreements": results})
        logger.info("conversation %d of %d: %d tokens", i + 1, count, len(ids))
    return rows


def measure_cost(model: Any, worker: SimilarityWorker, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Prompts of random tokens: the cost does not depend on what they say."""
    benchmark = CostBenchmark(model, worker, SAMPLED_ROWS, repeats)
    generator = torch.Generator().manual_seed(0)
    cost: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": []}
    for num_tokens in COST_TOKENS:
        if num_tokens > model.config.max_position_embeddings:
            continue
        ids = torch.randint(model.config.vocab_size, (num_tokens,), generator=generator).tolist()
        cost["prefill"].append(benchmark.prefill(ids))
        # Every arm's steps must still fit into the model's positions.
        cost["decode"].append(benchmark.decode(ids[: -DECODE_ARMS * decode_rounds(repeats)]))
        logger.info("cost at %d tokens: %s", num_tokens, cost["prefill"][-1]["ratios_to_forward"])
    return cost


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run's ``result``: without the single conversations, and quantiles of every time."""
    kept: dict[str, Any] = without_samples({**result})
    del kept["accuracy"]
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy and cost of the attention estimators.")
    parser.add_argument("--json", type=Path, required=True, help="where the summary of the result goes")
    parser.add_argument("--raw", type=Path, help="where the result with every sample goes")
    parser.add_argument("--model", type=Path, default=REFERENCE_MODEL, help="Llama, Qwen2 or Qwen3 folder")
    parser.add_argument("--conversations", type=int, default=100, help="for the accuracy")
    parser.add_argument("--repeats", type=int, default=7, help="of every timing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the forward")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    model = model.to(arguments.device).train(False)
    with SimilarityWorker() as worker:
        accuracy = measure_accuracy(model, arguments.model, arguments.conversations, worker)
        cost = measure_cost(model, worker, arguments.repeats)
        worker_stats = dataclasses.asdict(worker.stats())
    every_agreement = [one for row in accuracy for one in row["agreements"]]
    result = {
        "command": environment.without_cwd(shlex.join(sys.argv)),
        "git_revision": environment.git_revision(),
        "versions": environment.versions(),
        "machine": environment.machine(),
        "configuration": {
            "model": environment.without_cwd(str(arguments.model)),
            "dtype": "bfloat16",
            "device": arguments.device,
            "threads": arguments.threads,
            "conversations": arguments.conversations,
            "history_tokens": HISTORY_TOKENS,
            "row_counts": ROW_COUNTS,
            "sampled_rows_of_cost": SAMPLED_ROWS,
            "repeats": arguments.repeats,
        },
        "worker": worker_stats,
        "summary": {"accuracy": summarise(every_agreement)},
        "accuracy": accuracy,
        "cost": cost,
    }
    write_result(result, summarize(result), json=arguments.json, raw=arguments.raw)


if __name__ == "__main__":
    main()
