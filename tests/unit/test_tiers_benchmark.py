"""The benchmark of the tiers, end to end at tiny sizes, and checks that notice wrong bytes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import runner
from benchmarks.tiers import __main__ as whole_run
from benchmarks.tiers.__main__ import targets, tiers_table
from benchmarks.tiers.configuration import KIB, MIB, Configuration, TiersBenchmarkError
from benchmarks.tiers.dram import fragmentation_row
from benchmarks.tiers.segments import Source
from benchmarks.tiers.timing import byte_row, interleaved, percentile, summarize

LEFT_OUT = {"op": "mooncake", "left_out": "not here"}
DRAM_OPS = ("dram-write", "dram-read", "dram-verify-read")
DISK_OPS = ("ssd-write", "ssd-read-cold")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with a real daemon; a cluster is for the integration tests."""
    configuration = Configuration(
        block_bytes=(64 * KIB, 256 * KIB),
        segment_bytes=512 * KIB,
        max_blocks=4,
        repeats=2,
        disk_repeats=2,
        lookup_pages=(1, 100),
        lookup_repeats=5,
        index_segments=(20, 100),
        index_repeats=20,
        arena_bytes=64 * MIB,
        churn=400,
        churn_arena_bytes=8 * MIB,
        folder=tmp_path_factory.mktemp("tiers"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_run, "mooncake_rows", lambda configuration, folder: [LEFT_OUT])
        return {**runner.about(), **whole_run.run(configuration)}


def of(result: dict[str, Any], op: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["op"] == op]


def test_each_operation_has_a_row_of_each_size(result: dict[str, Any]) -> None:
    for op in DRAM_OPS:
        assert [(row["size_bytes"], row["num_blocks"]) for row in of(result, op)] == [
            (64 * KIB, 1),
            (64 * KIB, 4),
            (256 * KIB, 1),
            (256 * KIB, 2),
        ]
    for op in DISK_OPS:
        assert [(row["size_bytes"], row["num_blocks"]) for row in of(result, op)] == [
            (64 * KIB, 4),
            (256 * KIB, 2),
        ]
    assert [row["num_pages"] for row in of(result, "lookup")] == [1, 100]
    assert [row["num_segments"] for row in of(result, "index-lookup")] == [20, 100]
    assert of(result, "mooncake") == [LEFT_OUT]
    assert {"git_revision", "versions", "machine", "command", "configuration"} <= set(result)


def test_numbers_of_a_row_follow_from_its_samples(result: dict[str, Any]) -> None:
    for op in DRAM_OPS + DISK_OPS:
        for row in of(result, op):
            num_bytes = row["size_bytes"] * row["num_blocks"]
            assert len(row["samples_s"]) == row["n"] == 2
            assert row["throughput_gbs"] == pytest.approx(num_bytes / (row["p50_us"] * 1e3))
            assert row["p99_us"] == max(row["samples_s"]) * 1e6
            beside = row["disk_gbs"] if op in DISK_OPS else row["memcpy_gbs"]
            assert row["ratio"] == pytest.approx(row["throughput_gbs"] / beside)


def test_a_summary_has_the_same_table_and_no_samples(result: dict[str, Any]) -> None:
    kept = summarize(result)
    assert tiers_table(kept, None) == tiers_table(result, None)
    assert not any("samples_s" in row for row in kept["rows"])
    for row in of(kept, "dram-write"):
        assert row["memcpy_samples_s"]["n"] == row["n"]
        assert row["memcpy_gbs"] * row["memcpy_samples_s"]["median"] * 1e9 == pytest.approx(
            row["size_bytes"] * row["num_blocks"]
        )
    (fragmentation,) = of(kept, "fragmentation")
    assert fragmentation["samples"]["n"] == fragmentation["n"]


def test_metadata_is_counted_without_the_blocks(result: dict[str, Any]) -> None:
    rows = of(result, "ssd-metadata")
    native_bytes = 32 * 1024 * 8 * 256 * 2
    assert [row["stored_bytes"] for row in rows] == [native_bytes, native_bytes // 4, native_bytes // 8]
    # 1,024 token ids and 64 keys are there whatever the blocks' size.
    assert all(row["metadata_bytes"] > 1024 * 4 + 64 * 32 for row in rows)
    assert rows[0]["share"] < rows[1]["share"] < rows[2]["share"]


def test_a_full_arena_keeps_little_that_it_cannot_use(result: dict[str, Any]) -> None:
    (row,) = of(result, "fragmentation")
    assert len(row["samples"]) == row["n"] > 0
    assert 0 < row["free_share_mean"] <= row["free_share_p99"] < 1


def test_the_table_has_a_line_per_row_and_says_what_is_left_out(result: dict[str, Any]) -> None:
    table = tiers_table(result, None)
    lines = table.splitlines()
    assert sum(line.startswith("| dram-write |") for line in lines) == 4
    assert any(line.startswith("| ssd-read-cold | 256 KiB | 2 |") for line in lines)
    assert "mooncake: not here" in table
    assert "lookup of 100 pages" in table
    met = [line for line in lines if line.endswith(("| yes |", "| no |"))]
    assert len(met) == len(result["targets"])


def test_targets_take_the_worst_row() -> None:
    rows = [
        {"op": "dram-read", "size_bytes": MIB, "num_blocks": 8, "ratio": 0.9},
        {"op": "dram-read", "size_bytes": 8 * MIB, "num_blocks": 8, "ratio": 0.7},
        {"op": "dram-read", "size_bytes": 8 * MIB, "num_blocks": 1, "ratio": 0.1},
        {"op": "dram-read", "size_bytes": 64 * MIB, "num_blocks": 2, "ratio": 0.1},
        {"op": "lookup", "num_pages": 1000, "p50_us": 900.0},
        {"op": "index-lookup", "num_segments": 1000, "p99_us": 10.0},
        {"op": "index-lookup", "num_segments": 10, "p99_us": 4.0},
    ]
    found = {target["name"]: (target["value"], target["is_met"]) for target in targets(rows)}
    assert found == {
        "DRAM read, share of memcpy, blocks of 1-8 MiB": (0.7, False),
        "lookup of 1,000 pages, p50 in ms": (0.9, True),
        "lookup p99, largest index to smallest": (2.5, False),
    }


def test_bytes_of_another_segment_are_noticed() -> None:
    source = Source(128, 2)
    source.stamp(3)
    copies = [block.copy() for block in source.blocks]
    source.check(3, copies, "test")
    with pytest.raises(TiersBenchmarkError, match="layer 0 of segment 4"):
        source.check(4, copies, "test")
    copies[1][127] ^= 1
    with pytest.raises(TiersBenchmarkError, match="layer 1 of segment 3"):
        source.check(3, copies, "test")


def test_operations_take_turns_after_a_warm_up() -> None:
    calls: list[str] = []

    def operation(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    taken = interleaved({"a": lambda: operation("a"), "b": lambda: operation("b")}, 2)
    assert calls == ["a", "b"] * 3
    assert taken == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_rows_are_medians_and_percentiles() -> None:
    assert percentile([float(number) for number in range(1, 201)], 0.99) == 198.0
    assert percentile([5.0], 0.99) == 5.0
    row = byte_row(
        "op", [2.0, 1.0, 4.0], block_bytes=10**9, num_blocks=2, memcpy_s=[1.0], disk_s=[4.0, 4.0, 1.0]
    )
    assert (row["throughput_gbs"], row["memcpy_gbs"], row["disk_gbs"], row["ratio"]) == (1.0, 2.0, 0.5, 2.0)
    assert (row["p50_us"], row["p99_us"]) == (2e6, 4e6)


@pytest.mark.parametrize(
    "options", [{"block_bytes": ()}, {"block_bytes": (1,)}, {"repeats": 0}, {"arena_bytes": 128 * MIB}]
)
def test_options_that_measure_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(TiersBenchmarkError):
        Configuration(**options)


def test_an_arena_that_never_fills_measures_nothing() -> None:
    with pytest.raises(TiersBenchmarkError, match="never filled"):
        fragmentation_row(Configuration(churn=2))


def test_blocks_of_a_segment_are_bounded() -> None:
    configuration = Configuration()
    assert [configuration.num_blocks(size) for size in configuration.block_bytes] == [32, 32, 32, 16, 8, 1]
