"""The benchmark's tiers and load stream: the right bytes, no faster than the tier, into the right slots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.restore import tiers
from benchmarks.restore.configuration import RestoreBenchmarkError, TierSpec
from benchmarks.restore.model import KVPool
from benchmarks.restore.stored import segment_ends
from benchmarks.restore.tiers import DamagedPartError, DramTier, Link, SsdTier, Tier
from krul_backend.device import Device
from tests.support.restore_bench_builders import HISTORY_TOKENS, NAN, SHAPE, Bench, bench

CPU = Device(torch.device("cpu"))
HEADS = [(0, 0, 0, 0), (256, 192, 64, 0), (128, 128, 64, 64), (192, 0, 0, 0), (256, 256, 256, 256)]


@pytest.fixture
def built() -> Iterator[Bench]:
    with bench() as made:
        yield made


@pytest.mark.parametrize("head_ends", HEADS)
@pytest.mark.parametrize("strategy", ["native", "minicache", "krul", "krul-int4"])
def test_tails_are_loaded_and_nothing_else_is_written(
    built: Bench, strategy: str, head_ends: tuple[int, ...]
) -> None:
    stored, pool = built.stored[strategy], built.restorer.pool
    expected = KVPool(SHAPE.kv_shape(torch.float32), SHAPE.num_layers, pool.num_slots, pool.device)
    expected.fill(NAN)
    stored.decode_tails(head_ends, expected, built.turn.slots)

    loading = built.loader.start(stored, built.tier, head_ends, built.turn.slots)
    loading.finish()

    assert loading.num_bytes == stored.tail_bytes(head_ends)
    assert len(loading.marks) == SHAPE.num_layers
    for written, wanted in zip((*pool.k, *pool.v), (*expected.k, *expected.v), strict=True):
        torch.testing.assert_close(written, wanted, atol=0, rtol=0, equal_nan=True)


def test_what_was_stored_natively_comes_back_to_the_bit(built: Bench) -> None:
    head_ends = (256, 192, 64, 0)
    built.loader.start(built.stored["native"], built.tier, head_ends, built.turn.slots).finish()
    for layer, head_end in enumerate(head_ends):
        kv = built.restorer.pool.gather(layer, built.turn.slots[head_end:HISTORY_TOKENS])
        assert torch.equal(kv.k, built.history[layer].k[head_end:])
        assert torch.equal(kv.v, built.history[layer].v[head_end:])


def test_what_is_copied_is_checked_first_and_nothing_else(
    built: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, head_ends = built.stored["krul"], (256, 192, 64, 0)
    order: list[tuple[str, tuple[object, ...], int]] = []
    check, read = DramTier.check, DramTier.read

    def checked(tier: DramTier, key: tuple[object, ...], first_byte: int) -> None:
        check(tier, key, first_byte)
        order.append(("check", key, first_byte))

    def copied(tier: DramTier, key: tuple[object, ...], first_byte: int) -> torch.Tensor:
        order.append(("copy", key, first_byte))
        return read(tier, key, first_byte)

    monkeypatch.setattr(DramTier, "check", checked)
    monkeypatch.setattr(DramTier, "read", copied)
    built.loader.start(stored, built.tier, head_ends, built.turn.slots).finish()
    copies = [(key, first_byte) for what, key, first_byte in order if what == "copy"]
    assert [(key, first_byte) for what, key, first_byte in order if what == "check"] == copies != []
    for key, first_byte in copies:
        assert order.index(("check", key, first_byte)) < order.index(("copy", key, first_byte))


def test_a_damaged_block_is_not_loaded(built: Bench) -> None:
    stored, everything = built.stored["native"], (0,) * SHAPE.num_layers
    built.loader.start(stored, built.tier, everything, built.turn.slots).finish()
    built.restorer.pool.fill(NAN)
    built.tier._host_bytes(stored.key(1, 2))[5] ^= 0x10
    loading = built.loader.start(stored, built.tier, everything, built.turn.slots)
    loading.wait(1)
    with pytest.raises(DamagedPartError, match="has changed from byte 0 on in dram"):
        loading.wait(2)
    assert built.restorer.pool.k[1].isnan().any(dim=(1, 2)).sum() < built.restorer.pool.num_slots
    assert built.restorer.pool.k[3].isnan().all()


def test_bytes_of_a_disk_are_checked_when_they_have_come(tmp_path: Path) -> None:
    tier = SsdTier(CPU, tmp_path)
    tier.add(("block",), torch.ones(10_000, dtype=torch.uint8))
    assert torch.equal(tier.read(("block",), 0), torch.ones(10_000, dtype=torch.uint8))
    damaged = bytearray((tmp_path / "blocks").read_bytes())
    damaged[9_000] ^= 0x10
    (tmp_path / "blocks").write_bytes(damaged)
    with pytest.raises(DamagedPartError, match="in ssd"):
        tier.read(("block",), 0)
    tier.close()


def test_tail_bytes_of_native_tails_are_those_of_their_tokens(built: Bench) -> None:
    token_bytes = SHAPE.kv_token_bytes(torch.float32) // SHAPE.num_layers
    stored = built.stored["native"]
    assert stored.tail_bytes((256, 192, 64, 0)) == (0 + 64 + 192 + 256) * token_bytes
    assert built.stored["krul"].tail_bytes((0,) * 4) < stored.tail_bytes((0,) * 4)


def test_a_failed_load_is_raised_where_its_layer_is_awaited(built: Bench) -> None:
    with_nothing = DramTier(CPU)
    loading = built.loader.start(built.stored["native"], with_nothing, (0, 0, 0, 0), built.turn.slots)
    with pytest.raises(KeyError):
        loading.wait(0)


@pytest.mark.parametrize("tier_name", ["dram", "ssd"])
def test_a_tier_reads_the_end_of_a_block(tier_name: str, tmp_path: Path) -> None:
    tier: Tier = TierSpec(tier_name).open(CPU, tmp_path)
    generator = torch.Generator().manual_seed(0)
    blocks = {
        (number,): torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
        for number, size in enumerate((16, 4096, 10_000, 123_456))
    }
    for key, block in blocks.items():
        tier.add(key, block)
    for key, block in blocks.items():
        for first_byte in (0, 16, 4080, 4096, 8192, 9984):
            if first_byte < block.numel():
                assert torch.equal(tier.read(key, first_byte), block[first_byte:])
    tier.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_lost_its_end_is_an_error(tmp_path: Path) -> None:
    tier = SsdTier(CPU, tmp_path)
    tier.add(("block",), torch.ones(10_000, dtype=torch.uint8))
    (tmp_path / "blocks").write_bytes(b"")
    with pytest.raises(OSError, match="missing"):
        tier.read(("block",), 0)
    tier.close()


@pytest.mark.parametrize(
    ("bandwidth_gbs", "passed_s", "slept"),
    [(None, 0.0, []), (0.5, 0.0, [2.0]), (0.5, 0.75, [1.25]), (0.5, 2.0, []), (0.5, 3.0, [])],
)
def test_a_link_holds_back_what_cannot_have_arrived(
    monkeypatch: pytest.MonkeyPatch, bandwidth_gbs: float | None, passed_s: float, slept: list[float]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(tiers.time, "perf_counter", lambda: 100.0 + passed_s)
    monkeypatch.setattr(tiers.time, "sleep", waits.append)
    Link(bandwidth_gbs).hold(started_s=100.0, num_bytes=1_000_000_000)
    assert waits == pytest.approx(slept)


def test_a_limited_tier_holds_back_its_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    monkeypatch.setattr(Link, "hold", lambda link, started_s, num_bytes: held.append(num_bytes))
    tier = DramTier(CPU, bandwidth_gbs=0.1)
    tier.add(("block",), torch.zeros(1000, dtype=torch.uint8))
    tier.read(("block",), 400)
    assert held == [600]


def test_tiers_by_name() -> None:
    assert TierSpec.parse("dram") == TierSpec("dram", None)
    assert TierSpec.parse("ssd:0.2") == TierSpec("ssd", 0.2)
    assert TierSpec.parse("ssd", bandwidth_gbs=3.0) == TierSpec("ssd", 3.0)
    assert TierSpec.parse("ssd:0.2", bandwidth_gbs=3.0) == TierSpec("ssd", 0.2)
    for wrong in ("tape", "dram:fast", "dram:0", "dram:-1", "dram:nan"):
        with pytest.raises(RestoreBenchmarkError, match="tier"):
            TierSpec.parse(wrong)


def test_segments_end_at_pages() -> None:
    assert segment_ends(512, 4, 64) == [128, 256, 384, 512]
    assert segment_ends(320, 4, 64) == [64, 128, 192, 320]
    assert segment_ends(128, 4, 64) == [64, 128]
    assert segment_ends(64, 1, 64) == [64]
