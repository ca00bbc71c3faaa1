"""A real SGLang server: ready, generating, and gone without a trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from demo.conversations import Conversation, UserTurn
from demo.player import Player
from demo.server import ServerError, ServerProcess, find_free_port, start_servers
from krul_sglang.cli import selftest
from krul_sglang.cli.server_client import CannotRunError
from krul_sglang.cli.timed_answer import PlayError
from tests.support.forked_server import ForkedServer
from tests.support.scenario import play_chats
from tests.support.tiny_model import build_tiny_model

pytestmark = pytest.mark.server

_SERVER_ARGS = ("--max-total-tokens", "1024", "--page-size", "16", "--dtype", "float32")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[ServerProcess]:
    with ForkedServer(model_path, args=_SERVER_ARGS) as server:
        yield server


def process_tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def names_left(tree: list[psutil.Process], timeout_s: float) -> list[str]:
    """Command lines of the processes that are still there after ``timeout_s``; zombies do not count."""
    deadline = time.monotonic() + timeout_s

    def is_alive(process: psutil.Process) -> bool:
        try:
            return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    while True:
        alive = [process for process in tree if is_alive(process)]
        if not alive or time.monotonic() > deadline:
            return [" ".join(p.cmdline()) for p in alive]
        time.sleep(0.1)


def test_generates_deterministically_and_reports_its_pool(server: ServerProcess) -> None:
    request = {
        "input_ids": list(range(100, 300)),
        "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True},
    }
    first, second = server.post_json("/generate", request), server.post_json("/generate", request)
    assert first["meta_info"]["prompt_tokens"] == 200
    assert first["output_ids"] == second["output_ids"]
    assert len(set(first["output_ids"])) > 6, (
        "the tiny model repeats itself: equal answers would prove nothing"
    )
    # Whole pages of the prompt, but never its last token: 12 pages of 16.
    assert second["meta_info"]["cached_tokens_details"] == {"device": 192, "host": 0}
    assert server.server_info()["max_total_num_tokens"] == 1024


def test_an_error_answer_names_the_request_and_quotes_the_log(server: ServerProcess) -> None:
    with pytest.raises(ServerError, match=r"GET /no_such_path answered 404") as caught:
        server.get_json("/no_such_path")
    assert "The server is fired up" in str(caught.value) or " | " in str(caught.value)


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path, model_path: Path) -> None:
    log_path = tmp_path / "server.log"
    broken = ServerProcess(model_path, args=["--no-such-flag"], log_path=log_path, ready_timeout_s=300)
    with pytest.raises(ServerError, match=r"ended with status 2 before it was ready") as caught:
        broken.start()
    assert "--no-such-flag" in str(caught.value)
    assert not broken.is_running()


def test_one_server_that_cannot_start_ends_those_that_start_with_it(tmp_path: Path, model_path: Path) -> None:
    good = ForkedServer(model_path, args=_SERVER_ARGS, log_path=tmp_path / "good.log")
    broken = ForkedServer(model_path, args=["--no-such-flag"], log_path=tmp_path / "broken.log")
    with pytest.raises(ServerError, match=r"ended with status 2 before it was ready") as caught:
        start_servers([good, broken])
    assert "--no-such-flag" in str(caught.value)
    assert not good.is_running()
    with pytest.raises(ServerError, match="was started before"):
        good.start()


def test_the_player_reads_where_the_prompt_came_from(server: ServerProcess) -> None:
    conversation = Conversation(
        "a", (UserTurn("Ada keeps the number 4821. " * 20), UserTurn("Which number?"))
    )
    with Player(server.url, max_tokens=8) as player:
        player.warm_up()
        first, second = play_chats(player, [conversation], {("a", 1): "The number is 4821."})
        repeated, _ = play_chats(player, [conversation])
    assert (first.turn, first.device_tokens, first.host_tokens) == (1, 0, 0)
    assert first.computed_tokens == first.prompt_tokens > 64
    # The second prompt begins with the first one, whose whole pages are on the device.
    assert second.device_tokens >= first.prompt_tokens // 16 * 16 - 16
    assert second.host_tokens == 0
    assert second.computed_tokens == second.prompt_tokens - second.device_tokens > 0
    assert 0 < first.ttft_s <= first.total_s
    assert first.completion_tokens == 8
    assert repeated.answer == first.answer != ""


def test_a_player_without_a_server_names_the_turn() -> None:
    with (
        Player(f"http://127.0.0.1:{find_free_port()}", max_tokens=8) as player,
        pytest.raises(PlayError, match=r"no answer to conversation 'a', turn 1"),
    ):
        list(play_chats(player, [Conversation("a", (UserTurn("Hello"),))]))


def test_the_probe_refuses_a_server_without_krul(server: ServerProcess) -> None:
    with pytest.raises(CannotRunError, match="runs without krul"):
        selftest.run_selftest(selftest.SelftestConfig(server.url))


def test_the_probe_fails_on_a_server_that_only_evicts(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for a krul server, a plain one loses the prompt: noise really evicts, and the probe can fail."""
    limits = selftest.ServerLimits(pool_tokens=1024, max_input_tokens=1018, page_size=16)
    monkeypatch.setattr(selftest, "_read_limits", lambda client: limits)
    result = selftest.run_selftest(selftest.SelftestConfig(server.url))
    assert (result.again.prompt_tokens, result.again.device_tokens, result.again.host_tokens) == (600, 0, 0)
    assert result.equal
    assert len(set(result.cold.output_ids)) > 12
    assert len(result.again.top_logprobs) == 24
    assert result.verdict.startswith("FAILED: the second run took only 0 of 600 prompt tokens")


