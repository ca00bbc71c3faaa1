"""Two engines with 64 conversations at once share one daemon: nothing is lost, and the bytes add up."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from krul_backend.daemon.client.admin import AdminClient
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.errors import TierReadError
from krul_backend.segment import ModelIdentity
from krul_backend.tiers.common.interface import block_checksums
from krul_sglang.adapter.rank_engine import MAX_AHEAD_SHARE
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.restore.returning_request import Prompt
from krul_sglang.engine.restore.returning_requests import ReturningRequests
from tests.crash.conversations import NUM_LAYERS, Turn, model_of, tokens_of
from tests.crash.engine import check_lease
from tests.support.daemon_process import running_daemon
from tests.support.tiered_builders import AskedAtOnce

NUM_ENGINES, NUM_CONVERSATIONS, NUM_TURNS = 2, 32, 6
WINDOW, SERVICE_S = 6, 0.03
"""How many waiting requests an engine looks up, and how long it computes between two of them."""


def run_engines(runtime_dir: Path, num_at_once: int) -> int:
    """Turns that both engines stored and found again."""
    module = (sys.executable, "-m", "tests.crash.conversing", str(runtime_dir))
    counts = (str(NUM_CONVERSATIONS), str(NUM_TURNS), str(num_at_once))
    engines = [
        subprocess.Popen([*module, str(engine), *counts], stdout=subprocess.PIPE)
        for engine in range(NUM_ENGINES)
    ]
    try:
        outputs = [engine.communicate(timeout=240)[0] for engine in engines]
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()
    assert [engine.returncode for engine in engines] == [0] * NUM_ENGINES
    return sum(orjson.loads(output)["turns"] for output in outputs)


@pytest.mark.parametrize(
    ("arena", "num_at_once"), [("256MiB", NUM_CONVERSATIONS), ("16MiB", 3)], ids=["in DRAM", "mostly on disk"]
)
def test_nothing_is_lost_and_everything_adds_up(arena: str, num_at_once: int, tmp_path: Path) -> None:
    ssd = ("--ssd-dir", str(tmp_path / "ssd"), "--ssd-capacity", "2GiB", "--ssd-timeout", "20")
    with running_daemon("--host-memory", arena, *ssd) as (runtime_dir, _):
        num_turns = run_engines(runtime_dir, num_at_once)
        assert num_turns == NUM_ENGINES * NUM_CONVERSATIONS * NUM_TURNS
        store = DaemonStore(runtime_dir, model=model_of(0), request_timeout_s=10.0)
        with AdminClient(runtime_dir) as admin:
            assert admin.flush(30.0)
        stats = store.stats()
        store.close()
    (disk,) = stats.tiers
    assert stats.committed_segments == num_turns
    assert disk.num_segments == num_turns
    assert (stats.num_leases, stats.num_reservations) == (0, 0)
    assert (stats.corrupted_segments, stats.token_mismatches, stats.failed_fetches) == (0, 0, 0)
    for tier in (stats, disk):
        assert tier.used_bytes + tier.free_bytes == tier.capacity_bytes
        assert tier.stored_bytes <= tier.used_bytes
    assert disk.queued_segments == disk.queued_bytes == 0
    assert stats.hit_pages > 0
    if arena == "16MiB":
        assert stats.evicted_segments > 0
        assert stats.fetched_segments > 0


def store_turns(store: DaemonStore, turns: list[Turn]) -> None:
    for turn in turns:
        while (reservation := store.reserve(turn.layer_num_bytes)) is None:
            time.sleep(0.02)
        for layer in range(NUM_LAYERS):
            reservation.blocks[layer][:] = turn.block(layer)
        store.commit(reservation, turn.manifest(model_of_turn(turn)), block_checksums(reservation.blocks))


def model_of_turn(turn: Turn) -> ModelIdentity:
    return model_of(int(turn.conversation.split("/")[0]))


def look_up(waiting: ReturningRequests, turn: Turn) -> None:
    prompt = Prompt(len(turn.keys) * 16, 0, lambda: tokens_of(turn.keys))
    waiting.expect(str(turn), prompt)
    waiting.look_up(str(turn), turn.keys)


def serve_queue(store: DaemonStore, turns: list[Turn]) -> Counter[str]:
    """Restore turn after turn as an engine does for requests that wait; counts what became of them."""
    stats = store.stats()
    model = ServedModel(model_of_turn(turns[0]))
    max_ahead_bytes = int(stats.capacity_bytes * MAX_AHEAD_SHARE)
    waiting = ReturningRequests(store, model, AskedAtOnce(), max_ahead_bytes=max_ahead_bytes)
    outcomes: Counter[str] = Counter()
    for number, turn in enumerate(turns):
        with waiting.looking_ahead() as queue:
            queue += [str(ahead) for ahead in turns[number : number + WINDOW]]
            for ahead in turns[number : number + WINDOW]:
                look_up(waiting, ahead)
        time.sleep(SERVICE_S)
        look_up(waiting, turn)
        held = waiting.take(str(turn))
        if held is None:
            outcomes["missed"] += 1
            continue
        try:
            waiting.make_room(held.lease, [None] * len(held.lease.slices))
            assert check_lease(store, held.lease) == [turn]
            outcomes["in DRAM" if held.lease.is_in_dram else "read"] += 1
        except TierReadError:
            outcomes["no room"] += 1
        finally:
            store.release(held.lease)
    assert waiting.num_leases == 0
    return outcomes


def test_queues_of_two_engines_do_not_starve_each_other(tmp_path: Path) -> None:
    """Either alone may pin two thirds of DRAM ahead; both together want far more than there is."""
    ssd = ("--ssd-dir", str(tmp_path / "ssd"), "--ssd-capacity", "1GiB", "--ssd-timeout", "20")
    with running_daemon("--host-memory", "4MiB", *ssd) as (runtime_dir, _):
        stores = [
            DaemonStore(runtime_dir, model=model_of(engine), request_timeout_s=10.0) for engine in (0, 1)
        ]
        queues = [[Turn(f"{engine}/{number}", 0, 16) for number in range(24)] for engine in (0, 1)]
        for store, queue in zip(stores, queues, strict=True):
            store_turns(store, queue)
        with AdminClient(runtime_dir) as admin:
            assert admin.flush(30.0)
        with ThreadPoolExecutor() as engines:
            outcomes = list(engines.map(serve_queue, stores, [queue * 2 for queue in queues]))
        stats = stores[0].stats()
        for store in stores:
            store.close()
    for of_engine, queue in zip(outcomes, queues, strict=True):
        assert of_engine.total() == 2 * len(queue)
        assert of_engine["missed"] == 0
        # Now and then the other one holds what a load would need: then it computes.
        assert of_engine["in DRAM"] + of_engine["read"] > len(queue)
        assert of_engine["in DRAM"] > 0
    assert (stats.num_leases, stats.num_reservations) == (0, 0)
    assert stats.prefetch_useful_bytes > 0
