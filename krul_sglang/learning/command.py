"""The command ``krul-sglang learn``: from a model's folder and text files to a file of bases."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoTokenizer,
    DeepseekV3Config,
    GenerationConfig,
    PretrainedConfig,
)
from transformers.utils.logging import disable_progress_bar

import krul_sglang
from krul_backend.codec.subspace.bases import ModelBases, replace_bases, vector_size
from krul_backend.device import Device
from krul_backend.errors import CodecError
from krul_sglang.learning import model_kv
from krul_sglang.learning.bases import (
    LearningError,
    LearningPlan,
    learn_bases,
    learning_num_bytes,
    stored_num_bytes,
)
from krul_sglang.learning.reader import TextReader
from krul_sglang.models.checkpoint import Checkpoint, UnknownWeightsError, bases_path

_ASSETS = Path(krul_sglang.__file__).parent / "assets"


def own_texts() -> list[str]:
    """Text that comes with the program: conversations, and source code with the prose in it.

    The same for all versions: hosts share what they store only if their bases are the same.
    """
    return [text for name in ("chats", "source") for text in _strings(_asset(name))]


def _asset(name: str) -> object:
    return orjson.loads((_ASSETS / f"{name}.json").read_bytes())


def read_texts(path: Path) -> list[str]:
    """The text of one file, or of all files in a folder: plain, or one JSON value per line (``*.jsonl``).

    Of JSON values all strings count that are not names of fields, so that any form of messages will do.

    Raises:
        LearningError: no such path, no text there, or a file that cannot be read.
    """
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    texts = []
    for file in files:
        try:
            if file.suffix == ".jsonl":
                texts += [
                    "\n".join(_strings(orjson.loads(line))) for line in file.read_bytes().splitlines() if line
                ]
            else:
                texts.append(file.read_text())
        except (OSError, ValueError) as error:
            raise LearningError(f"{file} cannot be read as text: {error}") from error
    if not any(text.strip() for text in texts):
        raise LearningError(f"{path} has no text")
    return texts


def cut_pieces(tokenizer: Any, texts: Iterable[str], num_tokens: int, most: int) -> list[list[int]]:
    """Pieces of ``num_tokens`` token ids, at most ``most``, spread evenly over the texts one after the other.

    Each begins as a conversation does, with the beginning-of-text token if the model has one.
    """
    ids = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    size = num_tokens - len(_begin(tokenizer))
    count = min(most, len(ids) // size)
    starts = (index * (len(ids) - size) // max(1, count - 1) for index in range(count))
    return begun_pieces(tokenizer, (ids[start : start + size] for start in starts), num_tokens)


def begun_pieces(tokenizer: Any, pieces: Iterable[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Token ids, at most ``num_tokens`` of each piece, which begins as a conversation does."""
    begin = _begin(tokenizer)
    return [
        list(piece)[:num_tokens] if begin and piece[0] == begin[0] else [*begin, *piece][:num_tokens]
        for piece in pieces
    ]


def _begin(tokenizer: Any) -> list[int]:
    """The beginning-of-text token, if the model has one."""
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def _strings(value: object) -> Sequence[str]:
    if isinstance(value, str):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in values for text in _strings(each)]


NUM_PIECES = 24
"""Pieces of text that are enough: more of them gain little."""

_HELD_OUT_EVERY = 5
"""Of so many recent pieces one is not learned from: by these old and new bases are compared."""

_CLEARLY_LESS = 0.9
"""New bases are taken if recent text takes at most this share of the bytes that it takes in the old ones."""


def learn_to_files(
    checkpoint: Checkpoint,
    out: Path | None,
    *,
    cache_dir: Path,
    texts: Sequence[Path] = (),
    num_pieces: int = NUM_PIECES,
    tp_size: int = 1,
    device: str = "cpu",
) -> Iterator[str]:
    """Learn and write the bases of each rank; yields what was done, line by line.

    ``out`` is the file of a single rank, None for the files in ``cache_dir`` that servers look for: then it
    waits for other processes that learn the same.

    Raises:
        LearningError: text that cannot be read, too little of it, heads that ``tp_size`` ranks cannot share,
            or weights that cannot be identified.
        CodecError: a model whose KV has no such bases.
    """
    # First of all: it downloads what is not here yet.
    model = _load(checkpoint, device)
    if out is not None:
        yield from _learn(model, [out], texts, num_pieces, lambda path, bases: bases.save(path))
        return
    # All ranks have the same latent KV, as a single one has it.
    paths = _paths_of_servers(checkpoint, cache_dir, 1 if model[1].is_latent else tp_size)
    with _only_one(paths):
        yield from _learn(model, paths, texts, num_pieces)


