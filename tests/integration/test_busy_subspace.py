"""A pretrained model, its turns in bases: many users, a daemon that dies among them, tenants, new weights."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.app import BUNDLED_CONVERSATIONS
from demo.conversations import load_conversations
from demo.server import ServerProcess, start_servers, stop_servers
from krul_backend.codec.subspace.bases import replace_bases
from krul_sglang.learning.bases import LearningPlan, learn_bases
from krul_sglang.learning.command import cut_pieces, own_texts
from krul_sglang.learning.reader import TextReader
from krul_sglang.models.checkpoint import Checkpoint, bases_path
from krul_sglang.models.find import find_model
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    PAGE_SIZE,
    STRICT,
    Answer,
    ask,
    assert_nothing_left_behind,
    assert_same,
    daemon_pid,
    krul_stats,
    push_out,
    request_payload,
    settled_stats,
    small_krul_server_args,
    wait_until,
    wait_until_connected,
)

POOL_TOKENS = 1024
"""Less than half of what the users' conversations take at their end."""
MESSAGE_TOKENS = 100
NUM_USERS = 8
NUM_TURNS = 3
NUM_KILLED_USERS = 6
"""Of those that talk while the daemon is killed."""
ANSWER_TOKENS = 8
LEAST_FOUND = 0.8
"""Of what could be found. On a machine with other load an answer of the daemon may come too late now and
then."""

ERROR_BUDGET = 0.05
"""Bases that were learned fast leave 0.007 nats of these conversations out, and of some up to 0.01."""

Chat = Sequence[list[int]]
"""The token ids of a user's messages, each with what the chat template puts around it."""


@dataclass(frozen=True)
class Turn:
    """A prompt, the whole history in it, and how it was answered."""

    prompt: list[int]
    answer: Answer

    @property
    def cached_tokens(self) -> int:
        return self.answer.device_tokens + self.answer.host_tokens

    @property
    def stored_tokens(self) -> int:
        """What a later turn can find of this one: whole pages. An answer's last token has no KV."""
        return (len(self.prompt) + len(self.answer.output_ids) - 1) // PAGE_SIZE * PAGE_SIZE

    def next_prompt(self, message: list[int]) -> list[int]:
        return [*self.prompt, *self.answer.output_ids, *message]