def test_an_interrupted_demo_exits_with_130_and_leaves_no_process(tmp_path: Path, model_path: Path) -> None:
    conversations = tmp_path / "conversations.json"
    turns = [{"role": "user", "content": "The harbour of Lund is small. " * 9}] * 2
    conversations.write_text(json.dumps([{"messages": turns}] * 3))
    command = [sys.executable, "-m", "demo", "--model-path", str(model_path)]
    with subprocess.Popen(
        [*command, "--conversations", str(conversations)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("krul: starting") for line in lines)
        deadline = time.monotonic() + 60
        while len(tree := process_tree(process.pid)) < 7 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(tree) >= 7, "demo, three supervisors, three servers"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "demo: error: interrupted"
    assert names_left(tree, timeout_s=30) == []


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=lambda end: end.name)
def test_a_killed_parent_leaves_no_process(tmp_path: Path, end: signal.Signals) -> None:
    """The parent runs a command that, like a server, has a child (ignoring SIGTERM); then it is killed."""
    parent = tmp_path / "parent.py"
    parent.write_text(
        textwrap.dedent(
            """
            import sys, time
            from demo.server import ServerProcess

            stubborn = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
            command = f"import subprocess,sys,time; subprocess.Popen([sys.executable,'-c',{stubborn!r}]);"
            command += "time.sleep(600)"
            server = ServerProcess("no-model")
            server.command = [sys.executable, "-c", command]
            server._launch()
            print(server.pid, flush=True)
            time.sleep(600)
            """
        )
    )
    with subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        supervisor_pid = int(process.stdout.readline())
        deadline = time.monotonic() + 60
        while len(tree := process_tree(supervisor_pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(tree) == 3, [p.cmdline() for p in tree]
        os.kill(process.pid, end)
        process.wait()
    assert names_left(tree, timeout_s=60) == []


def test_stop_ends_every_process_and_the_port(model_path: Path) -> None:
    server = ForkedServer(model_path, args=_SERVER_ARGS)
    server.start()
    tree = process_tree(server.pid)
    assert len(tree) >= 4, "supervisor, server, scheduler, detokenizer"
    server.stop()
    # A forked supervisor says its status right before its end.
    assert names_left(tree, timeout_s=10) == []
    with pytest.raises(ServerError, match="GET /server_info failed"):
        server.server_info()
    server.stop()  # a second stop is harmless


def test_a_killed_supervisor_takes_the_server_with_it(server: ServerProcess) -> None:
    # Last in the file: it ends the server of the module.
    tree = process_tree(server.pid)
    assert len(tree) >= 4, "supervisor, server, scheduler, detokenizer"
    os.kill(server.pid, signal.SIGKILL)
    assert names_left(tree, timeout_s=60) == []
