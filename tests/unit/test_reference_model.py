"""The shipped reference model: its tokenizer and template, its weights, and that it really recalls."""

import json
import random
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from reference_model.dialogues import DialogueWriter, Turn, draw_style, message_text
from reference_model.evaluate import score
from reference_model.evaluation_items import items_of_conversation, make_item
from reference_model.export_conversations import MAX_TOKENS, MIN_TOKENS, write_conversations
from reference_model.lexicon import Split
from reference_model.model import TrainingModel, export_model, init_weights
from reference_model.model_card import model_card
from reference_model.optimizer import LEARNING_RATE_KNOTS, learning_rate_factor, orthogonalise
from reference_model.properties import history_removed
from reference_model.sequences import encode_spans, encode_turn
from reference_model.tokenizer import BOS_ID, END_ID
from reference_model.train import CURRICULUM, TOKENS_PER_STEP, stage_of, total_steps

ASSETS = Path(__file__).parents[2] / "krul_sglang" / "assets"
FOLDER = ASSETS / "reference-model"

Messages = list[dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices: one thread is as fast, and leaves the other cores alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).train(False)


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def chat_ids(chat_tokenizer: Any, messages: Messages) -> list[int]:
    """Token ids of the prompt that a server builds from `messages`."""
    text = chat_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = chat_tokenizer.encode(text, add_special_tokens=False)
    return ids


def dialogue(seed: int, num_tokens: int = 512, num_turns: int = 8) -> list[Turn]:
    """A dialogue of the held-out split."""
    rng = random.Random(seed)
    writer = DialogueWriter(draw_style(num_tokens, rng), "held_out", rng)
    return [writer.next_turn() for _ in range(num_turns)]


def test_shape_and_size(model: Any) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert model.config.head_dim == 64
    assert model.config.eos_token_id == END_ID
    assert 5.6e6 < sum(parameter.numel() for parameter in model.parameters()) < 5.8e6
    assert (FOLDER / "model.safetensors").stat().st_size < 12e6


def test_template_is_the_format_of_training(chat_tokenizer: Any, tokenizer: Tokenizer) -> None:
    """The prompt that the template builds is what the model was trained on, token for token."""
    for seed in range(40):
        messages: Messages = []
        expected = [BOS_ID]
        for turn in dialogue(seed):
            turn_ids, _ = encode_turn(tokenizer, turn)
            messages.append({"role": "user", "content": message_text(turn.user)})
            prompt = chat_ids(chat_tokenizer, messages)
            assert prompt == (expected + turn_ids)[: len(prompt)]
            messages.append({"role": "assistant", "content": message_text(turn.assistant)})
            expected += turn_ids
            assert chat_ids(chat_tokenizer, messages)[:-1] == expected


def test_reference_answers_are_stable_prefixes(chat_tokenizer: Any, tokenizer: Tokenizer) -> None:
    """Answer ids, decoded, sent back and encoded again, are the same ids at the same place."""
    for seed in range(40, 80):
        messages: Messages = []
        for turn in dialogue(seed):
            messages.append({"role": "user", "content": message_text(turn.user)})
            prompt = chat_ids(chat_tokenizer, messages)
            answer = [id_ for ids, _ in encode_spans(tokenizer, turn.assistant) for id_ in ids] + [END_ID]
            text = chat_tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            following = chat_ids(chat_tokenizer, [*messages, {"role": "user", "content": "Thanks."}])
            assert following[: len(prompt) + len(answer)] == prompt + answer


@torch.no_grad()
def test_generated_answers_are_stable_prefixes(chat_tokenizer: Any, model: Any) -> None:
    """The same for what the model says itself, over several turns that build on each other."""
    for seed in range(100, 106):
        messages: Messages = []
        for turn in dialogue(seed, num_tokens=200, num_turns=4):
            messages.append({"role": "user", "content": message_text(turn.user)})
            prompt = chat_ids(chat_tokenizer, messages)
            inputs = torch.tensor([prompt])
            output = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=40, do_sample=False
            )[0].tolist()
            assert output[-1] == END_ID, chat_tokenizer.decode(output)
            text = chat_tokenizer.decode(output[len(prompt) :], skip_special_tokens=True)
            assert text.startswith(" ")
            messages.append({"role": "assistant", "content": text})
            following = chat_ids(chat_tokenizer, [*messages, {"role": "user", "content": "Thanks."}])
            assert following[: len(output)] == output


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a  b\n\n c\t",
        "Marta's code is 480291.",
        "naïve 東京 🙂 e\u0301",
        "x" * 50,
        "\x00\u2028'sss 's",
    ],
)
def test_any_text_survives_encoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" 480291", add_special_tokens=False).ids) == 6