def whole_pages(prompt: list[int]) -> int:
    """The tokens of a prompt that can be found: the last one is always computed."""
    return (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE


def converse(server: ServerProcess, chat: Chat, turns: Sequence[Turn] = ()) -> list[Turn]:
    """Go on after ``turns`` with all other messages of a chat; returns all its turns."""
    said = list(turns)
    for message in chat[len(said) :]:
        prompt = said[-1].next_prompt(message) if said else message
        said.append(Turn(prompt, ask(server, prompt, max_new_tokens=ANSWER_TOKENS)))
    return said


def side_by_side(server: ServerProcess, chats: Sequence[Chat]) -> list[list[Turn]]:
    with ThreadPoolExecutor(len(chats)) as users:
        return list(users.map(lambda chat: converse(server, chat), chats))


def found_share(conversations: Sequence[list[Turn]]) -> float:
    """Tokens that returning turns found on the device or the host, of all that could be found."""
    pairs = [pair for turns in conversations for pair in itertools.pairwise(turns)]
    return sum(now.cached_tokens for _, now in pairs) / sum(before.stored_tokens for before, _ in pairs)


@dataclass(frozen=True)
class Compared:
    """How likely the tokens of an answer were to the server that said it, and to the control.

    Logarithms ``[ANSWER_TOKENS]``: ``said`` by the server, ``true`` by the control; ``best``: of the tokens
    that are the likeliest to the control.
    """

    said: NDArray[np.float64]
    true: NDArray[np.float64]
    best: NDArray[np.float64]


def compare(control: ServerProcess, conversations: Sequence[list[Turn]]) -> list[list[Compared]]:
    """Every answer beside what the control, given the same tokens, says of it."""

    def compared(turn: Turn) -> Compared:
        start = len(turn.prompt) - 1
        fields = {"max_new_tokens": 1, "logprob_start_len": start, "top_logprobs_num": 1}
        payload = request_payload([*turn.prompt, *turn.answer.output_ids], **fields)
        meta = control.post_json("/generate", payload)["meta_info"]
        # The first one is the prompt's last token.
        true = [entry[0] for entry in meta["input_token_logprobs"][1:]]
        best = [entries[0][0] for entries in meta["input_top_logprobs"][1:]]
        return Compared(np.array(turn.answer.logprobs), np.array(true), np.array(best))

    with ThreadPoolExecutor(len(conversations)) as users:
        return list(users.map(lambda turns: [compared(turn) for turn in turns], conversations))


def assert_exact(compared: Sequence[Compared]) -> None:
    """The control says the same, up to rounding. Of two tokens that are equally likely, up to rounding,
    either may be chosen."""
    for turn in compared:
        assert turn.said == pytest.approx(turn.true, abs=2e-4)
        assert turn.true == pytest.approx(turn.best, abs=4e-4)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The model in the user's cache directory; it is made there once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KRUL_CACHE_DIR")
        return Path(find_model("smollm2", print, option="--model"))


@pytest.fixture(scope="module")
def chats(smollm2: Path) -> list[Chat]:
    """Bundled conversations, of which no bases were learned. No two begin alike."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    def message(number: int, text: str) -> list[int]:
        end, begin = ("<|im_end|>\n" if number else ""), "<|im_start|>user\n"
        ids: list[int] = tokenizer.encode(end + begin + text)
        return [*ids[:MESSAGE_TOKENS], *tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n")]

    return [
        [message(number, turn.text) for number, turn in enumerate(conversation.turns)]
        for conversation in load_conversations(BUNDLED_CONVERSATIONS).conversations
    ]


def learn_few(model: Path, cache_dir: Path) -> None:
    """Learn from little text in small groups of layers, which is fast."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    reader = TextReader(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train(False))
    plan = LearningPlan(text_tokens=512, read_tokens=384, layers_of_group=2)
    pieces = cut_pieces(tokenizer, own_texts(), plan.text_tokens, 6)
    path = bases_path(Checkpoint(str(model)), cache_dir)
    path.parent.mkdir(parents=True)
    replace_bases(path, *learn_bases(reader, pieces, plan))


@pytest.fixture(scope="module")
def servers(
    smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """One that keeps what leaves its pool, in bases and as it was, and one that never evicts anything."""
    cache_dir = tmp_path_factory.mktemp("krul-cache")
    learn_few(smollm2, cache_dir)
    options = {
        "strategy": "subspace",
        "error_budget": ERROR_BUDGET,
        "cache_dir": str(cache_dir),
        "relearn": False,
        "host_memory": "1GiB",
    }
    args = (*small_krul_server_args(POOL_TOKENS, options), "--max-running-requests", "4")
    server = ForkedServer(smollm2, args=args, env=STRICT)
    control_args = ("--dtype", "float32", "--page-size", str(PAGE_SIZE), "--max-total-tokens", "16384")
    control = ForkedServer(smollm2, args=(*control_args, "--enable-cache-report"))
    start_servers([server, control])
    try:
        yield server, control
    finally:
        stop_servers([server, control])


@pytest.fixture
def server(servers: tuple[ServerProcess, ServerProcess]) -> ServerProcess:
    """Nothing is stored on it, nor in its pool."""
    settled_stats(servers[0])
    assert httpx.post(f"{servers[0].url}/flush_cache", timeout=60, trust_env=False).status_code == 200
    return servers[0]


@pytest.fixture
def control(servers: tuple[ServerProcess, ServerProcess]) -> ServerProcess:
    return servers[1]


def test_eight_users_find_their_turns_and_hear_what_a_control_answers(
    server: ServerProcess, control: ServerProcess, chats: list[Chat]
) -> None:
    """Their turns are stored in bases, and come back as they were: memory has room for exact copies."""
    before = settled_stats(server)
    conversations = side_by_side(server, [chat[:NUM_TURNS] for chat in chats[:NUM_USERS]])
    stats = settled_stats(server)
    assert found_share(conversations) > LEAST_FOUND
    assert stats["load"]["tokens"] > before["load"]["tokens"]
    num_compressed = stats["compression"]["subspace_turns"] - before["compression"]["subspace_turns"]
    assert num_compressed > 0.5 * NUM_USERS * NUM_TURNS
    # More turns wait to be stored than run at a time.
    assert stats["compression"]["budget"]["unrecorded_turns"] == 0
    assert stats["fast_copy_bytes"] > stats["stored_bytes"]
    assert_exact(list(itertools.chain(*compare(control, conversations))))
    assert_nothing_left_behind(server)


def kill_daemon_while_it_works(server: ServerProcess) -> None:
    """Kill it when turns are being stored and requests hold what they load next. Returns when there is
    another one."""

    def is_at_work() -> bool:
        stats = krul_stats(server)
        return stats["offload"]["pending"] > 0 and stats["waiting_leases"] > 0

    wait_until(is_at_work, "loads and saves at the same time")
    pid = daemon_pid(server)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: daemon_pid(server) != pid, "another daemon")
    wait_until_connected(server)


def go_on(
    server: ServerProcess, num_turns: int, conversation: tuple[Chat, list[Turn]]
) -> tuple[Chat, list[Turn]]:
    chat, turns = conversation
    return chat, converse(server, chat[:num_turns], turns)


@pytest.mark.parametrize("num_kills", [1, pytest.param(4, marks=pytest.mark.long)])
def test_a_daemon_that_is_killed_among_many_users_costs_hits_and_not_answers(
    server: ServerProcess, control: ServerProcess, chats: list[Chat], num_kills: int
) -> None:
    """What is stored after that is found again, also of conversations that began before it. It comes back as
    it was, also what waited to be encoded when the daemon died."""
    before = settled_stats(server)["daemon"]
    is_over = threading.Event()

    def talk(user: int) -> list[tuple[Chat, list[Turn]]]:
        """Begin one conversation after another until no daemon is killed any more."""
        begun: list[tuple[Chat, list[Turn]]] = []
        while not begun or not is_over.is_set():
            chat = chats[(user + len(begun) * NUM_KILLED_USERS) % len(chats)]
            begun.append((chat, converse(server, chat[:2])))
        return begun

    with ThreadPoolExecutor(NUM_KILLED_USERS) as users:
        talking = [users.submit(talk, user) for user in range(NUM_KILLED_USERS)]
        try:
            for _ in range(num_kills):
                kill_daemon_while_it_works(server)
        finally:
            is_over.set()
        begun = [conversation for user in talking for conversation in user.result()[:-1]]
        resumed = [user.result()[-1] for user in talking]
        for num_turns in (3, 4):
            resumed = list(users.map(partial(go_on, server, num_turns), resumed))
    stats = settled_stats(server)
    assert stats["daemon"]["lost"] - before["lost"] == num_kills
    assert stats["daemon"]["reconnects"] - before["reconnects"] == num_kills
    assert found_share([turns[2:] for _, turns in resumed]) > LEAST_FOUND
    told = [turns for _, turns in (*begun, *resumed)]
    assert_exact(list(itertools.chain(*compare(control, told))))
    # A load that had begun may have failed: then its tokens were computed.
    assert_nothing_left_behind(server, failed_batches=stats["load"]["failed_batches"])


def test_tenants_never_share_what_is_stored_in_bases(server: ServerProcess, chats: list[Chat]) -> None:
    num_compressed = settled_stats(server)["compression"]["subspace_turns"]
    fields = ("cache_salt", "extra_key")
    prompts = [[*chat[0], *chat[1]] for chat in chats]
    computed = [ask(server, prompt, **{field: "a"}) for field, prompt in zip(fields, prompts, strict=False)]
    assert settled_stats(server)["compression"]["subspace_turns"] == num_compressed + 2
    push_out(server, num_tokens=POOL_TOKENS, seed="tenants")
    for field, other, prompt, own in zip(fields, reversed(fields), prompts, computed, strict=False):
        for tenant in ({}, {field: "b"}, {other: "a"}):
            answer = ask(server, prompt, **tenant)
            assert (answer.device_tokens, answer.host_tokens) == (0, 0)
            assert_same([own], [answer])
        again = ask(server, prompt, **{field: "a"})
        assert (again.device_tokens, again.host_tokens) == (0, whole_pages(prompt))
        assert_same([own], [again])
    assert_nothing_left_behind(server, failed_batches=krul_stats(server)["load"]["failed_batches"])


def update(server: ServerProcess, model: Path) -> None:
    server.post_json("/update_weights_from_disk", {"model_path": str(model)})


def with_other_weights(model: Path, path: Path) -> Path:
    """A copy of a checkpoint, in which the first layer answers differently."""
    shutil.copytree(model, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1.5
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_kv_of_old_weights_never_comes_back(
    server: ServerProcess, smollm2: Path, chats: list[Chat], tmp_path: Path
) -> None:
    """Not what is stored in bases, nor its exact copy, nor what waits to be encoded when weights change. The
    bases are those of the old weights: with others turns stay as they are."""
    # Last in the file: the server has no bases from here on.
    new = with_other_weights(smollm2, tmp_path / "new")
    prompt, waiting = ([*chat[0], *chat[1]] for chat in chats[:2])
    num_compressed = settled_stats(server)["compression"]["subspace_turns"]
    of_old = ask(server, prompt)
    assert settled_stats(server)["compression"]["subspace_turns"] == num_compressed + 1
    push_out(server, num_tokens=POOL_TOKENS, seed="old weights")
    again = ask(server, prompt)
    assert again.host_tokens == whole_pages(prompt)
    waited = ask(server, waiting)
    update(server, new)
    num_compressed = settled_stats(server)["compression"]["subspace_turns"]
    of_new = [ask(server, each) for each in (prompt, waiting)]
    for old, cold in zip((of_old, waited), of_new, strict=True):
        assert (cold.device_tokens, cold.host_tokens) == (0, 0)
        assert cold.logprobs[0] != pytest.approx(old.logprobs[0], abs=0.01)
    push_out(server, num_tokens=POOL_TOKENS, seed="new weights")
    found = ask(server, prompt)
    assert found.host_tokens == whole_pages(prompt)
    assert_same(of_new[:1], [found])
    assert settled_stats(server)["compression"]["subspace_turns"] == num_compressed
    update(server, smollm2)
    for each, old in ((prompt, of_old), (waiting, waited)):
        cold = ask(server, each)
        assert (cold.device_tokens, cold.host_tokens) == (0, 0)
        assert_same([old], [cold])
    assert_nothing_left_behind(server, failed_batches=krul_stats(server)["load"]["failed_batches"])
