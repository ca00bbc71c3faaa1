"""Bases that are learned beside a running server: the process that does it, and the server that switches."""

from __future__ import annotations

import fcntl
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

from demo.server import ServerProcess
from krul_backend.codec.subspace.bases import ModelBases, older_path, replace_bases
from krul_backend.daemon.client.admin import AdminClient
from krul_sglang.learning import command
from krul_sglang.learning.background import (
    BackgroundLearningError,
    LearningProcess,
    RecentTurns,
    check_memory,
)
from krul_sglang.learning.bases import LearningError
from krul_sglang.learning.command import (
    cut_pieces,
    ensure_bases,
    learn_to_files,
    memory_of_learning,
    own_texts,
    relearn_bases,
)
from krul_sglang.models.checkpoint import Checkpoint, bases_path
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    PAGE_SIZE,
    STRICT,
    STRICT_ON_TWO_CORES,
    Answer,
    ask,
    assert_nothing_left_behind,
    bases_server_args,
    krul_stats,
    push_out,
    random_prompt,
    request_payload,
    settled_stats,
    wait_for_probes,
    wait_until,
)

POOL_TOKENS = 4096


@contextmanager
def learning_elsewhere(path: Path) -> Iterator[None]:
    """Another process of the host has begun to learn these bases, and goes on until the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def learn_few(model: Path, path: Path) -> None:
    """Learn from little text, which is fast."""
    assert list(learn_to_files(Checkpoint(str(model)), path, num_pieces=4, cache_dir=path.parent))


@pytest.fixture(scope="module")
def tiny(tiny_models: dict[str, Path]) -> Checkpoint:
    return Checkpoint(str(tiny_models["float32"]))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_bases_are_learned_only_where_there_are_no_sound_ones(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "NUM_PIECES", 3)
    loaded, said = list[str](), list[str]()

    def learn() -> ModelBases:
        (path,) = ensure_bases(tiny, tmp_path, said.append, before_loading=lambda: loaded.append("once"))
        assert path == bases_path(tiny, tmp_path)
        return ModelBases.load(path)

    first = learn()
    assert len(loaded) == 1
    assert any(line.startswith("wrote ") for line in said)
    assert learn().digest == first.digest
    assert len(loaded) == 1
    cut_short(bases_path(tiny, tmp_path))
    # What was stored in them before can be decoded again.
    assert learn().digest == first.digest
    assert len(loaded) == 2


def test_a_hub_name_is_learned_of_where_the_server_keeps_its_weights(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang keeps weights in the download directory, and all else in the hub's own cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(command, "NUM_PIECES", 3)
    for file in Path(tiny.path).iterdir():
        root = tmp_path / ("weights" if file.suffix == ".safetensors" else "hub") / "models--org--tiny"
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / "v2").write_text("b" * 40)
        (root / "snapshots" / ("b" * 40)).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, root / "snapshots" / ("b" * 40))
    named = Checkpoint("org/tiny", "v2", str(tmp_path / "weights"))
    assert named.num_weight_bytes() == tiny.num_weight_bytes() > 0
    (path,) = ensure_bases(named, tmp_path, lambda line: None)
    assert path == bases_path(named, tmp_path)
    (same,) = ensure_bases(tiny, tmp_path, lambda line: None)
    assert ModelBases.load(path).digest == ModelBases.load(same).digest


def test_a_process_takes_what_another_one_of_the_host_has_learned(tiny: Checkpoint, tmp_path: Path) -> None:
    path = bases_path(tiny, tmp_path)
    with learning_elsewhere(path):
        process = LearningProcess(tiny, tmp_path, 1)
        learn_few(Path(tiny.path), path)
        content = path.read_bytes()
    assert list(process.lines()) == []
    assert path.read_bytes() == content
    process.close()


@pytest.fixture
def learned(tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of bases from little text."""
    monkeypatch.setattr(command, "NUM_PIECES", 3)
    (path,) = ensure_bases(tiny, tmp_path, lambda line: None)
    return path


