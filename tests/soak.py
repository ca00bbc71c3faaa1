"""``python -m tests.soak --minutes 10``: users, faults and an operator on one small server, for a while.

Users talk side by side, with hints, and abort some of their requests. Meanwhile the daemon is killed, bytes
on the disk are overwritten, the cache is flushed, and weights are updated. At the end each answer must be
that of a server without krul, nothing may be held, and memory must not have grown.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

from demo.server import ServerProcess
from krul_backend.daemon.client.launcher import MAX_RESTARTS, RESTART_WINDOW_S
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    POOL_TOKENS,
    STRICT,
    assert_nothing_left_behind,
    daemon_pid,
    random_prompt,
    request_payload,
    settled_stats,
    small_krul_server_args,
    wait_until_connected,
)
from tests.support.server_plugin import WITH_PLUGIN
from tests.support.tiny_model import build_tiny_model

NUM_USERS = 6
_TIE = 1e-3
"""Two tokens whose logprobs differ by less may change places by rounding."""
_HINTS: tuple[dict[str, Any], ...] = (
    *(
        {"next_use_s": 2},
        {"ttl_s": 3},
        {"priority": 90},
        {"demote": True},
        {"prefetch": True},
        {"drop": True},
    ),
)


@dataclass(frozen=True)
class Said:
    """An answer, and which weights had been loaded: the tokens, and the logprob of each."""

    weights: int
    prompt: list[int]
    output_ids: list[int]
    logprobs: list[float]


@dataclass
class Outcome:
    """``events`` counts what was done. ``memory``: bytes of the server's and the daemon's processes, each few
    seconds. ``wrong``: answers that a server without krul does not give."""

    said: list[Said] = field(default_factory=list)
    host_tokens: int = 0
    events: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    wrong: int = 0

    @property
    def growth_bytes(self) -> int:
        """From the second third of the time to the last, by the smallest of each: a leak never gives back."""
        third = len(self.memory) // 3
        return min(self.memory[2 * third :]) - min(self.memory[third : 2 * third])


class Soak:
    """One run against a server. ``models``: the checkpoints whose weights take turns."""

    def __init__(self, server: ServerProcess, models: list[Path], ssd: Path, seed: int) -> None:
        self.outcome = Outcome()
        self._server, self._models, self._ssd, self._seed = server, models, ssd, seed
        self._weights = 0
        self._is_over = threading.Event()
        self._gate = threading.Condition()
        self._asking, self._is_paused = 0, False
        self._next_kill_s = 0.0

    def run(self, seconds: float) -> None:
        """Let everybody work for so long. Raises what any of them has raised."""
        with ThreadPoolExecutor(NUM_USERS + 1) as pool:
            working = [pool.submit(self._talk, number) for number in range(NUM_USERS)]
            working.append(pool.submit(self._disturb))
            ends_s = time.monotonic() + seconds
            while time.monotonic() < ends_s and not any(each.done() for each in working):
                time.sleep(1.0)
                self.outcome.memory.append(_anonymous_bytes(self._server.pid))
            self._is_over.set()
            for each in working:
                each.result()

    def _talk(self, number: int) -> None:
        """A user: one conversation after the other; whoever aborts a turn begins a new one."""
        rng = random.Random(repr((self._seed, number)))
        with httpx.Client(base_url=self._server.url, timeout=120, trust_env=False, verify=False) as client:
            while not self._is_over.is_set():
                name = f"{self._seed}-{number}-{rng.random()}"
                prompt = random_prompt(name, rng.randrange(100, 700))
                for turn in range(rng.randrange(1, 7)):
                    said = self._ask(client, rng, prompt, name)
                    if said is None or self._is_over.wait(0.3 * rng.random()):
                        break
                    prompt = [*prompt, *said.output_ids, *random_prompt((name, turn), rng.randrange(5, 60))]

    def _ask(self, client: httpx.Client, rng: random.Random, prompt: list[int], name: str) -> Said | None:
        """The answer; None if the request was aborted."""
        is_aborted, rid = rng.random() < 0.15, f"{name}-{rng.random()}"
        payload = request_payload(prompt, rid=rid, max_new_tokens=400 if is_aborted else 10, session_id=name)
        if rng.random() < 0.4:
            action = {"action_id": "a", "action_type": "krul.hint", "action_version": "1.0"}
            action["payload"] = rng.choice(_HINTS)
            payload["kv_hints"] = {"protocol_version": "0.1", "message_id": rid, "actions": [action]}
            self.outcome.events["hint"] += 1
        with self._request() as weights:
            if is_aborted:
                threading.Timer(2 * rng.random(), self._abort, (rid,)).start()
            answered = client.post("/generate", json=payload)
        answered.raise_for_status()
        answer = answered.json()
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            self.outcome.events["abort"] += 1
            return None
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        said = Said(weights, prompt, answer["output_ids"], logprobs)
        self.outcome.said.append(said)
        self.outcome.host_tokens += (meta.get("cached_tokens_details") or {}).get("host", 0)
        return said

    def _abort(self, rid: str) -> None:
        httpx.post(f"{self._server.url}/abort_request", json={"rid": rid}, timeout=60, trust_env=False)

    @contextmanager
    def _request(self) -> Iterator[int]:
        """While it lasts, weights stay as they are."""
        with self._gate:
            self._gate.wait_for(lambda: not self._is_paused)
            self._asking += 1
        try:
            yield self._weights
        finally:
            with self._gate:
                self._asking -= 1
                self._gate.notify_all()

    @contextmanager
    def _nobody_asks(self) -> Iterator[None]:
        with self._gate:
            self._is_paused = True
            self._gate.wait_for(lambda: self._asking == 0)
        try:
            yield
        finally:
            with self._gate:
                self._is_paused = False
                self._gate.notify_all()

    def _disturb(self) -> None:
        """One disturbance after the other, in a random order."""
        rng = random.Random(self._seed)
        kinds: list[Callable[[random.Random], None]] = [
            *(self._kill_daemon, self._damage_disk, self._flush, self._update_weights)
        ]
        while not self._is_over.is_set():
            for kind in rng.sample(kinds, len(kinds)):
                if self._is_over.wait(2 + 4 * rng.random()):
                    return
                kind(rng)

    def _kill_daemon(self, rng: random.Random) -> None:
        # A server gives up a daemon that it had to start again too often within a while.
        if time.monotonic() < self._next_kill_s:
            return
        self._next_kill_s = time.monotonic() + RESTART_WINDOW_S / (MAX_RESTARTS - 1)
        os.kill(daemon_pid(self._server), signal.SIGKILL)
        self.outcome.events["killed daemon"] += 1
        # It is not connected for a moment only after it has noticed.
        time.sleep(1.0)
        wait_until_connected(self._server)

    def _damage_disk(self, rng: random.Random) -> None:
        """Overwrite a few bytes in the files of the tier, as a bad disk would."""
        for path in [path for path in self._ssd.rglob("*") if path.is_file() and path.stat().st_size > 4096]:
            with path.open("r+b") as file:
                file.seek(rng.randrange(path.stat().st_size - 64))
                file.write(rng.randbytes(64))
            self.outcome.events["damaged file"] += 1

    def _flush(self, rng: random.Random) -> None:
        with self._nobody_asks():
            settled_stats(self._server)
            answered = httpx.post(f"{self._server.url}/flush_cache", timeout=60, trust_env=False)
            answered.raise_for_status()
        self.outcome.events["flush"] += 1

    def _update_weights(self, rng: random.Random) -> None:
        with self._nobody_asks():
            # An aborted request is answered before it has left the batch; when this one is, it has.
            self._server.post_json("/generate", request_payload([300], max_new_tokens=2))
            weights = (self._weights + 1) % len(self._models)
            self._server.post_json(
                "/update_weights_from_disk", {"model_path": str(self._models[weights])}, timeout_s=120
            )
            self._weights = weights
        self.outcome.events["update of weights"] += 1


def run_soak(folder: Path, seconds: float, seed: int) -> Outcome:
    """Soak for so long, and compare afterwards. Raises AssertionError if something is held at the end."""
    models = [build_tiny_model(folder / f"model-{number}", seed=number) for number in range(2)]
    ssd = folder / "ssd"
    options = {
        "host_memory": "24MiB",
        "ssd_dir": str(ssd),
        "ssd_capacity": "256MiB",
        "ssd_timeout": 10.0,
        "planner": "random",
        "cache_dir": str(folder / "cache"),
    }
    args = small_krul_server_args(POOL_TOKENS, options)
    env, log_path = {**STRICT, **WITH_PLUGIN}, folder / "server.log"
    with ForkedServer(models[0], args=args, env=env, log_path=log_path) as server:
        soak = Soak(server, models, ssd, seed)
        soak.run(seconds)
        failed_batches = settled_stats(server)["load"]["failed_batches"]
        assert_nothing_left_behind(server, failed_batches)
    control = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "65536")
    for weights, model in enumerate(models):
        with ForkedServer(model, args=control) as server, ThreadPoolExecutor(4) as pool:
            said = [each for each in soak.outcome.said if each.weights == weights]
            soak.outcome.wrong += sum(
                not same for same in pool.map(lambda each: _is_same(server, each), said)
            )
    return soak.outcome


def _is_same(control: ServerProcess, said: Said) -> bool:
    """Whether the control says the same, up to a first token that is as likely as its own."""
    answer = control.post_json("/generate", request_payload(said.prompt, max_new_tokens=len(said.output_ids)))
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    for own, other, wanted, found in zip(
        answer["output_ids"], said.output_ids, logprobs, said.logprobs, strict=True
    ):
        if abs(wanted - found) > _TIE:
            return False
        if own != other:
            break
    return True


def _anonymous_bytes(pid: int) -> int:
    """Memory that a process and its descendants have for themselves; host memory for KV is a shared file."""
    total = 0
    for process in psutil.Process(pid).children(recursive=True):
        try:
            rows = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except (OSError, ProcessLookupError):
            continue
        total += sum(int(row.split()[1]) for row in rows if row.startswith("Anonymous:"))
    return 1024 * total


def describe(outcome: Outcome) -> str:
    events = ", ".join(f"{name}: {count}" for name, count in sorted(outcome.events.items()))
    return (
        f"{len(outcome.said)} answers, {outcome.wrong} wrong; {outcome.host_tokens} tokens from krul; "
        f"{events}; "
        f"memory grew by {outcome.growth_bytes / 2**20:.1f} MiB from {min(outcome.memory) / 2**20:.0f} MiB"
    )


def main(
    minutes: Annotated[float, typer.Option(min=0.5, help="How long users talk.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Decides who does what when.")] = 1,
) -> None:
    """Let users, faults and an operator work on a small server; nothing may be wrong, held or leaked."""
    with tempfile.TemporaryDirectory(prefix="krul-soak-", dir="/tmp") as directory:
        outcome = run_soak(Path(directory), 60 * minutes, seed)
    typer.echo(describe(outcome))
    raise typer.Exit(0 if outcome.wrong == 0 and outcome.growth_bytes < MOST_GROWTH_BYTES else 1)


MOST_GROWTH_BYTES = 128 << 20
"""A twentieth of what the processes have: allocators keep some of what they have had."""

if __name__ == "__main__":
    typer.run(main)
