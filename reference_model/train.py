"""Trains the reference model: `python -m reference_model.train --out DIR`.

One command trains the tokenizer and the model, exports both, evaluates the result and writes the demo
conversations. Two single-thread processes share the work; a run that stops is continued with `--resume`.
"""

import argparse
import json
import logging
import os
import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# One thread per process: set before torch and tokenizers start theirs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from reference_model.corpus import load_corpus
from reference_model.evaluate import evaluate_and_write
from reference_model.export_conversations import export_conversations
from reference_model.facts import SpanKind
from reference_model.lexicon import Split
from reference_model.model import TrainingModel, Weights, export_model, init_weights
from reference_model.optimizer import Optimizer
from reference_model.sequences import WEIGHTS, SequenceWriter
from reference_model.tokenizer import save_tokenizer, train_tokenizer, training_texts

logger = logging.getLogger(__name__)

ASSETS = Path(__file__).parents[1] / "krul_sglang" / "assets"
DEFAULT_OUT = ASSETS / "reference-model"
NUM_PROCESSES = 2
TOKENS_PER_STEP = 8192
_CHECKPOINT_SECONDS = 120.0
_LOG_STEPS = 10


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum: sequences of `num_tokens` for `num_steps` steps.

    `quiz_share` of the dialogues spend their second half on questions about the first. `answer_weight` is the
    loss weight of the tokens of an answer around the value.
    """

    num_tokens: int
    num_steps: int
    quiz_share: float
    split: Split = "train"
    answer_weight: float = WEIGHTS[SpanKind.ANSWER]


CURRICULUM = (
    Stage(128, 400, 0.0),
    Stage(256, 191, 0.0),
    Stage(512, 199, 0.5),
    Stage(1024, 221, 0.5, "train_wide"),
    Stage(2048, 34, 0.5, "train_wide"),
    Stage(1024, 205, 0.5, "train_wide"),
    Stage(2048, 90, 0.5, "train_wide"),
    Stage(512, 220, 0.5, "train_open", 1.0),
    Stage(1024, 400, 0.5, "train_open", 1.0),
    Stage(2048, 60, 0.5, "train_open", 1.0),
    Stage(512, 150, 0.6, "train_pieces", 1.0),
    Stage(1024, 130, 0.6, "train_pieces", 1.0),
    Stage(2048, 40, 0.6, "train_pieces", 1.0),
)


@dataclass(frozen=True)
class Progress:
    """What a checkpoint knows besides the tensors; `seconds` is the wall time spent in training steps."""

    step: int
    seconds: float
    seed: int
    corpus_digest: str


def stage_of(step: int) -> Stage:
    """The stage of the curriculum that `step` belongs to."""
    remaining = step
    for stage in CURRICULUM:
        if remaining < stage.num_steps:
            return stage
        remaining -= stage.num_steps
    raise ValueError(f"step {step} lies behind the end of the curriculum, which has {total_steps()} steps")


def total_steps() -> int:
    """Number of steps of the whole curriculum."""
    return sum(stage.num_steps for stage in CURRICULUM)


def save_checkpoint(path: Path, weights: Weights, optimizer: Optimizer, progress: Progress) -> None:
    """Writes a checkpoint; a crash in between leaves the previous one."""
    temporary = path.with_suffix(".tmp")
    tensors = {name: weight.detach() for name, weight in weights.items()}
    torch.save({"weights": tensors, "optimizer": optimizer.state, "progress": asdict(progress)}, temporary)
    temporary.replace(path)


def load_checkpoint(path: Path, weights: Weights, optimizer: Optimizer) -> Progress:
    """Fills `weights` and `optimizer` in place."""
    saved = torch.load(path, weights_only=True)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved["weights"][name])
    for name, state in optimizer.state.items():
        state.copy_(saved["optimizer"][name])
    return Progress(**saved["progress"])


def _average_gradients(weights: Weights, total: Tensor) -> None:
    """Sums gradients and `total`, the loss weights, over processes in one message; divides the gradients."""
    grads = [weight.grad for weight in weights.values() if weight.grad is not None]
    flat = torch.cat([total.view(1), *(grad.view(-1) for grad in grads)])
    dist.all_reduce(flat)
    total.copy_(flat[0])
    parts = torch.split(flat[1:] / total, [grad.numel() for grad in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))


def _worker(rank: int, work: Path, seed: int, resume: bool, stop_step: int, store: str) -> None:
    """One data-parallel process: rank 0 logs and writes checkpoints."""
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s %(message)s"
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_PROCESSES)
    corpus = load_corpus()
    writer = SequenceWriter(Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json")), corpus)
    weights = init_weights(seed)
    optimizer = Optimizer(weights)
    progress = Progress(0, 0.0, seed, corpus.digest)
    checkpoint = work / "checkpoint.pt"
    if resume and checkpoint.exists():
        progress = load_checkpoint(checkpoint, weights, optimizer)
        logger.info("resumed at step %d", progress.step)
    model: TrainingModel | None = None
    model_tokens = 0
    last_checkpoint = last_log = time.monotonic()
    losses: list[float] = []
    for step in range(progress.step, stop_step):
        started = time.monotonic()
        stage = stage_of(step)
        num_tokens = stage.num_tokens
        if model is None or num_tokens != model_tokens:
            model, model_tokens = TrainingModel(weights, num_tokens), num_tokens
        # A step's data depend on the seed, the step and the rank only, so a resumed run sees the same.
        rng = random.Random(f"{seed}/{step}/{rank}")
        num_rows = TOKENS_PER_STEP // NUM_PROCESSES // num_tokens
        ids_array, shares_array = writer.batch(
            num_rows, num_tokens + 1, rng, stage.quiz_share, stage.split, stage.answer_weight
        )
        ids, shares = torch.from_numpy(ids_array), torch.from_numpy(shares_array)
        total = shares[:, 1:].sum()
        loss = model.loss(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), shares[:, 1:].contiguous())
        loss.backward()  # type: ignore[no-untyped-call]
        _average_gradients(weights, total)
        optimizer.step(step)
        losses.append(loss.item() / total.item() * NUM_PROCESSES)
        seconds = progress.seconds + time.monotonic() - started
        progress = replace(progress, step=step + 1, seconds=seconds)
        if rank == 0 and (step + 1) % _LOG_STEPS == 0:
            now = time.monotonic()
            pace = (now - last_log) / len(losses)
            mean = sum(losses) / len(losses)
            logger.info(
                "step %d/%d T=%d loss %.3f %.2f s/step", step + 1, total_steps(), num_tokens, mean, pace
            )
            last_log, losses = now, []
        if rank == 0 and time.monotonic() - last_checkpoint > _CHECKPOINT_SECONDS:
            save_checkpoint(checkpoint, weights, optimizer, progress)
            last_checkpoint = time.monotonic()
    if rank == 0:
        save_checkpoint(checkpoint, weights, optimizer, progress)
    dist.barrier()
    dist.destroy_process_group()


def export(work: Path, out: Path) -> None:
    """Writes the model folder from the newest checkpoint in `work`."""
    weights = init_weights(0)
    progress = load_checkpoint(work / "checkpoint.pt", weights, Optimizer(weights))
    save_tokenizer(Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json")), out)
    export_model(weights, out)
    record = {
        **asdict(progress),
        "curriculum": [asdict(stage) for stage in CURRICULUM],
        "tokens_per_step": TOKENS_PER_STEP,
        "trained_tokens": progress.step * TOKENS_PER_STEP,
        "processes": NUM_PROCESSES,
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    logger.info("exported step %d to %s", progress.step, out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the exported model")
    parser.add_argument(
        "--work", type=Path, default=Path("build/reference-model"), help="folder of checkpoints"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --work")
    parser.add_argument(
        "--stop-step", type=int, default=total_steps(), help="stop early, as a smoke test does"
    )
    parser.add_argument("--items", type=int, default=200, help="evaluation questions per kind and length")
    parser.add_argument(
        "--conversations",
        type=Path,
        default=ASSETS.parents[1] / "demo" / "conversations.json",
        help="demo conversations to write",
    )
    parser.add_argument("--train-only", action="store_true", help="write checkpoints and nothing else")
    parser.add_argument("--export-only", action="store_true", help="export the checkpoint in --work and stop")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if args.export_only:
        export(args.work, args.out)
        return
    if not (args.resume and (args.work / "tokenizer" / "tokenizer.json").exists()):
        save_tokenizer(train_tokenizer(training_texts(load_corpus(), args.seed)), args.work / "tokenizer")
    store = (args.work / "rendezvous").absolute()
    store.unlink(missing_ok=True)
    worker_args = (args.work, args.seed, args.resume, args.stop_step, f"file://{store}")
    spawn(_worker, worker_args, nprocs=NUM_PROCESSES)  # type: ignore[no-untyped-call]
    if args.train_only:
        return
    export(args.work, args.out)
    # The evaluation runs in this process, alone on the machine's cores.
    torch.set_num_threads(NUM_PROCESSES)
    evaluate_and_write(args.out, args.items)
    export_conversations(args.out, args.conversations)


if __name__ == "__main__":
    main()
