"""A pretrained model, made from its package, answers on a real server, and is restored there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support.forked_server import ForkedServer
from tests.support.scenario import STRICT, ask, assert_nothing_left_behind, push_out, small_krul_server_args

POOL_TOKENS = 1280


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only its folder is printed to stdout: it can be put into another command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KRUL_CACHE_DIR", str(tmp_path_factory.mktemp("models")))
        command = [sys.executable, "-m", "krul_sglang.cli", "model", "smollm2"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (again.stdout, again.stderr) == (result.stdout, ""), "it is there already"
    return Path(result.stdout.removesuffix("\n"))


def test_it_answers_and_its_turns_come_back(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    def prompt_of(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])

    short = prompt_of("What is the capital of France?")
    long = prompt_of(" ".join(f"Item {number} of the list costs {3 * number} coins." for number in range(40)))
    with ForkedServer(smollm2, args=small_krul_server_args(POOL_TOKENS, {}), env=STRICT) as server:
        capital = ask(server, short, max_new_tokens=8)
        first = ask(server, long, max_new_tokens=12)
        push_out(server, num_tokens=POOL_TOKENS, seed="pretrained")
        again = ask(server, long, max_new_tokens=12)
        assert_nothing_left_behind(server)
    assert "Paris" in tokenizer.decode(capital.output_ids)
    assert again.output_ids == first.output_ids
    assert again.logprobs == pytest.approx(first.logprobs, abs=2e-4)
    assert again.host_tokens > len(long) - 32
