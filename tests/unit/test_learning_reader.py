"""Reading and learning with a tiny random model: gradients against finite differences, and what they give."""

from __future__ import annotations

import gc
import hashlib
import math
import weakref
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner, Result

from benchmarks.quality.model import capture_attention
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import ModelBases, vector_size
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.learning import LearningText
from krul_backend.errors import CodecError
from krul_sglang.cli import app as cli
from krul_sglang.learning import bases as learning
from krul_sglang.learning import command
from krul_sglang.learning.bases import (
    LearningError,
    LearningPlan,
    damage_ratios,
    learn_bases,
    learning_num_bytes,
)
from krul_sglang.learning.command import cut_pieces, own_texts, read_texts
from krul_sglang.learning.model_kv import dynamic_cache, pooled
from krul_sglang.learning.reader import History, TextReader
from krul_sglang.models.checkpoint import Checkpoint
from tests.support.tiny_model import build_tiny_model, random_llama

NUM_LAYERS = 3
NUM_READ = 40
PLAN = LearningPlan(text_tokens=400, read_tokens=360, layers_of_group=2)


@cache
def reader() -> TextReader:
    model = random_llama(num_layers=NUM_LAYERS, hidden_size=32, head_dim=16, max_positions=512, init_std=0.3)
    return TextReader(model.double(), query_rows=32)


