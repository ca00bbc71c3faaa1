"""LoRA adapters: each conversation comes back as that of its adapter, and is never shared with another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from demo.server import ServerProcess
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    POOL_TOKENS,
    STRICT,
    Answer,
    ask,
    assert_nothing_left_behind,
    assert_same,
    push_out,
    random_prompt,
    settled_stats,
    small_krul_server_args,
    wait_until_written,
)
from tests.support.server_plugin import faulty_loads
from tests.support.tiny_model import build_adapter

NAMES = (None, "ada", "bob")
"""Of adapters; None is the model without one."""
PROMPT = random_prompt("adapters", 500)


def adapter_args(adapters: dict[str, Path]) -> tuple[str, ...]:
    paths = (f"{name}={path}" for name, path in adapters.items())
    return ("--lora-backend", "torch_native", "--max-lora-rank", "8", "--lora-paths", *paths)


def ask_all(server: ServerProcess) -> list[Answer]:
    return [ask(server, PROMPT, lora_path=name, max_new_tokens=12) for name in NAMES]


def other_turns(server: ServerProcess, before: Sequence[Answer]) -> list[Answer]:
    prompts = ([*PROMPT, *answer.output_ids, *random_prompt("more", 30)] for answer in before)
    return [
        ask(server, prompt, lora_path=name, max_new_tokens=12)
        for name, prompt in zip(NAMES, prompts, strict=True)
    ]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: build_adapter(root / name, seed=seed) for seed, name in enumerate(("ada", "bob"))}


@pytest.fixture(scope="module")
def kept(tiny_models: dict[str, Path], adapters: dict[str, Path]) -> tuple[list[Answer], list[Answer]]:
    """Two turns of each on a server that never evicts anything."""
    args = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "16384", "--enable-cache-report")
    with ForkedServer(tiny_models["float32"], args=(*args, *adapter_args(adapters))) as server:
        first = ask_all(server)
        return first, other_turns(server, first)


def serving(
    model: Path, adapters: dict[str, Path], options: dict[str, Any], env: dict[str, str] | None = None
) -> ForkedServer:
    args = (*small_krul_server_args(POOL_TOKENS, options), *adapter_args(adapters))
    return ForkedServer(model, args=args, env=STRICT | (env or {}))


@pytest.mark.parametrize("fault", [None, "load-error"])
def test_each_adapter_finds_its_own_turns(
    fault: str | None,
    tiny_models: dict[str, Path],
    adapters: dict[str, Path],
    kept: tuple[list[Answer], list[Answer]],
) -> None:
    env = {} if fault is None else faulty_loads(fault)
    with serving(tiny_models["float32"], adapters, {}, env) as server:
        first = ask_all(server)
        push_out(server, num_tokens=POOL_TOKENS, seed="adapters")
        later = other_turns(server, first)
        if fault is None:
            assert_nothing_left_behind(server)
        restore = settled_stats(server)["restore"]
    assert_same(kept[0], first)
    assert_same(kept[1], later)
    assert len({answer.output_ids for answer in first}) == len(NAMES)
    assert [answer.host_tokens for answer in first] == [0, 0, 0]
    assert all(answer.host_tokens > 400 for answer in later)
    assert restore["mode"]["planner"] == "full-load"
    assert "without adapters" in restore["mode"]["why"]
    assert (restore["forward"]["rescued_requests"] > 0) == (fault is not None)


def test_an_adapter_of_the_same_name_and_other_weights_finds_nothing(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Also at the same path, and in the same store; the same weights find it."""
    path = tmp_path / "ada"
    options = {"ssd_dir": str(tmp_path / "ssd"), "ssd_capacity": "1GiB", "ssd_timeout": 10.0}
    found = {}
    for seed in (1, 2, 1):
        with serving(tiny_models["float32"], {"ada": build_adapter(path, seed=seed)}, options) as server:
            answer = ask(server, PROMPT, lora_path="ada")
            found.setdefault(seed, []).append(answer)
            if not answer.host_tokens:
                wait_until_written(server)
    first, again = found[1]
    assert [answer.host_tokens for answer in (first, *found[2])] == [0, 0]
    assert again.host_tokens > 400
    assert_same([first], [again])
    assert found[2][0].output_ids != first.output_ids
