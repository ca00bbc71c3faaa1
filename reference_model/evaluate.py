"""Evaluates a model folder: `python -m reference_model.evaluate --model DIR`.

Writes `evaluation.json` and the model card `README.md` into the folder.
"""

import argparse
import json
import logging
import math
import platform
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from reference_model import properties
from reference_model.corpus import load_corpus
from reference_model.evaluation_items import Item, items_of_conversation, make_item
from reference_model.export_conversations import BUNDLED_COUNT, BUNDLED_SEED, write_conversations
from reference_model.facts import KINDS, Kind
from reference_model.lexicon import Split
from reference_model.model_card import write_model_card
from reference_model.tokenizer import BOS_ID

logger = logging.getLogger(__name__)

HISTORY_LENGTHS = (512, 1024, 2000)
EVALUATION_SEED = "evaluation"
_TEXT_WINDOW_TOKENS = 1024


@dataclass(frozen=True)
class Score:
    """How one item was answered.

    `answer_matches`: every token of the reference answer, the end token included, is the most likely
    one, which is the same as: greedy decoding gives exactly the reference answer. `value_matches`: the
    value tokens are, given the reference answer up to them. `value_nll`: mean over value tokens, in nats.
    """

    answer_matches: bool
    value_matches: bool
    value_nll: float


@torch.no_grad()
def score(model: LlamaForCausalLM, item: Item) -> Score:
    """Scores one item with a single forward pass over history, question and reference answer."""
    ids = torch.tensor(item.ids)
    num_answer_tokens = len(ids) - item.answer_start
    # position i predicts token i + 1
    logits = model(ids[None], logits_to_keep=num_answer_tokens + 1).logits[0, :-1].float()
    answer = ids[item.answer_start :]
    is_best = logits.argmax(-1) == answer
    losses = F.cross_entropy(logits, answer, reduction="none")
    value = torch.tensor(item.value_positions) - item.answer_start
    return Score(bool(is_best.all()), bool(is_best[value].all()), float(losses[value].mean()))


def summarise(scores: Iterable[Score]) -> dict[str, float | int]:
    """Means over `scores`."""
    rows = list(scores)
    return {
        "items": len(rows),
        "answer_exact_match": round(sum(row.answer_matches for row in rows) / len(rows), 4),
        "value_exact_match": round(sum(row.value_matches for row in rows) / len(rows), 4),
        "value_nll": round(sum(row.value_nll for row in rows) / len(rows), 4),
    }


def recall(
    model: LlamaForCausalLM, tokenizer: Tokenizer, kind: Kind, history_tokens: int, items: int, split: Split
) -> dict[str, Any]:
    """Recall of `kind` at one length of history."""
    made = [make_item(tokenizer, kind, history_tokens, f"{EVALUATION_SEED}/{i}", split) for i in range(items)]
    result = {
        "kind": kind,
        "split": split,
        "history_tokens": history_tokens,
        "mean_history_tokens": round(sum(item.question_start for item in made) / items, 1),
        **summarise(score(model, item) for item in made),
    }
    logger.info("%s", result)
    return result


@torch.no_grad()
def text_perplexity(
    model: LlamaForCausalLM, tokenizer: Tokenizer, num_windows: int
) -> dict[str, float | int]:
    """Perplexity per token and bits per character on held-out files, in windows that start a document."""
    corpus = load_corpus()
    documents = list(corpus.held_out)
    random.Random(EVALUATION_SEED).shuffle(documents)
    nats, tokens, characters = 0.0, 0, 0
    for document in documents[:num_windows]:
        window = tokenizer.encode(document, add_special_tokens=False).ids[:_TEXT_WINDOW_TOKENS]
        ids = torch.tensor([BOS_ID, *window])
        logits = model(ids[None]).logits[0, :-1].float()
        nats += float(F.cross_entropy(logits, ids[1:], reduction="sum"))
        tokens += len(window)
        characters += len(tokenizer.decode(window))
    return {
        "documents": min(num_windows, len(documents)),
        "tokens": tokens,
        "perplexity": round(math.exp(nats / tokens), 3),
        "bits_per_character": round(nats / math.log(2) / characters, 4),
        "tokens_per_character": round(tokens / characters, 4),
    }


def without_history(
    model: LlamaForCausalLM, tokenizer: Tokenizer, kind: Kind, items: int
) -> list[dict[str, Any]]:
    """Recall at 512 tokens when question and answer cannot attend to the history in layers 0..l."""
    made = [make_item(tokenizer, kind, 512, f"{EVALUATION_SEED}/{i}") for i in range(items)]
    rows = []
    for last in range(model.config.num_hidden_layers):
        scores = []
        for item in made:
            with properties.history_removed(model, list(range(last + 1)), item):
                scores.append(score(model, item))
        rows.append({"kind": kind, "removed_layers": f"0..{last}", **summarise(scores)})
        logger.info("%s", rows[-1])
    return rows


def bundled_recall(model: LlamaForCausalLM, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Recall of the questions in the demo conversations, by kind."""
    scores: dict[Kind, list[Score]] = {kind: [] for kind in KINDS}
    for conversation in write_conversations(tokenizer, BUNDLED_SEED, BUNDLED_COUNT):
        for item in items_of_conversation(tokenizer, conversation["conversations"]):
            scores[item.kind].append(score(model, item))
    rows = [{"kind": kind, **summarise(scores[kind])} for kind in KINDS]
    logger.info("bundled %s", rows)
    return rows


def load_model(folder: Path) -> LlamaForCausalLM:
    """The model in `folder`, in bf16 as it is served."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.train(False)
    return model


def evaluate(folder: Path, items: int) -> dict[str, Any]:
    """All measurements of the model in `folder`; `items` is the number of `single` questions per length."""
    started = time.monotonic()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load_model(folder)
    fewer = max(1, items // 2)
    rows = [
        recall(model, tokenizer, kind, length, items if kind == "single" else fewer, "held_out")
        for length in HISTORY_LENGTHS
        for kind in KINDS
    ]
    rows += [recall(model, tokenizer, "single", length, fewer, "train") for length in HISTORY_LENGTHS[:2]]
    bundled = bundled_recall(model, tokenizer)
    removed = without_history(model, tokenizer, "single", max(1, items // 4))
    text = text_perplexity(model, tokenizer, 48)
    # Attention maps need the eager form.
    model.set_attn_implementation("eager")
    samples = [
        make_item(tokenizer, "single", 1024, f"{EVALUATION_SEED}/{i}") for i in range(max(1, items // 10))
    ]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model_bytes": (folder / "model.safetensors").stat().st_size,
        "dtype": "bfloat16",
        "training": json.loads((folder / "training.json").read_text()),
        "recall": rows,
        "bundled_conversations": bundled,
        "history_removed": removed,
        "adjacent_cosine": properties.adjacent_cosine(model, samples),
        "attention_mass": properties.attention_mass(model, samples),
        "property_samples": {"items": len(samples), "history_tokens": 1024, "kind": "single"},
        "text": text,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "evaluation_seconds": round(time.monotonic() - started, 1),
    }


def evaluate_and_write(folder: Path, items: int) -> None:
    """Evaluates the model in `folder` and writes evaluation.json and README.md there."""
    result = evaluate(folder, items)
    (folder / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    write_model_card(result, folder / "README.md")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--items", type=int, default=200, help="`single` questions per length; others half")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    evaluate_and_write(args.model, args.items)


if __name__ == "__main__":
    main()
