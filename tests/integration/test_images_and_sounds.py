"""Conversations with images or sounds come back whole, and one is never taken for another."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from transformers import AutoTokenizer

from demo.server import ServerProcess
from krul_sglang.cli.why import fetch_reasons
from krul_sglang.learning.command import cut_pieces, learn_to_files, own_texts
from krul_sglang.models.checkpoint import Checkpoint
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    POOL_TOKENS,
    STRICT,
    Answer,
    ask,
    assert_nothing_left_behind,
    assert_same,
    bases_server_args,
    push_out,
    settled_stats,
    small_krul_server_args,
    wait_until_written,
)
from tests.support.server_plugin import faulty_loads
from tests.support.tiny_model import build_audio_model, build_vision_model

MEDIUM_TOKENS = 400
"""Of an image or a sound."""
_MEDIUM = "<medium>"
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_SOUND = "<|audio_bos|><|AUDIO|><|audio_eos|>"
_SYSTEM = "<bos><system>Please remember that Ada keeps the number 4821 in a green box under the stairs.<end>"
_TURNS = (
    f"<user>{_MEDIUM}What is the number that Ada keeps?<end><assistant>",
    "Thank you, I will remember it.<end><user>What colour has the box under the stairs?<end><assistant>",
    f"It is painted red and white.<end><user>{_MEDIUM}Let us talk about the weather.<end><assistant>",
    "The harbour of Lund is small.<end><user>What is the number?<end><assistant>",
)


def image(seed: int) -> str:
    """A picture of noise as a data URL."""
    pixels = np.random.default_rng(seed).integers(0, 256, (160, 160, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def sound(seed: int) -> str:
    """16 seconds of a melody as a data URL."""
    pitches = np.random.default_rng(seed).uniform(100, 6000, 64).repeat(4000)
    samples = 0.5 * np.sin(2 * np.pi * np.cumsum(pitches) / 16_000)
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV")
    return f"data:audio/wav;base64,{base64.b64encode(file.getvalue()).decode()}"


@dataclass(frozen=True)
class Medium:
    """What a model takes beside text: its place in a prompt, and how a request brings it.

    ``most``: in one conversation. SGLang's Qwen2-Audio fails at a second sound.
    """

    placeholder: str
    field: str
    make: Callable[[int], str]
    build_model: Callable[[Path], Path]
    most: int


MEDIA = {
    "images": Medium(
        "<|vision_start|><|image_pad|><|vision_end|>", "image_data", image, build_vision_model, 2
    ),
    "sounds": Medium(_SOUND, "audio_data", sound, build_audio_model, 1),
}


def ask_about(server: ServerProcess, medium: Medium, num_turns: int, *seeds: int) -> Answer:
    text = _SYSTEM + "".join(_TURNS[:num_turns])
    payload = {
        "text": text.replace(_MEDIUM, medium.placeholder, medium.most).replace(_MEDIUM, ""),
        medium.field: [medium.make(seed) for seed in seeds[: min(medium.most, text.count(_MEDIUM))]],
        "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
    }
    result = server.post_json("/generate", payload)
    meta = result["meta_info"]
    cached = meta.get("cached_tokens_details") or {"device": 0, "host": 0}
    logprobs = tuple(entry[0] for entry in meta["output_token_logprobs"])
    return Answer(tuple(result["output_ids"]), logprobs, cached["device"], cached["host"])


@dataclass(frozen=True)
class Played:
    """The answers of a conversation about media 1 and 2, and of the same text about medium 3."""

    turns: list[Answer]
    other: Answer

    def all(self) -> list[Answer]:
        return [*self.turns, self.other]


def play(server: ServerProcess, medium: Medium, *, evict: bool) -> Played:
    turns = []
    for num_turns in range(1, len(_TURNS) + 1):
        turns.append(ask_about(server, medium, num_turns, 1, 2))
        if evict:
            push_out(server, num_tokens=POOL_TOKENS, seed=num_turns)
    return Played(turns, ask_about(server, medium, 2, 3))


@dataclass(frozen=True)
class Served:
    played: Played
    again: Answer
    stats: dict[str, Any]
    why: str


@pytest.fixture(scope="module", params=MEDIA.values(), ids=list(MEDIA))
def medium(request: pytest.FixtureRequest) -> Medium:
    return request.param


@pytest.fixture(scope="module")
def model(medium: Medium, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return medium.build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def kept(medium: Medium, model: Path) -> Played:
    """What a server answers that never evicts anything."""
    args = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "16384", "--enable-cache-report")
    with ForkedServer(model, args=args) as server:
        return play(server, medium, evict=False)


@pytest.fixture(scope="module")
def served(medium: Medium, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """``again``: the last turn on a second server, which finds everything on the first one's disk."""
    disk = str(tmp_path_factory.mktemp("ssd"))
    # By default the text before the first one would be computed: that is sooner.
    options = {"ssd_dir": disk, "ssd_capacity": "1GiB", "ssd_timeout": 10.0, "planner": "full-load"}
    args = small_krul_server_args(POOL_TOKENS, options)
    with ForkedServer(model, args=args, env=STRICT) as server:
        played = play(server, medium, evict=True)
        (told,) = fetch_reasons(server.url, rid=None, last=1, api_key=None, timeout_s=60)
        wait_until_written(server)
        assert_nothing_left_behind(server)
        stats = settled_stats(server)
    with ForkedServer(model, args=args, env=STRICT) as server:
        again = ask_about(server, medium, len(_TURNS), 1, 2)
    return Served(played, again, stats, str(told[1]))


