"""An engine with many conversations, some of them at once: every turn that was stored must come back.

Arguments: RUNTIME_DIR ENGINE CONVERSATIONS TURNS AT_ONCE. Prints counts as JSON at the end.
"""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor

import orjson

from krul_backend.daemon.daemon_store import DaemonStore
from krul_backend.segment import ModelIdentity
from tests.crash.conversations import NUM_LAYERS, Turn, model_of, page_keys, tokens_of
from tests.crash.engine import check_lease


def converse(store: DaemonStore, model: ModelIdentity, name: str, num_turns: int) -> int:
    """Store turn after turn; before each, everything before it must be there. Returns the turns stored."""
    rng = random.Random(name)
    turns: list[Turn] = []
    for _ in range(num_turns):
        first = turns[-1].end_page if turns else 0
        keys = page_keys(name, 0, first)
        if keys:
            lease = store.lease(model, keys, tokens_of(keys))
            assert lease is not None, f"{name}: nothing of {len(turns)} turns is found"
            try:
                assert check_lease(store, lease) == turns, name
            finally:
                store.release(lease)
        turn = Turn(name, first, first + rng.randint(1, 4))
        assert store.find_missing(model, (*keys, *turn.keys)) == [range(first, turn.end_page)], name
        reservation = store.reserve(turn.layer_num_bytes)
        assert reservation is not None, f"{name}: no room"
        for layer in range(NUM_LAYERS):
            reservation.blocks[layer][:] = turn.block(layer)
        store.commit(reservation, turn.manifest(model))
        turns.append(turn)
    return len(turns)


def main() -> None:
    runtime_dir, engine = sys.argv[1], int(sys.argv[2])
    num_conversations, num_turns, num_at_once = map(int, sys.argv[3:])
    model = model_of(engine)
    # Many threads on few cores: an answer may take its time.
    store = DaemonStore(runtime_dir, model=model, request_timeout_s=30.0)
    names = [f"{engine}/{number}" for number in range(num_conversations)]
    with ThreadPoolExecutor(num_at_once) as threads:
        stored = list(threads.map(lambda name: converse(store, model, name, num_turns), names))
    store.close()
    print(orjson.dumps({"turns": sum(stored)}).decode(), flush=True)


if __name__ == "__main__":
    main()