def ids(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(0, 64, (num_tokens,), generator=generator).tolist()
    return drawn


@cache
def learned() -> ModelBases:
    (bases,) = learn_bases(reader(), [ids(PLAN.text_tokens, seed) for seed in range(4)], PLAN)
    return bases


def log_probabilities(layers: list[LayerKV], after: list[int]) -> torch.Tensor:
    """``[N, V]`` fp64 of the predictions of ``after`` on a history."""
    model = reader()._model
    cache_of = dynamic_cache(model, layers)
    logits: torch.Tensor = model(torch.tensor([after]), past_key_values=cache_of, use_cache=True).logits[0]
    return logits.log_softmax(-1)


def moved_history(history: list[LayerKV], layer: int, part: str, offset: torch.Tensor) -> list[LayerKV]:
    kv = history[layer]
    moved = LayerKV(kv.k + offset, kv.v) if part == "k" else LayerKV(kv.k, kv.v + offset)
    return [*history[:layer], moved, *history[layer + 1 :]]


def likelihood(layers: list[LayerKV], after: list[int], drawn: torch.Tensor) -> float:
    return float(log_probabilities(layers, after).gather(1, drawn).sum())


def history_of(tokens: Sequence[int]) -> History:
    (history,) = reader().read_histories([tokens])
    return history


def test_a_cache_lies_where_its_model_does() -> None:
    model = SimpleNamespace(device=torch.device("meta"), dtype=torch.bfloat16, config=reader()._model.config)
    (layer,) = dynamic_cache(model, history_of(ids(4)).layers[:1]).layers
    assert (layer.keys.is_meta, layer.values.is_meta) == (True, True)


def text_of(tokens: Sequence[int], num_read: int, seed: int) -> LearningText:
    """What is learned from one text, all layers of it."""
    texts = reader().read([(tokens[:num_read], tokens[num_read:])])
    layers = [layer for (layer,) in reader().to_learn(texts, [seed])][::-1]
    return LearningText(
        [layer.layers[0] for layer in layers],
        [layer.gradients[0] for layer in layers],
        torch.cat([layer.attention for layer in layers]),
    )


@pytest.mark.parametrize("seed", [0, 5])
def test_gradients_are_the_finite_differences_of_the_sampled_text(seed: int) -> None:
    tokens = ids(52, seed)
    after = tokens[NUM_READ:]
    text = text_of(tokens, NUM_READ, seed)
    history = [LayerKV(kv.k.double(), kv.v.double()) for kv in history_of(tokens[:NUM_READ]).layers]
    with torch.no_grad():
        probabilities = log_probabilities(history, after).float().exp()
        drawn = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(seed + 100)
        for layer in range(NUM_LAYERS):
            for part in ("k", "v"):
                direction = torch.randn(NUM_READ, 2, 16, generator=generator)
                # The direction is one of keys without rotary embedding; the model's cache has it.
                moved = (
                    reader().rotary.rotate(direction, torch.arange(NUM_READ)) if part == "k" else direction
                )
                # The library's norms are fp32 in any model, so that small distances drown in rounding. Two
                # larger ones together have an error of the fourth order.
                near, far = (
                    (
                        likelihood(moved_history(history, layer, part, each * moved), after, drawn)
                        - likelihood(moved_history(history, layer, part, -each * moved), after, drawn)
                    )
                    / (2 * each)
                    for each in (1e-3, 2e-3)
                )
                slope = (4 * near - far) / 3 / math.sqrt(len(after))
                found = float((getattr(text.gradients[layer], part) * direction).sum())
                assert found == pytest.approx(slope, rel=3e-3, abs=1e-3), (layer, part)
                assert abs(slope) > 1e-3


def test_a_text_has_keys_without_rotary_embedding_and_attention_of_all_tokens() -> None:
    text = text_of(ids(52), NUM_READ, 0)
    history = history_of(ids(52)[:NUM_READ])
    for bare, kv in zip(text.layers, history.layers, strict=True):
        assert kv.k.dtype is kv.v.dtype is torch.bfloat16
        rotated = reader().rotary.rotate(bare.k, torch.arange(NUM_READ))
        torch.testing.assert_close(rotated, kv.k.float(), rtol=1e-5, atol=1e-5)
        assert torch.equal(bare.v, kv.v)
    assert text.attention.shape == (NUM_LAYERS, 2, NUM_READ)
    assert torch.equal(text.attention, history.attention)
    with torch.no_grad():
        reader()._model.set_attn_implementation("eager")
        maps = reader()._model(torch.tensor([ids(52)[:NUM_READ]]), output_attentions=True).attentions
        reader()._model.set_attn_implementation("sdpa")
    # The first token is seen by all 32 rows; two query heads share a KV head.
    rows = (torch.arange(1, 33) * NUM_READ) // 32 - 1
    spent = maps[1][0, :2].sum(0)[rows]  # [rows, T]
    seen = torch.tensor([int((rows >= token).sum()) for token in range(NUM_READ)])
    average = spent.sum() / seen.sum()
    expected = ((spent.sum(0) + 2 * average) / (seen + 2)).float()
    torch.testing.assert_close(text.attention[1, 0], expected, rtol=1e-4, atol=1e-6)


def test_a_text_has_tokens() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        reader().read([(ids(52), ()), ((), ids(52))])


def test_texts_that_are_read_together_are_read_as_each_alone() -> None:
    """They pass a layer one after the other: nothing of one is left there for the next."""
    tokens = [ids(52), ids(80, 1), ids(30, 2)]
    together = reader().read([(each[:20], each[20:]) for each in tokens])
    for each, one in zip(tokens, together, strict=True):
        (alone,) = reader().read([(each[:20], each[20:])])
        assert torch.equal(one.inputs[-1], alone.inputs[-1])
        assert torch.equal(one.history.attention, alone.history.attention)
        for kv, expected in zip(one.history.layers, alone.history.layers, strict=True):
            assert torch.equal(kv.k, expected.k)
            assert torch.equal(kv.v, expected.v)


def test_the_kv_of_layers_one_by_one_is_that_of_the_whole_model() -> None:
    tokens = ids(52)
    captured = capture_attention(reader()._model, tokens)
    for kv, whole in zip(history_of(tokens).layers, map(pooled, captured.layers), strict=True):
        assert torch.equal(kv.k, whole.k)
        assert torch.equal(kv.v, whole.v)


@settings(max_examples=40)
@given(
    is_neox=st.booleans(),
    rotary_dim=st.sampled_from([2, 8, 16]),
    factor=st.sampled_from([1.0, 1.3, 0.7]),
    seed=st.integers(0, 1000),
)
def test_pull_back_is_the_transpose_of_rotate(
    is_neox: bool, rotary_dim: int, factor: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    angles = torch.rand(50, rotary_dim // 2, generator=generator) * 7
    table = RotaryTable(angles.cos() * factor, angles.sin() * factor, is_neox)
    x, gradients = torch.randn(2, 6, 3, 16, generator=generator)
    positions = torch.randint(0, 50, (6,), generator=generator)
    pulled = table.pull_back(gradients, positions)
    one = (table.rotate(x, positions).double() * gradients.double()).sum(-1)
    other = (x.double() * pulled.double()).sum(-1)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert torch.equal(pulled[..., rotary_dim:], gradients[..., rotary_dim:])


def divergence(tokens: Sequence[int], other: Sequence[LayerKV]) -> float:
    """Of the predictions after another history of the first tokens from those after the true one."""
    num_read = len(other[0].k)
    (text,) = reader().read([(tokens[:num_read], tokens[num_read:])])
    (found,) = reader().divergences([(text, other.__getitem__)])
    return found


def test_divergence_is_that_of_the_definition_and_none_from_itself() -> None:
    tokens = ids(52)
    history = list(history_of(tokens[:NUM_READ]).layers)
    assert divergence(tokens, history) == 0
    other = [*history[:1], LayerKV(history[1].k, history[1].v * 1.5), *history[2:]]
    with torch.no_grad():
        true, changed = (log_probabilities(each, tokens[NUM_READ:]) for each in (history, other))
    expected = float((true.exp() * (true - changed)).sum(-1).mean())
    assert expected > 1e-4
    assert divergence(tokens, other) == pytest.approx(expected, rel=1e-6)


def test_learned_bases_store_a_text_that_they_have_not_seen() -> None:
    bases = learned()
    assert [group.layers for group in bases.groups] == [range(2), range(2, 3)]
    assert 0 < bases.damage_factor < 10
    tokens = ids(PLAN.text_tokens, seed=77)
    text = history_of(tokens[: PLAN.read_tokens])
    codec = SubspaceCodec(bases, reader().rotary)
    sizes, divergences = [], []
    for limit in (0.01, 0.1):
        encoded = codec.encode(
            text.layers.__getitem__,
            start_token=0,
            num_tokens=PLAN.read_tokens,
            attention=text.attention,
            max_damage=limit,
        )
        decoder = codec.open(encoded.params, start_token=0, num_tokens=PLAN.read_tokens)
        restored = decoder.decode_all(encoded.blocks)
        divergences.append(divergence(tokens, restored))
        sizes.append(encoded.num_bytes)
        # A second-order model of one text's divergence, by the mean over three other texts.
        assert limit / 4 < divergences[-1] < 4 * limit
    assert divergences[0] < divergences[1]
    whole = sum(kv.k.nbytes + kv.v.nbytes for kv in text.layers)
    assert sizes[1] < sizes[0] < 0.6 * whole


def test_the_factor_is_what_texts_lost_over_what_was_expected() -> None:
    # Of four pieces the third is measured, which is one in five at least.
    plain = ModelBases(learned().shape, learned().groups)
    tokens, num_read = ids(PLAN.text_tokens, 2), PLAN.read_tokens
    texts = reader().read([(tokens[:num_read], tokens[num_read:])])
    ((ratio,),) = damage_ratios(reader(), [plain], texts, PLAN.measured_damage)
    assert learned().damage_factor == pytest.approx(ratio, rel=1e-6)


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(LearningError, match="1 pieces of 400 tokens are too few"):
        learn_bases(reader(), [ids(400)], PLAN)
    with pytest.raises(CodecError, match="356 tokens are too few"):
        learn_bases(reader(), [ids(400), ids(400, 1)], PLAN)


@pytest.mark.parametrize(
    ("num_layers", "channels", "ends"),
    [
        (1, 384, [1]),
        (5, 384, [5]),
        (12, 384, [5, 10, 12]),
        (24, 384, [2, 10, 18, 24]),
        (30, 384, [3, 13, 23, 30]),  # SmolLM2
        (48, 1024, [*range(5, 48, 5), 48]),  # Qwen3-30B-A3B
        (5, 2048, [2, 4, 5]),  # Llama-3-8B
        (3, 2560, [2, 3]),
        (3, 2561, [1, 2, 3]),
        (2, 16_384, [1, 2]),
    ],
)
def test_groups_are_consecutive_layers_and_fewer_of_wide_ones(
    num_layers: int, channels: int, ends: list[int]
) -> None:
    plan = LearningPlan()
    assert plan.group_ends(num_layers, channels) == ends
    assert max(end - first for first, end in pairwise([0, *ends])) <= plan.most_layers(num_layers, channels)


def test_bases_have_the_groups_that_their_width_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    channels = vector_size(reader().shape)
    monkeypatch.setattr(learning, "_MOST_CHANNELS", channels)
    pieces = [ids(PLAN.text_tokens, seed) for seed in range(4)]
    (bases,) = learn_bases(reader(), pieces, PLAN)
    assert [group.end_layer for group in bases.groups] == [1, 2, 3]
    # A rank with half of the heads has room for both layers.
    for bases in learn_bases(reader(), pieces, PLAN, tp_size=2):
        assert [group.end_layer for group in bases.groups] == [2, 3]


def test_memory_of_learning_grows_with_the_groups_and_the_square_of_their_width() -> None:
    heads, head_dim = 8, 128
    shape = LayerShape(heads, head_dim, head_dim, torch.bfloat16)
    wide = 2 * 2 * heads * head_dim  # two layers of Llama-3-8B
    assert learning_num_bytes(shape, 32, 1) == (16 * (8 + 8) + 16 + 64) * wide**2
    narrow = 2 * head_dim  # a layer of one head
    squares = 3**2 + 7 * 10**2 + 7**2
    assert learning_num_bytes(shape, 80, 8) == (8 * (8 + 8) * squares + (16 + 64) * 10**2) * narrow**2


@pytest.mark.parametrize("tp_size", [1, 8])
def test_a_model_of_70_billion_parameters_is_learned_within_48_gib(tmp_path: Path, tp_size: int) -> None:
    sizes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "vocab_size": 128256}
    LlamaConfig(**sizes, num_key_value_heads=8).save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as weights:
        # Their size, without their bytes.
        weights.truncate(141_107_412_992)
    assert 20 << 30 < command.memory_of_learning(Checkpoint(str(tmp_path)), tp_size) < 48 << 30


class Letters:
    """A tokenizer whose tokens are letters."""

    def __init__(self, bos_token_id: int | None) -> None:
        self.bos_token_id = bos_token_id

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


@settings(max_examples=60)
@given(
    texts=st.lists(st.text("abc", max_size=40), max_size=6),
    num_tokens=st.integers(2, 12),
    most=st.integers(1, 8),
    begin=st.sampled_from([None, 0, 7]),
)
def test_pieces_are_spread_over_the_texts(
    texts: list[str], num_tokens: int, most: int, begin: int | None
) -> None:
    whole = [ord(letter) for letter in "".join(texts)]
    pieces = cut_pieces(Letters(begin), texts, num_tokens, most)
    size = num_tokens - (begin is not None)
    assert len(pieces) == min(most, len(whole) // size)
    for piece in pieces:
        assert len(piece) == num_tokens
        assert begin is None or piece[0] == begin
    if len(pieces) > 1:
        assert pieces[0][-size:] == whole[:size]
        assert pieces[-1][-size:] == whole[-size:]


def test_text_is_read_from_files_lines_of_json_and_folders(tmp_path: Path) -> None:
    plain, lines = tmp_path / "b.txt", tmp_path / "a.jsonl"
    plain.write_text("some prose")
    chat = {"messages": [{"role": "user", "content": "one"}, {"content": ["two", {"text": "three"}], "n": 4}]}
    lines.write_bytes(orjson.dumps(chat) + b"\n\n" + orjson.dumps("four"))
    assert read_texts(plain) == ["some prose"]
    assert read_texts(lines) == ["user\none\ntwo\nthree", "four"]
    assert read_texts(tmp_path) == ["user\none\ntwo\nthree", "four", "some prose"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text", None, "cannot be read"),
        ("text", b"", "has no text"),
        ("text", b" \n", "has no text"),
        ("text", b"\xff\xfe\xff", "cannot be read"),
        ("text.jsonl", b"{}", "has no text"),
        ("text.jsonl", b'{"a": ', "cannot be read"),
    ],
)
def test_files_without_text_are_errors(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LearningError, match=message):
        read_texts(path)


def test_an_empty_folder_has_no_text(tmp_path: Path) -> None:
    with pytest.raises(LearningError, match="has no text"):
        read_texts(tmp_path)


def test_the_programs_own_text_is_the_same_in_all_versions() -> None:
    texts = own_texts()
    assert any("community garden" in text for text in texts)
    assert any("class HostStore" in text for text in texts)
    # Hosts of two versions that learn from other text share nothing that they store in bases.
    assert hashlib.sha256("\0".join(texts).encode()).hexdigest() == (
        "7820ade2263b4825ab10aaa674eefb9332b3c8a23dd7c8950c1dad6274e2e400"
    )


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(
        tmp_path_factory.mktemp("tiny"), num_layers=2, hidden_size=64, head_dim=16, max_positions=2048
    )


def learn(model: Path, out: Path, *options: object) -> Result:
    arguments = ["learn", "--model-path", model, "--out", out, *options]
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_the_command_writes_a_file_that_loads(model_path: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "tiny.bases"
    text.write_text("\n".join(own_texts())[:20_000])
    result = learn(model_path, out, "--text", text, "--pieces", 3)
    assert result.exit_code == 0, result.output
    bases = ModelBases.load(out)
    lines = result.stdout.splitlines()
    assert lines[0] == "learning from 3 pieces of 1024 tokens"
    assert lines[1] == f"coefficients per token and group of layers: 0-1: {bases.groups[0].rank}"
    assert lines[2] == f"errors cost {bases.damage_factor:.2f} times what the metric says"
    assert lines[3] == f"wrote {out} ({bases.digest[:12]})"
    assert lines[4].startswith("done in ")
    assert len(lines) == 5
    assert bases.num_layers == 2
    assert bases.shape.k_head_dim == 16


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        (None, 1, "cannot be read as text"),
        ("", 1, "has no text"),
        ("a few words", 1, "0 pieces of 1024 tokens are too few to learn from (at least 2)"),
    ],
)
def test_the_command_says_what_is_wrong_with_the_text(
    model_path: Path, tmp_path: Path, text: str | None, status: int, message: str
) -> None:
    path, out = tmp_path / "text.txt", tmp_path / "tiny.bases"
    if text is not None:
        path.write_text(text)
    result = learn(model_path, out, "--text", path)
    assert result.exit_code == status, result.output
    assert result.stderr.splitlines()[-1].startswith("krul-sglang: error: ")
    assert message in result.stderr
    assert not out.exists()


def test_the_command_checks_its_arguments_first(model_path: Path, tmp_path: Path) -> None:
    for model, out, message in [
        (model_path, tmp_path / "none" / "file", "does not exist"),
        (model_path, tmp_path, "is a directory"),
        (tmp_path, tmp_path / "file", "no config.json"),
    ]:
        result = learn(model, out)
        assert result.exit_code == 2
        assert message in result.stderr
    result = learn(model_path, tmp_path / "file", "--pieces", 1)
    assert result.exit_code == 2


@pytest.mark.parametrize("num_experts", [0, 4])
def test_a_checkpoint_is_learned_from_one_layer_at_a_time(
    tmp_path: Path, num_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bases are those of the whole model in memory, of whose layers never more than one is loaded."""
    path = build_tiny_model(
        tmp_path / "m",
        num_layers=3,
        hidden_size=64,
        head_dim=16,
        max_positions=512,
        vocab_size=64,
        num_experts=num_experts,
    )
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train(False)
    _, by_layers = command._load(Checkpoint(str(path)), "cpu")
    assert not [*by_layers._model.model.layers.parameters()]
    living: list[weakref.ref[Any]] = []
    load = by_layers._load_layer

    def load_and_look(layer: int) -> Any:
        gc.collect()
        assert not [each for each in living if each() is not None], "a layer that was left is still there"
        module = load(layer)
        living.append(weakref.ref(module))
        return module

    monkeypatch.setattr(by_layers, "_load_layer", load_and_look)
    pieces = [ids(PLAN.text_tokens, seed) for seed in range(4)]
    (expected,) = learn_bases(TextReader(whole), pieces, PLAN)
    (bases,) = learn_bases(by_layers, pieces, PLAN)
    # Forwards of all texts, gradients, and forwards of those that are measured.
    assert len(living) == 3 * 3
    assert bases.damage_factor == pytest.approx(expected.damage_factor, rel=1e-3)
    for group, of_whole in zip(bases.groups, expected.groups, strict=True):
        assert group.rank == of_whole.rank
        torch.testing.assert_close(group.mean, of_whole.mean)
        torch.testing.assert_close(group.magnitudes, of_whole.magnitudes, rtol=1e-3, atol=0)
        torch.testing.assert_close(
            group.encoder @ group.decoder, of_whole.encoder @ of_whole.decoder, rtol=0, atol=1e-3
        )
