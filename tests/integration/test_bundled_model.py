"""The bundled model on the real server: the same answers as transformers, and recall through krul."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.app import BUNDLED_CONVERSATIONS
from demo.conversations import load_conversations
from demo.server import ServerProcess
from krul_sglang.cli.chat import Talk
from krul_sglang.cli.timed_answer import TurnResult
from krul_sglang.config import KrulConfig
from krul_sglang.models.find import REFERENCE_MODEL
from tests.support.forked_server import ForkedServer, said_by_a_fork
from tests.support.scenario import KRUL, STRICT, assert_nothing_left_behind, krul_stats, recall_facts

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_CONVERSATIONS = 6


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    args = (
        *("--dtype", "float32"),
        *("--page-size", "16"),
        *("--max-total-tokens", "2048"),
        *("--unified-cache-external-linker-config", '{"host_memory": "256MiB", "planner": "full-load"}'),
        "--enable-cache-report",
        *KRUL,
    )
    with ForkedServer(REFERENCE_MODEL, args=args, env=STRICT) as running:
        yield running


@pytest.mark.usefixtures("server")
def test_greedy_answers_equal_those_of_transformers(server: ServerProcess) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REFERENCE_MODEL)
    model = AutoModelForCausalLM.from_pretrained(REFERENCE_MODEL, dtype=torch.float32)
    conversations = load_conversations(BUNDLED_CONVERSATIONS).select(num_conversations=3, turns=2)
    for conversation in conversations:
        prompt = tokenizer.apply_chat_template(
            conversation.messages(1, {}), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = prompt["input_ids"]
        with torch.no_grad():
            output = model.generate(ids, max_new_tokens=32, do_sample=False)
        wanted = output[0, ids.shape[1] :].tolist()
        answer = server.post_json(
            "/generate",
            {"input_ids": ids[0].tolist(), "sampling_params": {"max_new_tokens": 32, "temperature": 0}},
        )
        assert answer["output_ids"] == wanted
        assert len(wanted) > 2


def test_facts_are_recalled_from_restored_history(server: ServerProcess) -> None:
    right, num_asked = recall_facts(server, NUM_CONVERSATIONS)
    assert len(right) > num_asked // 2
    # The model card says 95% and more on one-fact questions; some here need two facts or a count.
    assert sum(right) / len(right) > 0.8
    assert_nothing_left_behind(server)


def run_example(name: str, *arguments: str) -> list[str]:
    """The lines that an example prints."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    return result.stdout.splitlines()


def host_tokens(line: str) -> int:
    return int(line.split("host ")[1].split()[0].strip(";"))


@pytest.mark.parametrize("name", ["multi_turn_openai.py", "multi_turn_frontend.py"])
def test_conversations_of_the_examples_come_back_from_the_host(server: ServerProcess, name: str) -> None:
    second_turns = [line for line in run_example(name, server.url) if line.startswith("turn 2")]
    assert len(second_turns) == 4
    assert all(host_tokens(line) > 400 for line in second_turns), second_turns


def test_the_agent_of_the_example_says_when_it_comes_back(server: ServerProcess) -> None:
    before = krul_stats(server)["hints"]
    last = [line for line in run_example("tool_agent.py", server.url) if line.startswith("step 3")]
    assert len(last) == 3
    assert all(host_tokens(line) > 300 for line in last), last
    assert krul_stats(server)["hints"] > before
    assert krul_stats(server)["request_hints"]["ignored"] == {}


def test_the_team_of_the_example_shares_its_system_prompt(server: ServerProcess) -> None:
    steps = run_example("agent_team.py", server.url)
    cached = [int(step.split(": ")[1].split()[0]) for step in steps]
    # The second agent finds what the first one has sent, each later one what it had sent itself.
    assert all(tokens > 300 for tokens in cached[1:]), steps
    assert [step.endswith("done") for step in steps] == [True, False, False, False, True, True]
    assert krul_stats(server)["request_hints"]["ignored"] == {}


