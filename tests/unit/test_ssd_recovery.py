"""Starting on what is left: damage costs what it hits, and nothing of others is ever touched."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from krul_backend.errors import DaemonError, TierReadError
from krul_backend.segment import FORMAT_VERSION, ModelIdentity
from krul_backend.tiers.common.interface import block_checksums
from krul_backend.tiers.common.record import SegmentRecord, encode_metadata, encode_segment, no_checksums
from krul_backend.tiers.ssd.own_files import encode_file_header
from krul_backend.tiers.ssd.ssd_tier import SsdTier
from tests.support.ssd_builders import FaultyDisk, disk_bytes, has, open_tier, put
from tests.support.store_builders import make_manifest, make_model

NUM_RECORDS = 40
OPTIONS = {"capacity_bytes": 4 << 20, "file_bytes": 1 << 20}
PAGE = 4096


def offsets_of_headers(data: bytes) -> list[int]:
    return [at for at in range(0, len(data), PAGE) if data.startswith(b"KRULSEG1", at)]


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def found_of(directory: Path) -> list[bool]:
    """Which of the records are found and read right, in the order in which they were written."""
    tier = open_tier(directory, **OPTIONS)
    found = []
    for number in range(NUM_RECORDS):
        try:
            found.append(has(tier, f"c{number}", seed=number))
        except TierReadError:
            found.append(False)
    tier.close()
    return found


@pytest.fixture(scope="module")
def flushed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tier with 40 flushed records in one log."""
    directory = tmp_path_factory.mktemp("flushed")
    tier = open_tier(directory, **OPTIONS)
    for number in range(NUM_RECORDS):
        put(tier, f"c{number}", seed=number)
    tier.close()
    files = {path.name: path.read_bytes() for path in next(directory.iterdir()).iterdir()}
    assert len(offsets_of_headers(files["00000001.log"])) == NUM_RECORDS
    return files


@pytest.fixture
def log(flushed: dict[str, bytes], tmp_path: Path) -> Path:
    """The log file of such a tier, in a directory of its own."""
    return restore_files(flushed, tmp_path)


def restore_files(files: dict[str, bytes], directory: Path) -> Path:
    own = directory / f"krul-v{FORMAT_VERSION}"
    own.mkdir(exist_ok=True)
    for name, data in files.items():
        (own / name).write_bytes(data)
    return own / "00000001.log"