def test_template_accepts_parts_and_system_messages(chat_tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "image_url"}, {"type": "text", "text": "there."}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": " Hi. "},
        {"role": "user", "content": "Bye."},
    ]
    text = chat_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|user|> Be brief. Hello there.<|end|>"
        "<|assistant|> Hi.<|end|><|user|> Bye.<|end|><|assistant|>"
    )


def test_template_refuses_unknown_roles(chat_tokenizer: Any) -> None:
    with pytest.raises(Exception, match="not wizard"):
        chat_tokenizer.apply_chat_template([{"role": "wizard", "content": "x"}], tokenize=False)


@pytest.mark.parametrize(("split", "least"), [("train", 22), ("held_out", 20)])
def test_recalls_facts_at_512_tokens(model: Any, tokenizer: Tokenizer, split: Split, least: int) -> None:
    """Of 24 questions; the evaluation in the model card has the exact rates."""
    items = [make_item(tokenizer, "single", 512, f"unit test {i}", split) for i in range(24)]
    assert sum(score(model, item).answer_matches for item in items) >= least


def test_recalls_nothing_without_history(model: Any, tokenizer: Tokenizer) -> None:
    items = [make_item(tokenizer, "single", 512, f"unit test {i}", "train") for i in range(8)]
    before = [score(model, item) for item in items]
    for item in items:
        with history_removed(model, list(range(12)), item):
            assert not score(model, item).value_matches
    assert [score(model, item) for item in items] == before


def test_bundled_conversations_are_those_of_the_generator(tokenizer: Tokenizer, chat_tokenizer: Any) -> None:
    bundled = json.loads((ASSETS.parents[1] / "demo" / "conversations.json").read_text())
    assert bundled == write_conversations(tokenizer, "bundled", 24)
    roles = {"human": "user", "gpt": "assistant"}
    for conversation in bundled:
        for item in items_of_conversation(tokenizer, conversation["conversations"]):
            value = tokenizer.decode([item.ids[position] for position in item.value_positions])
            assert value.strip() in {message.get("expected") for message in conversation["conversations"]}
        messages = [
            {"role": roles[message["from"]], "content": message["value"]}
            for message in conversation["conversations"]
        ]
        assert MIN_TOKENS <= len(chat_ids(chat_tokenizer, messages)) - 1 <= MAX_TOKENS


def test_model_card_shows_the_recorded_evaluation() -> None:
    result = json.loads((FOLDER / "evaluation.json").read_text())
    assert (FOLDER / "README.md").read_text() == model_card(result)
    measured = {(row["kind"], row["history_tokens"]) for row in result["recall"]}
    assert {("single", 512), ("single", 1024), ("single", 2000), ("two_hop", 1024)} <= measured


def test_training_form_computes_the_exported_model(tmp_path: Path) -> None:
    """The fast training forward and transformers' Llama agree on the loss of the same weights."""
    weights = init_weights(1)
    export_model(weights, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(4, 2048, (2, 301), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = exported(ids[:, :-1]).logits
        expected = F.cross_entropy(logits.reshape(-1, 2048), ids[:, 1:].reshape(-1), reduction="sum")
        actual = TrainingModel(weights, 300, compiled=False).loss(ids[:, :-1], ids[:, 1:], torch.ones(2, 300))
    assert actual.item() == pytest.approx(expected.item(), rel=1e-3)


def test_orthogonalise_evens_out_singular_values() -> None:
    matrices = torch.randn(3, 64, 192, generator=torch.Generator().manual_seed(0))
    for candidates in (matrices, matrices.mT):
        values = torch.linalg.svdvals(orthogonalise(candidates))
        assert values.shape == (3, 64)
        assert values.min() > 0.5
        assert values.max() < 1.4


def test_curriculum_and_learning_rate() -> None:
    steps = total_steps()
    stages = [stage_of(step) for step in range(steps)]
    assert [(stage, len(list(group))) for stage, group in groupby(stages)] == [
        (stage, stage.num_steps) for stage in CURRICULUM
    ]
    assert steps * TOKENS_PER_STEP == pytest.approx(19.2e6, rel=0.01)
    with pytest.raises(ValueError, match="behind the end"):
        stage_of(steps)
    assert LEARNING_RATE_KNOTS[-1][0] == steps
    assert learning_rate_factor(0) == pytest.approx(1 / 60)
    assert learning_rate_factor(300) == 1.0
    assert learning_rate_factor(steps - 1) == pytest.approx(0.02, abs=0.01)
    assert all(0 < learning_rate_factor(step) <= 1 for step in range(steps))
