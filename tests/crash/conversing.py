"""An engine with many conversations, some of them at once: every turn that was stored must come back.

Arguments: RUNTIME_DIR ENGINE CONVERSATIONS TURNS AT_ONCE. Prints counts as JSON at the end.
"""

from __future__ import annotations

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import orjson

from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.segment import ModelIdentity
from krul_backend.tiers.common.interface import block_checksums
from tests.crash.conversations import NUM_LAYERS, Turn, model_of, page_keys, tokens_of
from tests.crash.engine import check_lease

_PATIENCE_S = 30.0


def converse(store: DaemonStore, model: ModelIdentity, name: str, num_turns: int) -> list[Turn]:
    """Store turn after turn; before each, everything before it must be there. Returns the turns stored."""
    rng = random.Random(name)
    turns: list[Turn] = []
    for _ in range(num_turns):
        check(store, model, turns)
        first = turns[-1].end_page if turns else 0
        keys = page_keys(name, 0, first)
        turn = Turn(name, first, first + rng.randint(1, 4))
        assert store.find_missing(model, (*keys, *turn.keys)) == [range(first, turn.end_page)], name
        give_up_s = time.monotonic() + _PATIENCE_S
        # What waits for a busy disk keeps its room.
        while (reservation := store.reserve(turn.layer_num_bytes)) is None:
            assert time.monotonic() < give_up_s, f"{name}: no room"
            time.sleep(0.05)
        for layer in range(NUM_LAYERS):
            reservation.blocks[layer][:] = turn.block(layer)
        store.commit(reservation, turn.manifest(model), block_checksums(reservation.blocks))
        turns.append(turn)
    return turns


def check(store: DaemonStore, model: ModelIdentity, turns: list[Turn]) -> None:
    """All turns of a conversation must be found, with their bytes."""
    if not turns:
        return
    name = turns[0].conversation
    keys = page_keys(name, 0, turns[-1].end_page)
    lease = store.lease(model, keys, tokens_of(keys))
    assert lease is not None, f"{name}: nothing of {len(turns)} turns is found"
    try:
        assert check_lease(store, lease) == turns, name
    finally:
        store.release(lease)


def main() -> None:
    runtime_dir, engine = sys.argv[1], int(sys.argv[2])
    num_conversations, num_turns, num_at_once = map(int, sys.argv[3:])
    model = model_of(engine)
    # Many threads on few cores: an answer may take its time.
    store = DaemonStore(runtime_dir, model=model, request_timeout_s=30.0)
    names = [f"{engine}/{number}" for number in range(num_conversations)]
    with ThreadPoolExecutor(num_at_once) as threads:
        stored = list(threads.map(lambda name: converse(store, model, name, num_turns), names))
        # Once more, those first that were left alone longest.
        list(threads.map(lambda turns: check(store, model, turns), stored))
    store.close()
    print(orjson.dumps({"turns": sum(map(len, stored))}).decode(), flush=True)


if __name__ == "__main__":
    main()