def test_bases_are_learned_again_if_recent_turns_are_clearly_smaller_in_them(
    tiny: Checkpoint, learned: Path, tmp_path: Path
) -> None:
    before = ModelBases.load(learned).digest
    unlike = [random_prompt(("unlike", number), 300) for number in range(6)]
    said = list[str]()
    relearn_bases(tiny, tmp_path, unlike, 0.3, said.append)
    assert said[0] == "learning again from 3 pieces of the program's text and 4 of recent turns"
    after = ModelBases.load(learned).digest
    assert after != before
    assert ModelBases.load(older_path(learned, before)).digest == before
    # Text like that from which they were learned is not smaller in bases that are learned once more.
    with pytest.raises(LearningError, match="not clearly better: recent text would take"):
        relearn_bases(tiny, tmp_path, unlike[::-1], 0.3, said.append)
    assert ModelBases.load(learned).digest == after


def test_a_process_is_given_recent_turns_but_no_file_of_them(tiny: Checkpoint, tmp_path: Path) -> None:
    """More than a pipe holds at once. There are no bases that could be learned again."""
    turns = RecentTurns([random_prompt("private", 1024)] * 24, 0.3)
    process = LearningProcess(tiny, tmp_path / "cache", 1, turns)
    assert "300" not in orjson.dumps(process._process.args).decode()
    with pytest.raises(BackgroundLearningError, match="no bases in"):
        list(process.lines())
    process.close()
    assert [file.suffix for file in (tmp_path / "cache").rglob("*") if file.is_file()] == [".json", ".lock"]


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    process = LearningProcess(Checkpoint(str(tmp_path)), tmp_path / "cache", 1)
    with pytest.raises(BackgroundLearningError, match="there are no weights in"):
        list(process.lines())
    process.close()


@pytest.mark.parametrize("end", [LearningProcess.close, lambda process: process._process.stdin.close()])
def test_a_process_ends_with_its_server(
    tiny: Checkpoint, tmp_path: Path, end: Callable[[LearningProcess], None]
) -> None:
    """The other end of its standard input is closed when the server is gone, however it ended."""
    with learning_elsewhere(bases_path(tiny, tmp_path)):
        process = LearningProcess(tiny, tmp_path, 1)
        end(process)
        with pytest.raises(BackgroundLearningError, match="said nothing"):
            list(process.lines())
    process.close()


def test_what_could_take_the_servers_memory_is_not_learned() -> None:
    check_memory(1 << 20)
    with pytest.raises(BackgroundLearningError, match=r"about 1024.0 TiB .* `krul-sglang learn`"):
        check_memory(1 << 50)


def test_learning_takes_memory_for_its_texts(tiny: Checkpoint, tmp_path: Path) -> None:
    assert 0 < memory_of_learning(tiny, 1) < 1 << 30
    with pytest.raises(LearningError, match="cannot be shared by 3 ranks"):
        memory_of_learning(tiny, 3)


def familiar_prompt(model: str, num_tokens: int) -> list[int]:
    """Text that comes with the program, which bases were learned from."""
    (piece,) = cut_pieces(AutoTokenizer.from_pretrained(model), own_texts(), num_tokens, 1)
    return piece


def restored_logprob(server: ServerProcess, prompt: list[int], answer: Answer) -> float:
    """How likely an earlier answer is after its restored prompt of whole pages: the mean over its tokens."""
    fields = {"logprob_start_len": len(prompt) - 1, "max_new_tokens": 1}
    result = server.post_json("/generate", request_payload([*prompt, *answer.output_ids], **fields))
    assert result["meta_info"]["cached_tokens_details"]["host"] > len(prompt) - 2 * PAGE_SIZE
    logprobs = [entry[0] for entry in result["meta_info"]["input_token_logprobs"][1:]]
    assert len(logprobs) == len(answer.output_ids)
    return float(np.mean(logprobs))


