"""Vision models: conversations with images come back whole, and an image is never taken for another."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from demo.server import ServerProcess
from krul_sglang.cli.why import fetch_reasons
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    POOL_TOKENS,
    STRICT,
    Answer,
    assert_nothing_left_behind,
    assert_same,
    push_out,
    settled_stats,
    small_krul_server_args,
    wait_until_written,
)
from tests.support.server_plugin import faulty_loads
from tests.support.tiny_model import build_vision_model

IMAGE_TOKENS = 20 * 20
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_SYSTEM = "<bos><system>Please remember that Ada keeps the number 4821 in a green box under the stairs.<end>"
_TURNS = (
    f"<user>{_IMAGE}What is the number that Ada keeps?<end><assistant>",
    "Thank you, I will remember it.<end><user>What colour has the box under the stairs?<end><assistant>",
    f"It is painted red and white.<end><user>{_IMAGE}Let us talk about the weather.<end><assistant>",
    "The harbour of Lund is small.<end><user>What is the number?<end><assistant>",
)


def image(seed: int) -> str:
    """A picture of noise as a data URL."""
    pixels = np.random.default_rng(seed).integers(0, 256, (160, 160, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def ask_about(server: ServerProcess, num_turns: int, *seeds: int) -> Answer:
    text = _SYSTEM + "".join(_TURNS[:num_turns])
    payload = {
        "text": text,
        "image_data": [image(seed) for seed in seeds[: text.count(_IMAGE)]],
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
    """The answers of a conversation about images 1 and 2, and of the same text about image 3."""

    turns: list[Answer]
    other: Answer

    def all(self) -> list[Answer]:
        return [*self.turns, self.other]


def play(server: ServerProcess, *, evict: bool) -> Played:
    turns = []
    for num_turns in range(1, len(_TURNS) + 1):
        turns.append(ask_about(server, num_turns, 1, 2))
        if evict:
            push_out(server, num_tokens=POOL_TOKENS, seed=num_turns)
    return Played(turns, ask_about(server, 2, 3))


@dataclass(frozen=True)
class Served:
    played: Played
    again: Answer
    stats: dict[str, Any]
    why: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def kept(model: Path) -> Played:
    """What a server answers that never evicts anything."""
    args = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "16384", "--enable-cache-report")
    with ForkedServer(model, args=args) as server:
        return play(server, evict=False)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """``again``: the last turn on a second server, which finds everything on the first one's disk."""
    disk = str(tmp_path_factory.mktemp("ssd"))
    # By default the text before the first image would be computed: that is sooner.
    options = {"ssd_dir": disk, "ssd_capacity": "1GiB", "ssd_timeout": 10.0, "planner": "full-load"}
    args = small_krul_server_args(POOL_TOKENS, options)
    with ForkedServer(model, args=args, env=STRICT) as server:
        played = play(server, evict=True)
        (told,) = fetch_reasons(server.url, rid=None, last=1, api_key=None, timeout_s=60)
        wait_until_written(server)
        assert_nothing_left_behind(server)
        stats = settled_stats(server)
    with ForkedServer(model, args=args, env=STRICT) as server:
        again = ask_about(server, len(_TURNS), 1, 2)
    return Served(played, again, stats, str(told[1]))


def test_every_turn_answers_as_on_a_server_that_never_evicted(kept: Played, served: Served) -> None:
    assert_same(kept.all(), served.played.all())
    assert_same(kept.turns[-1:], [served.again])


def test_answers_depend_on_the_image(kept: Played) -> None:
    """Without this the equality above could hold although images are mixed up."""
    assert len({answer.output_ids for answer in kept.all()}) == len(kept.all())


def test_images_came_from_the_host(served: Served) -> None:
    assert [answer.device_tokens for answer in served.played.turns] == [0] * len(_TURNS)
    first, *others = (answer.host_tokens for answer in served.played.turns)
    assert first == 0
    assert IMAGE_TOKENS < others[0] <= others[1] < 2 * IMAGE_TOKENS < others[2] <= served.again.host_tokens


def test_another_image_in_the_same_text_is_no_hit(served: Served) -> None:
    assert 0 < served.played.other.host_tokens < 100
    assert "an image or sound" in served.why


def test_the_server_says_that_it_loads_whole_prefixes(served: Served) -> None:
    restore = served.stats["restore"]
    assert restore["mode"]["planner"] == "full-load"
    assert "without images and sounds" in restore["mode"]["why"]
    assert restore["forward"]["head_tokens"] == 0


def test_loads_that_fail_are_computed_with_their_images(kept: Played, model: Path) -> None:
    """In chunks that end amid an image."""
    args = (*small_krul_server_args(POOL_TOKENS, {}), "--chunked-prefill-size", "256")
    with ForkedServer(model, args=args, env={**STRICT, **faulty_loads("load-error")}) as server:
        played = play(server, evict=True)
        forward = settled_stats(server)["restore"]["forward"]
    assert_same(kept.all(), played.all())
    assert forward["rescued_tokens"] > IMAGE_TOKENS
    assert forward["lost_requests"] == 0