def test_every_turn_answers_as_on_a_server_that_never_evicted(kept: Played, served: Served) -> None:
    assert_same(kept.all(), served.played.all())
    assert_same(kept.turns[-1:], [served.again])


def test_answers_depend_on_the_medium(kept: Played) -> None:
    """Without this the equality above could hold although media are mixed up."""
    said = {(answer.output_ids, *np.round(answer.logprobs, 2)) for answer in kept.all()}
    assert len(said) == len(kept.all())


def test_media_came_from_the_host(served: Served, medium: Medium) -> None:
    assert [answer.device_tokens for answer in served.played.turns] == [0] * len(_TURNS)
    first, *others = (answer.host_tokens for answer in served.played.turns)
    assert first == 0
    assert MEDIUM_TOKENS < others[0] <= others[1] < 2 * MEDIUM_TOKENS
    assert max(others[1], medium.most * MEDIUM_TOKENS) < others[2] <= served.again.host_tokens


def test_another_medium_in_the_same_text_is_no_hit(served: Served) -> None:
    assert 0 < served.played.other.host_tokens < 100
    assert "an image or sound" in served.why


def test_the_server_says_that_it_loads_whole_prefixes(served: Served) -> None:
    restore = served.stats["restore"]
    assert restore["mode"]["planner"] == "full-load"
    assert "without images and sounds" in restore["mode"]["why"]
    assert restore["forward"]["head_tokens"] == 0


def test_loads_that_fail_are_computed_with_their_media(kept: Played, medium: Medium, model: Path) -> None:
    """In chunks that end amid a medium."""
    args = (*small_krul_server_args(POOL_TOKENS, {}), "--chunked-prefill-size", "256")
    with ForkedServer(model, args=args, env={**STRICT, **faulty_loads("load-error")}) as server:
        played = play(server, medium, evict=True)
        forward = settled_stats(server)["restore"]["forward"]
    assert_same(kept.all(), played.all())
    assert forward["rescued_tokens"] > MEDIUM_TOKENS
    assert forward["lost_requests"] == 0


def test_text_alone_comes_back_from_bases(tmp_path: Path) -> None:
    """Of a model that sees. What has images comes back as it was."""
    model, images = build_vision_model(tmp_path / "model"), MEDIA["images"]
    list(learn_to_files(Checkpoint(str(model)), None, num_pieces=4, cache_dir=tmp_path))
    args = bases_server_args(POOL_TOKENS, tmp_path, error_budget=0.1, relearn=False)
    prompts = cut_pieces(AutoTokenizer.from_pretrained(model), own_texts(), 500, 3)
    with ForkedServer(model, args=args, env=STRICT) as server:
        seen = ask_about(server, images, 2, 1, 2)
        before = settled_stats(server)["compression"]
        computed = [ask(server, prompt) for prompt in prompts]
        after = settled_stats(server)["compression"]
        push_out(server, num_tokens=POOL_TOKENS, seed="text")
        again = ask_about(server, images, 2, 1, 2)
        decoded = [ask(server, prompt) for prompt in prompts]
        assert_nothing_left_behind(server)
    assert_same([seen], [again])
    assert again.host_tokens > MEDIUM_TOKENS
    assert before["subspace_turns"] < before["turns"]
    assert after["subspace_turns"] - before["subspace_turns"] == len(prompts)
    assert all(answer.host_tokens > 480 for answer in decoded)
    pairs = zip(computed, decoded, strict=True)
    off = [abs(one.logprobs[0] - other.logprobs[0]) for one, other in pairs]
    assert 1e-3 < sum(off) / len(off) < 0.6