def test_a_server_stores_natively_until_it_has_bases_and_then_in_them(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    path = bases_path(tiny, tmp_path)
    ssd = {"ssd_dir": str(tmp_path / "ssd"), "ssd_capacity": "2GiB"}
    args = (*bases_server_args(POOL_TOKENS, tmp_path, error_budget=0.1, **ssd), "--enable-metrics")
    with learning_elsewhere(path):
        server = ForkedServer(tiny.path, args=args, env=STRICT)
        server.start()
        try:
            native = random_prompt("native", 320)
            ask(server, native)
            stats = settled_stats(server)["compression"]
            assert stats["budget"]["bases"] is None
            assert stats["budget"]["bases_state"].startswith("learning")
            assert stats["turns"] > 0
            assert stats["subspace_turns"] == 0
            learn_few(Path(tiny.path), path)
        except BaseException:
            server.stop()
            raise
    try:
        wait_until(lambda: krul_stats(server)["compression"]["budget"]["bases"] is not None, "bases")
        compressed = familiar_prompt(tiny.path, 320)
        ask(server, compressed)
        stats = settled_stats(server)["compression"]
        assert stats["subspace_turns"] == 1
        assert stats["budget"]["bases_state"] == "learned while serving"
        prompts = (native, compressed)
        computed = [ask(server, prompt) for prompt in prompts]
        assert min(answer.device_tokens for answer in computed) > 300
        push_out(server, num_tokens=POOL_TOKENS, seed="restored")
        for prompt, before, tolerance in zip(prompts, computed, (1e-3, 1.0), strict=True):
            expected = pytest.approx(np.mean(before.logprobs), abs=tolerance)
            assert restored_logprob(server, prompt, before) == expected
        text = settled_stats(server)["compression"]["budget"]["text"]
        with urllib.request.urlopen(f"{server.url}/metrics") as page:
            metrics = page.read().decode()
        assert f'krul_text_offset_mean{{tp_rank="0"}} {text["mean_offset"]}' in metrics
        with AdminClient(krul_stats(server)["daemon"]["endpoint"]) as daemon:
            shared = [info for info in daemon.list_segments() if info.codec == "bases"]
        # One names the newest.
        assert sorted(info.num_bytes for info in shared) == [64, path.stat().st_size]
        assert_nothing_left_behind(server)
        assert "turns are stored in bases" in server.log_text()
    finally:
        server.stop()


def test_unlike_turns_lead_to_new_bases_and_old_ones_are_still_decoded(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    path = bases_path(tiny, tmp_path)
    learn_few(Path(tiny.path), path)
    first = ModelBases.load(path).digest
    ssd = {"ssd_dir": str(tmp_path / "ssd"), "ssd_capacity": "1GiB"}
    # Of familiar text 0.0001 lies outside of the bases, of random tokens 0.2.
    args = (*bases_server_args(2048, tmp_path, error_budget=0.1, probe_share=0, **ssd), "--enable-metrics")
    familiar = familiar_prompt(tiny.path, 400)

    def budget_of(server: ServerProcess) -> dict[str, Any]:
        budget: dict[str, Any] = settled_stats(server)["compression"]["budget"]
        return budget

    with ForkedServer(tiny.path, args=args, env=STRICT) as server:
        num_compressed = settled_stats(server)["compression"]["subspace_turns"]
        computed = ask(server, familiar)
        stats = settled_stats(server)["compression"]
        assert stats["subspace_turns"] == num_compressed + 1
        assert stats["budget"]["unfamiliar_turns"] == 0
        for number in range(9):
            ask(server, random_prompt(("unlike", number), 600), max_new_tokens=2)
            # One at a time: turns that wait for a busy thread may be stored natively, unmeasured.
            stats = settled_stats(server)["compression"]
        assert stats["subspace_turns"] == num_compressed + 1
        assert stats["budget"]["unfamiliar_turns"] == 9
        wait_until(lambda: budget_of(server)["bases"] != first[:16], "new bases", timeout_s=600)
        # They are in use from the next turn on.
        for number in range(3):
            ask(server, random_prompt(("like the unlike", number), 600), max_new_tokens=2)
            stats = settled_stats(server)["compression"]
        assert stats["subspace_turns"] == num_compressed + 1 + 3
        budget = stats["budget"]
        assert (budget["bases_state"], budget["bases_held"]) == ("learned again", 2)
        assert (budget["relearned"], budget["relearning_refused"]) == (1, None)
        with urllib.request.urlopen(f"{server.url}/metrics") as page:
            metrics = page.read().decode()
        assert 'krul_bases_relearned{tp_rank="0"} 1' in metrics
        assert 'krul_bases_held{tp_rank="0"} 2' in metrics
        # Both kinds come back, in one server and from both bases.
        push_out(server, num_tokens=2048, seed="relearned")
        # After another text the mean would be lower by 2.4 or more.
        expected = pytest.approx(np.mean(computed.logprobs), abs=1.0)
        assert restored_logprob(server, familiar, computed) == expected
        again = ask(server, random_prompt(("like the unlike", 2), 600), max_new_tokens=2)
        assert again.host_tokens > 580
        assert_nothing_left_behind(server)
    assert ModelBases.load(path).digest[:16] == budget["bases"]
    assert ModelBases.load(older_path(path, first)).digest == first
    with ForkedServer(tiny.path, args=args, env=STRICT) as server:
        # They are read when a segment names them: until then it is a miss.
        ask(server, familiar, max_new_tokens=1)
        wait_until(lambda: budget_of(server)["bases_held"] == 2, "older bases")
        push_out(server, num_tokens=2048, seed="started again")
        assert restored_logprob(server, familiar, computed) == expected
        assert settled_stats(server)["undecodable_segments"] == 0
        assert_nothing_left_behind(server)


def test_two_ranks_begin_to_store_in_bases_and_in_newer_ones_at_the_same_turn(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    learned, newer = (
        [bases_path(tiny, tmp_path / name, rank, 2) for rank in range(2)] for name in ("elsewhere", "later")
    )
    for paths_of_ranks, num_pieces in ((learned, 4), (newer, 3)):
        folder = paths_of_ranks[0].parents[1]
        assert list(learn_to_files(tiny, None, num_pieces=num_pieces, tp_size=2, cache_dir=folder))
    paths = [bases_path(tiny, tmp_path, rank, 2) for rank in range(2)]
    args = (*bases_server_args(2048, tmp_path, error_budget=4, probe_share=1), "--tp", "2")
    with ExitStack() as elsewhere:
        elsewhere.enter_context(learning_elsewhere(paths[0]))
        with ForkedServer(tiny.path, args=args, env=STRICT_ON_TWO_CORES) as server:
            native = random_prompt("native", 320)
            ask(server, native)
            # One rank has its bases before the other.
            learned[1].rename(paths[1])
            ask(server, random_prompt("also native", 320))
            assert settled_stats(server)["compression"]["subspace_turns"] == 0
            learned[0].rename(paths[0])
            elsewhere.close()
            state = "learned while serving"
            wait_until(lambda: krul_stats(server)["compression"]["budget"]["bases_state"] == state, state)
            compressed = random_prompt("compressed", 320)
            ask(server, compressed)
            wait_for_probes(server, 0)
            assert settled_stats(server)["compression"]["subspace_turns"] > 0
            digests = [ModelBases.load(path).digest[:16] for path in newer]
            for path, newer_path in zip(paths, newer, strict=True):
                replace_bases(path, ModelBases.load(newer_path))
            prompts = [native, compressed]

            def are_in_use() -> bool:
                prompts.append(random_prompt(len(prompts), 320))
                ask(server, prompts[-1], max_new_tokens=1)
                settled_stats(server)
                return all(f"stored in bases {digest}" in server.log_text() for digest in digests)

            wait_until(are_in_use, "newer bases on both ranks")
            # The last turn is stored in them.
            assert are_in_use()
            assert krul_stats(server)["compression"]["budget"]["bases_held"] == 2
            push_out(server, num_tokens=2048, seed="two ranks")
            for prompt in (native, compressed, prompts[-1]):
                assert ask(server, prompt).host_tokens > 300
            assert_nothing_left_behind(server)