@pytest.mark.parametrize("damaged", [0, NUM_RECORDS // 2, NUM_RECORDS - 1])
@pytest.mark.parametrize(
    "at",
    [
        pytest.param(3, id="magic"),
        pytest.param(9, id="checksum"),
        pytest.param(17, id="header_num_bytes"),
        pytest.param(19, id="header_num_bytes, much too large"),
        pytest.param(25, id="record_num_bytes"),
        pytest.param(28, id="record_num_bytes, past the end"),
        pytest.param(32, id="zeros"),
        pytest.param(42, id="number of layers"),
        pytest.param(65, id="a block's size"),
        pytest.param(200, id="the rest"),
        pytest.param(None, id="a block's checksum"),
        pytest.param(5000, id="a block"),
    ],
)
def test_a_flipped_bit_costs_the_record_that_it_hits(log: Path, damaged: int, at: int | None) -> None:
    data = log.read_bytes()
    offset = offsets_of_headers(data)[damaged]
    if at is None:  # The header ends with them.
        at = int.from_bytes(data[offset + 16 : offset + 24], "little") - 1
    flip(log, offset + at)
    assert found_of(log.parents[1]) == [number != damaged for number in range(NUM_RECORDS)]


@pytest.mark.parametrize("at", [0, 9, 17, 25, 33, 41])
@pytest.mark.parametrize("copy", [0, 2048])
def test_a_flipped_bit_of_the_files_header_costs_nothing(log: Path, at: int, copy: int) -> None:
    flip(log, copy + at)
    assert found_of(log.parents[1]) == [True] * NUM_RECORDS


def test_several_damaged_headers_cost_their_records(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    # So that the log is read.
    (log.parent / "index").unlink()
    damaged = (0, 1, 7, 22, 23, 24, 39)
    for number in damaged:
        flip(log, offsets_of_headers(log.read_bytes())[number] + 30)
    with caplog.at_level(logging.WARNING):
        assert found_of(log.parents[1]) == [number not in damaged for number in range(NUM_RECORDS)]
    # The last one is a torn tail like any other.
    assert [record.message for record in caplog.records] == [
        f"{log} is damaged: {6 * 12288} bytes of it are skipped"
    ]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30), num_flips=st.integers(1, 6))
def test_flips_anywhere_cost_no_more_records_than_there_are_flips(
    flushed: dict[str, bytes], tmp_path: Path, seed: int, num_flips: int
) -> None:
    log = restore_files(flushed, tmp_path)
    rng = random.Random(seed)
    for _ in range(num_flips):
        # Past the file's own header, of which two flips may hit both copies.
        flip(log, rng.randrange(PAGE, len(flushed[log.name])), rng.randrange(8))
    assert found_of(tmp_path).count(False) <= num_flips


def test_what_is_damaged_is_written_over_and_the_rest_kept(log: Path) -> None:
    flip(log, offsets_of_headers(log.read_bytes())[3])
    tier = open_tier(log.parents[1], **OPTIONS)
    assert not has(tier, "c3")
    assert put(tier, "c3", seed=3)
    tier.close()
    assert found_of(log.parents[1]) == [True] * NUM_RECORDS


def first_block_at(conversation: str, num_bytes: int, model: ModelIdentity) -> int:
    """Where the block starts in the record of ``put_block``."""
    manifest = make_manifest(conversation, 0, 2, (num_bytes,), model)
    zeros = no_checksums(manifest)
    return SegmentRecord.of(manifest, zeros, encode_metadata(manifest, zeros)).block_offsets[0]


def put_block(tier: SsdTier, conversation: str, content: bytes) -> None:
    block = np.frombuffer(content, np.uint8)
    model = make_model("tiny", num_layers=1)
    manifest = make_manifest(conversation, 0, 2, (len(content),), model)
    assert tier.put(manifest, [block], block_checksums([block]), lambda: None)
    assert tier.flush(20)


def test_headers_within_somebodys_kv_are_not_found(tmp_path: Path) -> None:
    model = make_model("tiny", num_layers=1)
    tier = open_tier(tmp_path)
    put(tier, "other", seed=2)
    put(tier, "cleared", sizes=(600,), model=model, seed=1)
    (path,) = tmp_path.rglob("*.log")
    first, second = (path.read_bytes()[at : at + PAGE] for at in offsets_of_headers(path.read_bytes()))
    assert b"cleared/0" in second
    tier.clear(model)
    put(tier, "before", sizes=(600,), model=model)
    (start,) = offsets_of_headers((path.parent / "00000002.log").read_bytes())
    forged_manifest = make_manifest("forged", 0, 2, (600,), model)
    forged = encode_segment(forged_manifest, encode_metadata(forged_manifest, (b"55555555",)))
    # They lie at multiples of 4096 of the file, as if they were headers.
    pages = b"".join(header.ljust(PAGE, b"\0") for header in (forged, second, first))
    put_block(tier, "imitation", bytes(PAGE - first_block_at("imitation", 4 * PAGE, model)) + pages)
    put(tier, "after", seed=3)
    tier.close()
    path = path.parent / "00000002.log"
    offsets = offsets_of_headers(path.read_bytes())
    # before, imitation, its three, after
    assert len(offsets) == 6
    assert offsets[0] == start
    flip(path, offsets[1] + 20)
    tier = open_tier(tmp_path)
    assert has(tier, "before", model=model)
    assert has(tier, "after", seed=3)
    assert has(tier, "other", seed=2)
    assert sorted(info.num_bytes for info in tier.list_segments()) == [600, 9000, 9000]
    tier.close()


def test_a_record_of_another_file_in_the_same_place_is_not_found(log: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    tier = open_tier(elsewhere, **OPTIONS)
    put(tier, "stale")
    tier.close()
    (other,) = elsewhere.rglob("*.log")
    data = log.read_bytes()
    stale = other.read_bytes()[PAGE:]
    assert offsets_of_headers(data)[:2] == [PAGE, PAGE + len(stale)]
    log.write_bytes(data[:PAGE] + stale + data[PAGE + len(stale) :])
    tier = open_tier(tmp_path, **OPTIONS)
    assert not has(tier, "stale")
    assert not has(tier, "c0")
    assert has(tier, "c1", seed=1)
    tier.close()


def test_a_file_that_cannot_be_read_for_a_while_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, other = make_model("old"), make_model("other")
    disk = FaultyDisk()
    tier = open_tier(tmp_path)
    put(tier, "a", model=old, seed=1)
    put(tier, "a", model=other, seed=2)
    tier.close()
    disk.unreadable = {"00000001.log"}
    with caplog.at_level(logging.WARNING):
        tier = open_tier(tmp_path, disk)
    (record,) = caplog.records
    assert "left alone" in record.message
    assert "00000001.log (injected)" in record.message
    used_bytes = tier.stats().used_bytes
    assert used_bytes == disk_bytes(tmp_path) > 0
    assert not has(tier, "a", model=other)
    # Neither is it forgotten what is cleared of it, nor do later records take its name.
    tier.clear(old)
    put(tier, "b", model=old, seed=3)
    assert has(tier, "b", model=old, seed=3)
    tier.close()
    tier = open_tier(tmp_path)
    assert not has(tier, "a", model=old)
    assert has(tier, "a", model=other, seed=2)
    assert has(tier, "b", model=old, seed=3)
    tier.close()


def test_a_clear_that_cannot_be_noted_says_so_if_a_file_could_not_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk()
    tier = open_tier(tmp_path)
    put(tier, "a")
    tier.close()
    disk.unreadable = {"00000001.log"}
    tier = open_tier(tmp_path, disk)
    disk.errors["pwritev"] = errno.EIO
    tier.clear()
    assert "finds old KV again" in caplog.text
    assert disk_bytes(tmp_path) > 0
    tier.close()


def test_nothing_is_removed_if_it_cannot_be_read_what_was_cleared(tmp_path: Path) -> None:
    disk = FaultyDisk()
    tier = open_tier(tmp_path)
    put(tier, "a", seed=1)
    tier.close()
    disk.unreadable = {"clears"}
    with pytest.raises(DaemonError, match="cannot be read"):
        open_tier(tmp_path, disk)
    tier = open_tier(tmp_path)
    assert has(tier, "a", seed=1)
    tier.close()


def test_a_file_that_could_not_be_read_when_the_clears_were_lost_stays_forgotten(tmp_path: Path) -> None:
    disk = FaultyDisk()
    tier = open_tier(tmp_path)
    put(tier, "a")
    tier.close()
    (clears,) = tmp_path.rglob("clears")
    clears.unlink()
    disk.unreadable = {"00000001.log"}
    open_tier(tmp_path, disk).close()
    tier = open_tier(tmp_path)
    assert not has(tier, "a")
    assert disk_bytes(tmp_path) == 0
    tier.close()


def older_directory(directory: Path) -> Path:
    """What a daemon of format 3 left behind, as far as later formats know it."""
    older = directory / "krul-v3"
    older.mkdir()
    body = struct.pack("<QI", 1, 3)
    header = struct.pack("<8sQ", b"KRULLOG1", xxhash.xxh3_64_intdigest(body)) + body
    (older / "00000001.log").write_bytes(header.ljust(100_000, b"\0"))
    (older / "clears").write_bytes(b"KRULCLR1 and so on")
    (older / "lock").write_bytes(b"process 1 (krul-backend)\n")
    (older / "probe.tmp").write_bytes(b"half")
    return older


def test_files_of_an_older_format_are_removed_with_their_directory(tmp_path: Path) -> None:
    older = older_directory(tmp_path)
    newer = tmp_path / f"krul-v{FORMAT_VERSION + 1}"
    newer.mkdir()
    (newer / "lock").write_bytes(b"")
    open_tier(tmp_path).close()
    assert not older.exists()
    assert newer.exists()


def test_what_the_format_before_wrote_is_removed_and_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in its own directory nor, moved by somebody, in this format's."""
    with monkeypatch.context() as older_version:
        for module in ("common.record", "ssd.own_files"):
            older_version.setattr(f"krul_backend.tiers.{module}.FORMAT_VERSION", FORMAT_VERSION - 1)
        tier = open_tier(tmp_path)
        for number in range(3):
            put(tier, f"c{number}", seed=number)
        tier.close()
    (older,) = tmp_path.iterdir()
    assert older.name == f"krul-v{FORMAT_VERSION - 1}"
    own = tmp_path / f"krul-v{FORMAT_VERSION}"
    own.mkdir()
    moved = own / "00000001.log"
    moved.write_bytes((older / "00000001.log").read_bytes())
    # With a header that says that the file is of this format, its records still are not.
    data = moved.read_bytes()
    file_id = int.from_bytes(data[32:40], "little")
    (own / "00000002.log").write_bytes(encode_file_header(2, file_id) + data[PAGE:])
    tier = open_tier(tmp_path)
    assert (tier.list_segments(), tier.stats().corrupted_segments) == ([], 0)
    assert not older.exists()
    assert put(tier, "c1", seed=7)
    assert has(tier, "c1", seed=7)
    tier.close()


def test_an_older_directory_that_is_in_use_stays(tmp_path: Path) -> None:
    older = older_directory(tmp_path)
    lock = os.open(older / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    open_tier(tmp_path).close()
    assert len(list(older.iterdir())) == 4
    os.close(lock)
    open_tier(tmp_path).close()
    assert not older.exists()


def test_foreign_files_in_an_older_directory_stay(tmp_path: Path) -> None:
    older = older_directory(tmp_path)
    for name in ("00000002.log", "app.log", "notes.tmp"):
        (older / name).write_bytes(b"somebody's")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    linked = older_directory(elsewhere)
    (tmp_path / "krul-v2").symlink_to(linked)
    without_lock = tmp_path / "krul-v1"
    without_lock.mkdir()
    (without_lock / "clears").write_bytes(b"KRULCLR1 and so on")
    open_tier(tmp_path).close()
    assert {path.name for path in older.iterdir()} == {"00000002.log", "app.log", "notes.tmp", "lock"}
    assert len(list(linked.iterdir())) == 4
    assert len(list(without_lock.iterdir())) == 1


def test_files_of_another_format_in_this_formats_directory_are_removed(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    (own,) = tmp_path.iterdir()
    older = older_directory(tmp_path)
    (older / "00000001.log").rename(own / "00000001.log")
    tier = open_tier(tmp_path)
    assert not (own / "00000001.log").exists()
    assert put(tier, "a", seed=1)
    tier.close()


def foreign_logs(directory: Path) -> dict[Path, bytes]:
    files = {directory / name: f"{name} of a web server".encode() for name in ("00000001.log", "access.log")}
    for path, content in files.items():
        path.write_bytes(content)
    return files


def test_a_linked_directory_with_foreign_logs_is_used_beside_them(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    linked = tmp_path / "ssd"
    linked.symlink_to(elsewhere)
    foreign = foreign_logs(elsewhere)
    for seed in (1, 2):
        tier = open_tier(linked)
        put(tier, f"c{seed}", seed=seed)
        assert has(tier, "c1", seed=1)
        tier.close()
    assert {path: path.read_bytes() for path in foreign} == foreign


def test_a_link_in_the_place_of_the_tiers_own_directory_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o755)
    foreign = foreign_logs(elsewhere)
    (tmp_path / f"krul-v{FORMAT_VERSION}").symlink_to(elsewhere)
    with pytest.raises(DaemonError, match="symbolic link"):
        open_tier(tmp_path)
    assert {path: path.read_bytes() for path in elsewhere.iterdir()} == foreign
    assert elsewhere.stat().st_mode & 0o777 == 0o755


def test_foreign_files_and_links_in_the_tiers_own_directory_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", seed=1)
    tier.close()
    (own,) = tmp_path.iterdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (own / "00000001.log").rename(elsewhere / "00000001.log")
    foreign = foreign_logs(own)
    (own / "notes.tmp").write_bytes(b"somebody's")
    (own / "00000002.log").symlink_to(elsewhere / "00000001.log")
    linked = (elsewhere / "00000001.log").read_bytes()
    with caplog.at_level(logging.WARNING):
        tier = open_tier(tmp_path)
    assert [record.message for record in caplog.records] == [
        f"left alone in {own}: 00000001.log (not a file of this tier), 00000002.log (not a file of this tier)"
    ]
    put(tier, "b", seed=2)
    tier.clear()
    put(tier, "b", seed=3)
    tier.close()
    tier = open_tier(tmp_path)
    assert has(tier, "b", seed=3)
    tier.close()
    assert {path: path.read_bytes() for path in foreign} == foreign
    assert (own / "notes.tmp").exists()
    assert (elsewhere / "00000001.log").read_bytes() == linked


@pytest.mark.parametrize("name", ["lock", "index", "index-lock"])
def test_a_link_in_the_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    open_tier(tmp_path).close()
    (own,) = tmp_path.iterdir()
    target = tmp_path / "target"
    target.write_bytes(b"somebody's")
    (own / name).unlink()
    (own / name).symlink_to(target)
    with pytest.raises(DaemonError, match=r"cannot use|symbolic link"):
        open_tier(tmp_path)
    assert target.read_bytes() == b"somebody's"