def ensure_bases(
    checkpoint: Checkpoint,
    cache_dir: Path,
    tell: Callable[[str], None],
    *,
    tp_size: int = 1,
    before_loading: Callable[[], None] = lambda: None,
) -> list[Path]:
    """The files in which a server of so many ranks looks for the bases of a model; they are learned unless
    all of them are there and sound. ``tell`` is given a line about each step.

    It waits for other processes that learn the same. ``before_loading`` is called if the model is to be read.
    Errors as for ``learn_to_files``.
    """
    paths = _paths_of_servers(checkpoint, cache_dir, tp_size)
    with _only_one(paths):
        if not all(map(_is_sound, paths)):
            before_loading()
            for line in _learn(_load(checkpoint, "cpu"), paths, (), NUM_PIECES):
                tell(line)
    return paths


def relearn_bases(
    checkpoint: Checkpoint,
    cache_dir: Path,
    recent: Sequence[Sequence[int]],
    max_damage: float,
    tell: Callable[[str], None],
    *,
    tp_size: int = 1,
    before_loading: Callable[[], None] = lambda: None,
) -> None:
    """Learn the bases of a model again, from the program's own text and from ``recent``: token ids of at most
    1024 tokens each. They take the place of those that are there, which become older ones, if recent text
    that was not learned from takes clearly fewer bytes in them, within ``max_damage`` nats.

    The other arguments and errors as for ``ensure_bases``.

    Raises:
        LearningError: they are not clearly better.
    """
    paths = _paths_of_servers(checkpoint, cache_dir, tp_size)
    with _only_one(paths):
        before = [ModelBases.load(path) for path in paths]
        before_loading()
        tokenizer, reader = _load(checkpoint, "cpu")
        plan = LearningPlan()
        pieces = begun_pieces(tokenizer, recent, plan.text_tokens)
        held_out = pieces[::_HELD_OUT_EVERY]
        read = [piece for number, piece in enumerate(pieces) if number % _HELD_OUT_EVERY]
        own = cut_pieces(tokenizer, own_texts(), plan.text_tokens, NUM_PIECES)
        tell(f"learning again from {len(own)} pieces of the program's text and {len(read)} of recent turns")
        learned = learn_bases(reader, [*own, *read], plan, tp_size)
        texts = reader.read_histories(held_out)
        old, new = (
            stored_num_bytes(reader.rotary, of_ranks, texts, max_damage) for of_ranks in (before, learned)
        )
        tell(f"recent text takes {new / old:.2f} times the bytes that it took")
        if new > _CLEARLY_LESS * old:
            raise LearningError(
                f"bases learned again are not clearly better: recent text would take {new / old:.2f} times "
                f"the bytes that it takes (at most {_CLEARLY_LESS})"
            )
        for path, bases in zip(paths, learned, strict=True):
            replace_bases(path, bases)


_LAYER_BYTES = {16: 3, 8: 10, 4: 13}
"""The memory that a layer takes while it is read, for each byte of it in files of so many bits per weight, at
most. Experts, which are put together, take most."""


def memory_of_learning(checkpoint: Checkpoint, tp_size: int) -> int:
    """About the bytes that learning the bases of a checkpoint takes on a CPU.

    Raises:
        LearningError: heads that ``tp_size`` ranks cannot share.
    """
    whole = _config_of(checkpoint)
    quantization, config = getattr(whole, "quantization_config", None), whole.get_text_config()
    plan, num_layers, shape = LearningPlan(), len(model_kv.pool_layers(config)), model_kv.kv_shape(config)
    # In float32: both ends of the model, one layer as it comes from files, and predictions.
    ends = 2 * 4 * config.vocab_size * config.hidden_size
    file_bits = 16 if quantization is None else 8 if quantization.get("quant_method") == "fp8" else 4
    layer = _LAYER_BYTES[file_bits] * checkpoint.num_weight_bytes() // config.num_hidden_layers
    num_predicted = plan.text_tokens - plan.read_tokens
    predictions = 4 * 8 * num_predicted * config.vocab_size
    token_bytes = plan.read_tokens * vector_size(shape) * shape.dtype.itemsize
    hidden = num_predicted * 4 * config.hidden_size
    num_kv_layers, states = len(model_kv.layers_with_kv(config)), model_kv.states_bytes(config)
    of_text = num_kv_layers * token_bytes + config.num_hidden_layers * hidden + states
    of_bases = learning_num_bytes(shape, num_layers, tp_size)
    return int(ends + layer + predictions + NUM_PIECES * of_text) + of_bases


