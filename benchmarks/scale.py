"""``python -m benchmarks.scale --json FILE``: an SSD tier of millions of segments, and eight busy ranks."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import runner
from benchmarks.runner import Result
from benchmarks.tables import Columns, cell, source, table_of
from benchmarks.tiers.configuration import KIB, MIB, TiersBenchmarkError
from benchmarks.tiers.disk import evict
from benchmarks.tiers.segments import make_manifest, make_model, page_keys, token_ids
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.daemon.client.launcher import EmbeddedDaemon
from krul_backend.tiers.common.eviction import UNKNOWN_PAUSE_S
from krul_backend.tiers.common.interface import block_checksums
from krul_backend.tiers.common.page_filter import digest_of
from krul_backend.tiers.common.record import (
    RECORD_ALIGN,
    SegmentRecord,
    encode_metadata,
    encode_segment,
    no_checksums,
)
from krul_backend.tiers.ssd.disk import Disk
from krul_backend.tiers.ssd.index import Entry, SegmentIndex
from krul_backend.tiers.ssd.log_file import LogFile
from krul_backend.tiers.ssd.own_files import FILE_HEADER_NUM_BYTES, format_directory
from krul_backend.tiers.ssd.ssd_tier import SsdTier

_NUM_LAYERS = 32
_PAGE_BYTES = 128 * KIB
"""Of a page of 16 tokens: an eighth of what bf16 takes in a model of 8B."""
_MAX_PAGES = 64
_TIMES_THE_CAP = 4
_NUM_TOGETHER = 16
_TIMEOUT_S = 60.0

_PAGES = 8
_SHARE_BYTES = 32_000
"""Of a layer: a segment of the index takes 1 MB, or would."""
_NUM_FILES = 32
_SAMPLED = 1000
"""One in so many has a header on the disk."""
_NUM_LOOKUPS = 2000

_NUM_RANKS = 8
_REQUESTS_PER_S = 200
_REQUESTS_S = 5.0
_PREFIX_PAGES = 64
_SMALL_BLOCK_BYTES = 1024
"""With 32 layers, of what is stored for a request: the arena is full after three seconds."""
_ARENA_BYTES = 128 * MIB


def space_rows(folder: Path, capacity_bytes: int, seed: int) -> list[dict[str, Any]]:
    """Segments of random lengths, four times what the cap holds, some of them used again and again.

    Bytes written are those of ``/proc/self/io``, with all that file systems are handed; what is stored are
    blocks alone, without headers and padding.
    """
    rng = random.Random(seed)
    noise = np.random.default_rng(seed).integers(0, 256, _MAX_PAGES * _PAGE_BYTES, dtype=np.uint8)
    model = make_model(_NUM_LAYERS)
    tier = SsdTier(folder / "ssd", capacity_bytes)
    tier.wait_until_open(_TIMEOUT_S)
    written_before, stored_bytes, full_bytes = _written_bytes(), 0, 0
    stored: list[tuple[int, int]] = []
    while stored_bytes < _TIMES_THE_CAP * capacity_bytes:
        number, num_pages = len(stored), round(_MAX_PAGES ** rng.random())
        block_bytes = num_pages * _PAGE_BYTES // _NUM_LAYERS
        blocks = [noise[layer * block_bytes : (layer + 1) * block_bytes] for layer in range(_NUM_LAYERS)]
        manifest = make_manifest(model, number, 0, num_pages, (block_bytes,) * _NUM_LAYERS)
        is_taken = tier.put(manifest, blocks, block_checksums(blocks), lambda: None)
        # As a busy daemon writes them: several together.
        if not is_taken or (number % _NUM_TOGETHER == 0 and not tier.flush(_TIMEOUT_S)):
            raise TiersBenchmarkError("the SSD tier did not take a segment")
        stored.append((number, num_pages))
        stored_bytes += manifest.num_bytes
        full_bytes = max(full_bytes, tier.stats().used_bytes)
        # A tenth of all conversations come back, most of them soon.
        again, num_again = stored[-1 - min(int(rng.expovariate(1 / 50)) * 10, number)]
        for run in tier.match(model, page_keys(again, 0, num_again), token_ids(0, num_again), 0):
            tier.release(run)
    skipped = tier.stats().skipped_segments
    tier.close()
    if skipped:
        raise TiersBenchmarkError(f"segments were not written: {skipped}")
    written_bytes = _written_bytes() - written_before
    return [
        _at_most("bytes written per byte stored", written_bytes / stored_bytes, 1.02),
        _at_least("share of the cap in use, at most", full_bytes / capacity_bytes, 0.97),
    ]


def _written_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])


def index_rows(folder: Path, num_segments: int) -> list[dict[str, Any]]:
    """A directory of so many segments, of which the index is whole, and of the logs some headers.

    It is opened by a process of its own, when no page of it is cached.
    """
    shape = make_manifest(make_model(_NUM_LAYERS), 0, 0, _PAGES, (_SHARE_BYTES,) * _NUM_LAYERS)
    checksums = no_checksums(shape)
    metadata = encode_metadata(shape, checksums)
    record = SegmentRecord.of(shape, checksums, metadata)
    capacity_bytes = 2 * num_segments * record.num_bytes
    SsdTier(folder / "ssd", capacity_bytes).close()
    _fill(format_directory(folder / "ssd"), capacity_bytes, num_segments, record)
    evict(folder)
    with get_context("spawn").Pool(1) as pool:
        ready_s, per_s, memory_bytes = pool.apply(_open_and_look_up, (folder, capacity_bytes, num_segments))
    return [
        _at_most(f"seconds until {num_segments:,} segments can be found", ready_s, 2.0),
        _at_most("memory after that and after the lookups, GB", memory_bytes / 1e9, 1.0),
        _at_least("lookups per second, headers from the disk", per_s, 500),
    ]


def _fill(directory: Path, capacity_bytes: int, num_segments: int, record: SegmentRecord) -> None:
    """Write the tables of the index, each in its order, log files that are all hole, and every so manieth
    header."""
    index = SegmentIndex(directory, capacity_bytes)
    state = index.load_state()
    assert state is not None, "the tier has saved its state when it was closed"
    per_file = -(-num_segments // _NUM_FILES)
    end = FILE_HEADER_NUM_BYTES + per_file * record.num_bytes
    files = {}
    for number in range(1, _NUM_FILES + 1):
        file = LogFile.create(Disk(), directory, number)
        with file.path.open("r+b") as log:
            for segment in range((number - 1) * per_file, min(number * per_file, num_segments)):
                if segment % _SAMPLED == 0:
                    offset = FILE_HEADER_NUM_BYTES + segment % per_file * record.num_bytes
                    manifest = replace(record.manifest, page_keys=page_keys(segment, 0, _PAGES))
                    metadata = encode_metadata(manifest, record.checksums)
                    log.seek(offset)
                    log.write(encode_segment(manifest, metadata, file.place(offset)))
            log.truncate(end)
        files[number] = (file.file_id, end, per_file * record.num_bytes)
        file.close()
    numbers = np.arange(num_segments)
    blocks = (FILE_HEADER_NUM_BYTES + numbers % per_file * record.num_bytes) // RECORD_ALIGN
    places = ((1 + numbers // per_file << 32) + blocks).astype(">u8")
    digests = bytearray()
    like = Entry.of(record, 0, UNKNOWN_PAUSE_S)
    fingerprint = record.manifest.model.fingerprint

    def entries() -> Iterator[bytes]:
        for number in range(num_segments):
            pages = b"".join(digest_of(fingerprint, key) for key in page_keys(number, 0, _PAGES))
            digests.extend(pages)
            yield like._replace(used_at=number + 1, pages=pages).encode()

    with index.changing() as change:

        def fill(name: str, keys: Iterable[bytes], values: Iterable[bytes]) -> None:
            # Each table in its order, as nothing else is as fast.
            change._txn.cursor(getattr(change, f"_{name}")).putmulti(
                zip(keys, values, strict=True), append=True
            )

        fill("segments", _parts(places.tobytes(), 8), entries())
        fill("order", _parts((numbers + 1).astype(">u8").tobytes(), 8), _parts(places.tobytes(), 8))
        keys = np.frombuffer(digests, ">u8")
        order = np.argsort(keys.astype(np.uint64))
        fill("pages", _parts(keys[order].tobytes(), 8), _parts(places[order // _PAGES].tobytes(), 8))
        change.save_state(
            state._replace(
                files=files,
                num_segments=num_segments,
                num_pages=num_segments * _PAGES,
                stored_bytes=num_segments * record.manifest.num_bytes,
            )
        )
    index.close()


def _parts(data: bytes, num_bytes: int) -> Iterator[bytes]:
    return (data[at : at + num_bytes] for at in range(0, len(data), num_bytes))


def _open_and_look_up(folder: Path, capacity_bytes: int, num_segments: int) -> tuple[float, float, int]:
    """Seconds until the tier has opened, lookups per second, and the memory of this process in bytes."""
    started_s = time.monotonic()
    tier = SsdTier(folder / "ssd", capacity_bytes)
    if not tier.wait_until_open(_TIMEOUT_S):
        raise TiersBenchmarkError("the SSD tier did not open")
    ready_s = time.monotonic() - started_s
    model = make_model(_NUM_LAYERS)
    on_disk = range(0, num_segments, _SAMPLED)
    asked = random.Random(0).sample(on_disk, min(_NUM_LOOKUPS, len(on_disk)))
    started_s = time.monotonic()
    for number in asked:
        runs = tier.match(model, page_keys(number, 0, _PAGES), token_ids(0, _PAGES), 0)
        if [run.num_pages for run in runs] != [_PAGES]:
            raise TiersBenchmarkError(f"segment {number} was not found")
        tier.release(runs[0])
    per_s = len(asked) / (time.monotonic() - started_s)
    memory_bytes = psutil.Process().memory_info().rss
    tier.close()
    return ready_s, per_s, memory_bytes


def request_rows() -> list[dict[str, Any]]:
    """Ranks that each look up and release a stored prefix, and store a new page, so often a second."""
    context = get_context("spawn")
    barrier, reached = context.Barrier(_NUM_RANKS + 1), context.SimpleQueue()
    with closing(EmbeddedDaemon(["--host-memory", str(_ARENA_BYTES)])) as daemon:
        of_each = [(rank, daemon.runtime_dir, barrier, reached) for rank in range(_NUM_RANKS)]
        ranks = [context.Process(target=_play_or_abort, args=arguments) for arguments in of_each]
        for rank in ranks:
            rank.start()
        times = psutil.Process(daemon.pid).cpu_times
        barrier.wait(_TIMEOUT_S)
        before, started_s = times(), time.monotonic()
        barrier.wait(_TIMEOUT_S)
        after, seconds = times(), time.monotonic() - started_s
        num_requests = sum(reached.get() for _ in ranks)
        for rank in ranks:
            rank.join()
    cores = (after.user + after.system - before.user - before.system) / seconds
    asked = f"{_NUM_RANKS} ranks x {_REQUESTS_PER_S} requests/s"
    return [
        _at_most(f"cores of the daemon for {asked}", cores, 0.5),
        _at_least("requests per second reached", num_requests / seconds, 0.95 * _NUM_RANKS * _REQUESTS_PER_S),
    ]


def _play_or_abort(rank: int, runtime_dir: Path, barrier: Any, reached: Any) -> None:
    try:
        _play_rank(rank, runtime_dir, barrier, reached)
    except BaseException:
        barrier.abort()
        raise


def _play_rank(rank: int, runtime_dir: Path, barrier: Any, reached: Any) -> None:
    """One rank, in a process of its own; between two meetings at the barrier it plays requests."""
    model = replace(make_model(_NUM_LAYERS), tp_rank=rank, tp_size=_NUM_RANKS)
    sizes = (_SMALL_BLOCK_BYTES,) * _NUM_LAYERS
    with closing(DaemonStore(runtime_dir, model=model, request_timeout_s=_TIMEOUT_S)) as store:

        def put(conversation: int, num_pages: int) -> None:
            manifest = make_manifest(model, conversation, 0, num_pages, sizes)
            reservation = store.reserve(sizes)
            if reservation is None:
                raise TiersBenchmarkError("the arena had no room for a segment")
            store.commit(reservation, manifest, no_checksums(manifest))

        put(0, _PREFIX_PAGES)
        barrier.wait(_TIMEOUT_S)
        started_s, number = time.monotonic(), 0
        while (now_s := time.monotonic() - started_s) < _REQUESTS_S:
            if now_s < number / _REQUESTS_PER_S:
                time.sleep(number / _REQUESTS_PER_S - now_s)
            lease = store.lease(model, page_keys(0, 0, _PREFIX_PAGES), token_ids(0, _PREFIX_PAGES))
            if lease is None or lease.num_pages != _PREFIX_PAGES:
                raise TiersBenchmarkError("a prefix that is always in use was evicted")
            store.release(lease)
            number += 1
            put(number, 1)
        barrier.wait(_TIMEOUT_S)
        reached.put(number)


def _at_most(name: str, value: float, bound: float) -> dict[str, Any]:
    return {"name": name, "value": value, "bound": bound, "met": value <= bound}


def _at_least(name: str, value: float, bound: float) -> dict[str, Any]:
    return {"name": name, "value": value, "bound": bound, "met": value >= bound}


def run(folder: Path | None, capacity_bytes: int, num_segments: int, seed: int) -> dict[str, Any]:
    """All rows. Raises TiersBenchmarkError if the tier refuses a segment, or does not find one."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        rows = space_rows(Path(name), capacity_bytes, seed)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        rows += index_rows(Path(name), num_segments)
        kind = subprocess.run(["stat", "-f", "-c", "%T", name], capture_output=True, text=True, check=True)
    rows += request_rows()
    configuration = {
        "capacity_bytes": capacity_bytes,
        "num_segments": num_segments,
        "seed": seed,
        "file_system": kind.stdout.strip(),
    }
    return {"configuration": configuration, "rows": rows}


_ROWS: Columns = {
    "what": cell("name"),
    "value": cell("value", "{:.4g}"),
    "bound": cell("bound", "{:g}"),
    "met": cell("met", lambda met: "yes" if met else "no"),
}


def scale_table(result: Result, path: Path | None) -> str:
    """A line for each row."""
    of = f"File system: {result['configuration']['file_system']}."
    return f"{table_of(_ROWS, result['rows'])}\n\n{of} {source(path)}"


def main() -> int:
    given = _parser().parse_args()
    options = (given.folder, given.capacity_bytes, given.num_segments, given.seed)
    return runner.run(given, lambda: run(*options), scale_table)


def _parser() -> argparse.ArgumentParser:
    parser = runner.make_parser("scale", "An SSD tier of millions of segments.", seed=0)
    parser.add_argument("--capacity-bytes", type=int, default=512 * MIB, help="the cap of the tier")
    parser.add_argument("--num-segments", type=int, default=3_000_000, help="in the index")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: of temporary files)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
