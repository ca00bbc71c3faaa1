"""What Prometheus reads is what the store counts, and a scrape never hurts the daemon."""

from __future__ import annotations

import logging
import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from krul_backend.daemon.protocol.messages import DaemonStats
from krul_backend.daemon.server.metrics import DaemonMetrics
from krul_backend.errors import StoreClosedError
from krul_backend.tiers.common.interface import StoreStats
from tests.support.stats_builders import make_daemon_stats, make_store_stats, make_tier_stats

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def metrics() -> Iterator[DaemonMetrics]:
    made = DaemonMetrics(lambda: (make_store_stats(), make_daemon_stats()))
    assert made.serve(0)
    yield made
    made.close()


def scrape(metrics: DaemonMetrics) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_every_number_of_the_snapshot_is_told_once(metrics: DaemonMetrics) -> None:
    samples = scrape(metrics)
    stats, tier = make_store_stats(), make_tier_stats()
    numbers = list(samples.values())
    told_otherwise = {"hit_pages", "tier_hit_pages", "tiers"}
    for field, number in vars(stats).items():
        if field not in told_otherwise:
            assert numbers.count(number) == 1, field
    for field, number in vars(tier).items():
        if field not in ("name", "is_suspended", "is_opening", "skipped_segments"):
            assert numbers.count(number) == 1, field
    daemon = make_daemon_stats()
    assert {daemon.uptime_s, daemon.num_sessions, daemon.requests} <= set(numbers)


def test_labels_say_which_tier_and_which_cause(metrics: DaemonMetrics) -> None:
    samples, stats, tier = scrape(metrics), make_store_stats(), make_tier_stats()
    assert value(samples, "krul_hit_pages_total", tier="dram") == 60
    assert value(samples, "krul_hit_pages_total", tier="ssd") == 40
    assert value(samples, "krul_missed_pages_total") == 25
    assert value(samples, "krul_prefetched_bytes_total", outcome="useful") == stats.prefetch_useful_bytes
    assert value(samples, "krul_prefetched_bytes_total", outcome="wasted") == stats.prefetch_wasted_bytes
    assert value(samples, "krul_failed_hits_total", cause="contradicted") == stats.token_mismatches
    assert value(samples, "krul_failed_hits_total", cause="damaged") == stats.corrupted_segments
    assert value(samples, "krul_failed_hits_total", cause="failed_fetch") == stats.failed_fetches
    assert value(samples, "krul_failed_hits_total", cause="undecodable") == stats.undecodable_segments
    assert value(samples, "krul_used_bytes", tier="dram") == stats.used_bytes
    assert value(samples, "krul_used_bytes", tier="ssd") == tier.used_bytes
    assert value(samples, "krul_queued_bytes", tier="ssd") == tier.queued_bytes
    assert value(samples, "krul_tier_errors_total", tier="ssd", kind="slow_read") == tier.slow_reads
    assert value(samples, "krul_tier_suspended", tier="ssd") == 0
    assert value(samples, "krul_tier_opening", tier="ssd") == 0
    assert value(samples, "krul_skipped_segments_total", tier="ssd", cause="orphan") == 77
    assert value(samples, "krul_bad_messages_total", cause="frames") == 4
    assert ("krul_queued_bytes", (("tier", "dram"),)) not in samples


def test_requests_are_counted_by_operation(metrics: DaemonMetrics) -> None:
    for seconds, ok in ((0.00004, True), (0.3, True), (99.0, False)):
        metrics.observe("lease", seconds, ok)
    metrics.observe("commit", 0.001, True)
    samples = scrape(metrics)
    assert value(samples, "krul_request_seconds_count", op="lease") == 3
    assert value(samples, "krul_request_seconds_bucket", op="lease", le="5e-05") == 1
    assert value(samples, "krul_request_seconds_bucket", op="lease", le="0.5") == 2
    assert value(samples, "krul_request_seconds_bucket", op="lease", le="+Inf") == 3
    assert value(samples, "krul_request_seconds_count", op="commit") == 1
    assert value(samples, "krul_failed_requests_total", op="lease") == 1
    assert ("krul_failed_requests_total", (("op", "commit"),)) not in samples


def test_each_scrape_reads_anew_and_a_closed_store_is_an_empty_answer() -> None:
    snapshots = [(make_store_stats(lookups=1), make_daemon_stats()), (make_store_stats(lookups=2), None)]

    def read_stats() -> tuple[StoreStats, DaemonStats]:
        if not snapshots:
            raise StoreClosedError("closed")
        store, daemon = snapshots.pop(0)
        return store, daemon or make_daemon_stats()

    metrics = DaemonMetrics(read_stats)
    metrics.observe("ping", 0.001, True)
    assert metrics.serve(0)
    try:
        assert [value(scrape(metrics), "krul_lookups_total") for _ in range(2)] == [1, 2]
        closed = scrape(metrics)
        assert ("krul_lookups_total", ()) not in closed
        assert value(closed, "krul_request_seconds_count", op="ping") == 1
    finally:
        metrics.close()


def test_a_taken_port_is_one_line_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    metrics = DaemonMetrics(lambda: (make_store_stats(), make_daemon_stats()))
    with socket.socket() as other, caplog.at_level(logging.INFO):
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert not metrics.serve(port)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert str(port) in caplog.text
    assert metrics.port is None
    metrics.observe("ping", 0.1, True)
    metrics.close()


def test_two_daemons_of_one_process_have_metrics_of_their_own(metrics: DaemonMetrics) -> None:
    other = DaemonMetrics(lambda: (make_store_stats(lookups=9), make_daemon_stats()))
    assert other.serve(0)
    port = other.port
    assert port is not None
    try:
        assert value(scrape(other), "krul_lookups_total") == 9
        assert value(scrape(metrics), "krul_lookups_total") == make_store_stats().lookups
    finally:
        other.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)