def _load(checkpoint: Checkpoint, device: str) -> tuple[Any, TextReader]:
    """The tokenizer of a checkpoint, and what reads with its model: of that both ends are on the device from
    now on, and each layer while it is at work."""
    # One for each layer would say nothing.
    disable_progress_bar()
    # As SGLang does: only weights are in the download directory, so nothing else is looked for there.
    tokenizer: Any = AutoTokenizer.from_pretrained(
        checkpoint.path, revision=checkpoint.revision, trust_remote_code=checkpoint.trust_remote_code
    )
    config = _config_of(checkpoint)
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        # Gradients need plain matrices. MXFP4, fp8 and compressed-tensors know this.
        quantization["dequantize"] = True
    # Few CPUs compute fast in the 16-bit types that checkpoints have.
    dtype = torch.float32 if Device.named(device).shares_cores else "auto"

    def read_part(layer: int | None) -> Any:
        part = _part_of_model(config, layer)
        read: Any
        read, found = part.from_pretrained(
            checkpoint.path,
            config=config,
            generation_config=GenerationConfig(),
            revision=checkpoint.revision,
            cache_dir=checkpoint.download_dir,
            dtype=dtype,
            # Attention with sinks has no faster one.
            attn_implementation="sdpa" if part._supports_sdpa else "eager",
            output_loading_info=True,
        )
        if found["missing_keys"]:
            # They would be random.
            raise LearningError(f"{checkpoint.path} has no weights {min(found['missing_keys'])}, and others")
        for module in read.modules():
            # Layers of compressed-tensors would round what they are given.
            module.quantization_enabled = False
        # Experts of MXFP4 come in 16 bits.
        return read.to(device, None if dtype == "auto" else dtype).train(False).requires_grad_(False)

    ends = read_part(None)

    def load_layer(layer: int) -> Any:
        module = model_kv.text_model(read_part(layer)).layers[layer]
        for each in module.modules():
            if hasattr(each, "config"):
                # There attention is observed.
                each.config = model_kv.text_model(ends).config
        return module

    return tokenizer, TextReader(ends, load_layer=load_layer)


def _config_of(checkpoint: Checkpoint) -> Any:
    """The model's Hugging Face configuration."""
    given, _ = PretrainedConfig.get_config_dict(checkpoint.path, revision=checkpoint.revision)
    if given.get("model_type") == "kimi_k2":
        # A DeepSeek-V3 under another name.
        return DeepseekV3Config.from_dict({**given, "model_type": "deepseek_v3"})
    return AutoConfig.from_pretrained(checkpoint.path, revision=checkpoint.revision)


def _part_of_model(config: Any, layer: int | None) -> Any:
    """The class of a configuration's models, with nothing but one layer; or with all else, if None."""
    kinds = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    whole: Any = next((kind[type(config)] for kind in kinds if type(config) in kind), None)
    if whole is None:
        raise CodecError(f"there are no bases for {config.model_type}")

    class Part(whole):  # type: ignore[misc]
        # Everything else that is in the files.
        _keys_to_ignore_on_load_unexpected = (".*",)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            base = model_kv.text_model(self)
            for name, _ in [*self.model.named_children()] if base is not self.model else ():
                if name != "language_model":
                    setattr(self.model, name, nn.Identity())
            for number in range(len(base.layers)):
                if number != layer:
                    base.layers[number] = nn.Identity()
            if layer is not None:
                base.set_input_embeddings(nn.Identity())
                self.lm_head = nn.Identity()
                setattr(base, model_kv.norm_name(base), nn.Identity())
                self.all_tied_weights_keys: dict[str, str] = {}

    # By its name the library knows how weights are named in files.
    Part.__name__, Part.__module__ = whole.__name__, whole.__module__
    return Part


def _learn(
    model: tuple[Any, TextReader],
    paths: Sequence[Path],
    texts: Sequence[Path],
    num_pieces: int,
    write: Callable[[Path, ModelBases], None] = replace_bases,
) -> Iterator[str]:
    """Learn the bases of as many ranks as there are paths."""
    started = time.monotonic()
    plan = LearningPlan()
    tokenizer, reader = model
    chosen = [text for path in texts for text in read_texts(path)] or own_texts()
    pieces = cut_pieces(tokenizer, chosen, plan.text_tokens, num_pieces)
    yield f"learning from {len(pieces)} pieces of {plan.text_tokens} tokens"
    for path, bases in zip(paths, learn_bases(reader, pieces, plan, len(paths)), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, bases)
        ranks = ", ".join(
            f"{group.first_layer}-{group.end_layer - 1}: {group.rank}" for group in bases.groups
        )
        yield f"coefficients per token and group of layers: {ranks}"
        yield f"errors cost {bases.damage_factor:.2f} times what the metric says"
        yield f"wrote {path} ({bases.digest[:12]})"
    yield f"done in {time.monotonic() - started:.0f} s"


def _is_sound(path: Path) -> bool:
    try:
        ModelBases.load(path)
    except CodecError:
        return False
    return True


@contextmanager
def _only_one(paths: Sequence[Path]) -> Iterator[None]:
    """Hold a lock that one process at a time has for these files. It ends with the process."""
    lock = paths[0].with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _paths_of_servers(checkpoint: Checkpoint, cache_dir: Path, tp_size: int) -> list[Path]:
    """The files in which a server of so many ranks looks for the bases of this model."""
    try:
        return [bases_path(checkpoint, cache_dir, rank, tp_size) for rank in range(tp_size)]
    except (UnknownWeightsError, OSError) as error:
        raise LearningError(f"a server could not find bases of these weights: {error}") from error
