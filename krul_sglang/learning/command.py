"""The command ``krul-sglang learn``: from a model's folder and text files to a file of bases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from krul_backend.device import Device
from krul_sglang.learning.bases import LearningError, LearningPlan, learn_bases
from krul_sglang.learning.reader import TextReader
from krul_sglang.learning.texts import cut_pieces, own_texts, read_texts
from krul_sglang.models.checkpoint import UnknownWeightsError, bases_path

NUM_PIECES = 24
"""Pieces of text that are enough: more of them gain little."""


def learn_to_files(
    model_path: str,
    out: Path | None,
    *,
    cache_dir: Path,
    texts: Sequence[Path] = (),
    num_pieces: int = NUM_PIECES,
    tp_size: int = 1,
    device: str = "cpu",
) -> Iterator[str]:
    """Learn and write the bases of each rank; yields what was done, line by line.

    ``out`` is the file of a single rank, None for the files in ``cache_dir`` that servers look for.

    Raises:
        LearningError: text that cannot be read, too little of it, heads that ``tp_size`` ranks cannot share,
            or weights that cannot be identified.
        CodecError: a model whose KV has no such bases.
    """
    started = time.monotonic()
    plan = LearningPlan()
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    # Few CPUs compute fast in the 16-bit types that checkpoints have.
    dtype = torch.float32 if Device(torch.device(device)).shares_cores else "auto"
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation="sdpa")
    reader = TextReader(model.to(device).train(False))
    paths = [out] if out is not None else _paths_of_servers(model_path, cache_dir, tp_size)
    chosen = [text for path in texts for text in read_texts(path)] or own_texts()
    pieces = cut_pieces(tokenizer, chosen, plan.text_tokens, num_pieces)
    yield f"learning from {len(pieces)} pieces of {plan.text_tokens} tokens"
    for path, bases in zip(paths, learn_bases(reader, pieces, plan, tp_size), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        bases.save(path)
        ranks = ", ".join(
            f"{group.first_layer}-{group.end_layer - 1}: {group.rank}" for group in bases.groups
        )
        yield f"coefficients per token and group of layers: {ranks}"
        yield f"errors cost {bases.damage_factor:.2f} times what the metric says"
        yield f"wrote {path} ({bases.digest[:12]})"
    yield f"done in {time.monotonic() - started:.0f} s"


def ensure_bases(model_path: str, cache_dir: Path, tell: Callable[[str], None]) -> Path:
    """The file in which a server of one rank looks for the bases of a model; they are learned if it is not
    there. ``tell`` is given a line about each step. Errors as for ``learn_to_files``."""
    (path,) = _paths_of_servers(model_path, cache_dir, 1)
    if not path.exists():
        for line in learn_to_files(model_path, None, cache_dir=cache_dir):
            tell(line)
    return path


def _paths_of_servers(model_path: str, cache_dir: Path, tp_size: int) -> list[Path]:
    """The files in which a server of so many ranks looks for the bases of this model."""
    try:
        return [bases_path(model_path, cache_dir, rank, tp_size) for rank in range(tp_size)]
    except (UnknownWeightsError, OSError) as error:
        raise LearningError(f"a server could not find bases of these weights: {error}") from error