def test_a_session_is_replayed_with_its_own_answers(server: ServerProcess, tmp_path: Path) -> None:
    paths = []
    for user in range(3):
        text = " ".join(f"Line {line} of user {user} says nothing new." for line in range(60))
        turns = ((0.0, f"{text} First question?", " First answer."), (20.0, " Second question?", " Bye."))
        lines = [json.dumps({"timestamp": at, "input": said, "output": got}) for at, said, got in turns]
        paths.append(tmp_path / f"user{user}.jsonl")
        paths[-1].write_text("\n".join(lines))
    lines = run_example("replay_session.py", server.url, *map(str, paths), "--speed", "4")
    second = [line for line in lines if " turn 2: " in line]
    assert len(second) == 3
    assert all(int(line.split("device ")[1].split(",")[0]) + host_tokens(line) > 400 for line in second), (
        second
    )


def test_an_engine_in_the_same_process_restores() -> None:
    said = said_by_a_fork("examples.offline_engine", str(REFERENCE_MODEL))
    second = [line for line in said.splitlines() if "round 2" in line]
    assert len(second) == 6
    assert all(host_tokens(line) > 300 for line in second), second


def test_the_launch_script_names_flags_and_options_that_exist() -> None:
    """Its command is printed instead of run: there is no GPU."""
    env = {"PATH": os.environ["PATH"], "MODEL": "m", "SSD": "/ssd"}
    script = (EXAMPLES / "serve_gpu.sh").read_text().replace("exec python", "printf '%s\\n' python")
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=env)
    words = result.stdout.splitlines()
    options = json.loads(words[words.index("--unified-cache-external-linker-config") + 1])
    KrulConfig.load(options)
    known = said_by_a_fork("sglang.launch_server", "--help")
    assert all(word in known for word in words if word.startswith("--")), words


def test_selftest_passes_on_this_server(server: ServerProcess) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "krul_sglang.cli", "selftest", "--url", server.url],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.strip().splitlines()) == 1
    assert_nothing_left_behind(server)


def test_a_chat_that_was_evicted_comes_back_and_is_seen(server: ServerProcess) -> None:
    """``krul-sglang chat`` evicts, and ``krul-sglang top`` shows what that brought back."""

    async def chat() -> list[TurnResult]:
        talk = Talk("with krul", server.url, api_key=None, max_tokens=16)
        await talk.ask("The harbour of Lund is small. " * 20, lambda piece: None)
        evicted = await asyncio.to_thread(talk.evict, 10_000)
        assert evicted == 2560
        await talk.ask("How large is the harbour of Lund?", lambda piece: None)
        return talk.turns

    first, second = asyncio.run(chat())
    assert first.answer
    assert second.device_tokens == 0
    assert second.host_tokens > 0.8 * first.prompt_tokens
    result = subprocess.run(
        [sys.executable, "-m", "krul_sglang.cli", "top", "--url", server.url],
        capture_output=True,
        text=True,
        check=True,
    )
    shown = [" ".join(line.split()) for line in result.stdout.splitlines()]
    saved = krul_stats(server)["restore"]["plans"]
    assert saved["saved_s"] != 0
    tokens = saved["prefix_tokens"] - saved["head_tokens"]
    assert any(line.startswith(f"tokens saved {tokens:,} loaded") for line in shown), result.stdout
    assert any(line.startswith(f"restored {saved['loads']:,} requests, 0 failed") for line in shown)
    restores = shown.index("tokens first/last head planned ms took ms load compute note")
    assert shown[restores + 1].split()[0] == f"{second.host_tokens:,}"
    # Used last, and stored to the last full page of both turns.
    names = next(i for i, line in enumerate(shown) if line.startswith("first page"))
    # There is a column for tenants if anybody has sent a salt.
    column = shown[names].replace("first page", "page").split().index("tokens")
    assert int(shown[names + 1].split()[column].replace(",", "")) >= second.prompt_tokens // 16 * 16
