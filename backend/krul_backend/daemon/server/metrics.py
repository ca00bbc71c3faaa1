"""Serves the counters of a daemon and its store to Prometheus. They are read at each scrape."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from krul_backend.daemon.protocol.messages import DaemonStats
from krul_backend.errors import KrulError
from krul_backend.tiers.common.interface import DRAM_TIER, StoreStats, TierStats

logger = logging.getLogger(__name__)

METRICS_HOST = "127.0.0.1"

# From a lookup that hits (tens of microseconds) to a flush (seconds).
_LATENCY_BUCKETS_S = (
    *(base * scale for scale in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1) for base in (1.0, 2.5, 5.0)),
    *(1.0, 10.0),
)

ReadStats = Callable[[], tuple[StoreStats, DaemonStats]]


class DaemonMetrics:
    """Collects a daemon's metrics in a registry, and serves them as a page.

    Its ``observe`` is an ``Observer`` of the server's requests.

    Args:
        read_stats: called in the page's thread at each scrape. If it raises a ``KrulError``, the page has no
            statistics this time.
    """

    def __init__(self, read_stats: ReadStats) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_StatsCollector(read_stats))
        self._latency = Histogram(
            "krul_request_seconds",
            "Time from a request's receipt to its reply, by operation.",
            ["op"],
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._failed = Counter(
            "krul_failed_requests", "Requests answered with an error.", ["op"], registry=self.registry
        )
        self._latency_of: dict[str, Histogram] = {}
        self._page: tuple[WSGIServer, threading.Thread] | None = None

    def observe(self, op: str, seconds: float, ok: bool) -> None:
        """Count one request."""
        latency = self._latency_of.get(op)
        if latency is None:
            # Looking a label up takes longer than counting.
            latency = self._latency_of.setdefault(op, self._latency.labels(op))
        latency.observe(seconds)
        if not ok:
            self._failed.labels(op).inc()

    def serve(self, port: int) -> bool:
        """Serve the page at ``http://127.0.0.1:port/metrics`` until ``close``.

        If the port is taken, this logs one line and returns False: the daemon serves without metrics.
        """
        try:
            self._page = start_http_server(port, addr=METRICS_HOST, registry=self.registry)
        except OSError as error:
            logger.error(
                "no metrics: port %d of %s cannot be had (%s); choose another metrics_port, or 0 for none",
                port,
                METRICS_HOST,
                error.strerror or error,
            )
            return False
        logger.info("metrics at http://%s:%d/metrics", METRICS_HOST, self.port)
        return True

    @property
    def port(self) -> int | None:
        """Where the page is served; None if it is not."""
        return None if self._page is None else int(self._page[0].server_port)

    def close(self) -> None:
        """Stop serving. May be called again."""
        page, self._page = self._page, None
        if page is not None:
            server, thread = page
            server.shutdown()
            server.server_close()
            thread.join()


class _StatsCollector(Collector):
    """Turns a snapshot of the statistics into metrics at each scrape. Has no counters of its own."""

    def __init__(self, read_stats: ReadStats) -> None:
        self._read_stats = read_stats

    def describe(self) -> Iterable[Metric]:
        """Names no metrics, or the registry would collect at registration, before the server is there."""
        return ()

    def collect(self) -> Iterator[Metric]:
        try:
            store, daemon = self._read_stats()
        except KrulError as error:
            logger.debug("no statistics for a scrape: %s", error)
            return
        yield from _lookups(store)
        yield from _dram(store)
        yield from _tiers(store)
        yield from _daemon(daemon)


def _lookups(stats: StoreStats) -> Iterator[Metric]:
    yield _counter("krul_lookups", "Prefixes that were looked up.", stats.lookups)
    yield _counter("krul_hit_pages", "Pages found, by the tier that held them.", stats.tier_hit_pages, "tier")
    yield _counter("krul_missed_pages", "Pages looked up and not found.", stats.missed_pages)
    causes = {
        "contradicted": stats.token_mismatches,
        "damaged": stats.corrupted_segments,
        "failed_fetch": stats.failed_fetches,
        "undecodable": stats.undecodable_segments,
    }
    yield _counter("krul_failed_hits", "Hits that became misses: times, by cause.", causes, "cause")
    yield _counter("krul_fetched_segments", "Segments brought up from lower tiers.", stats.fetched_segments)
    outcomes = {"useful": stats.prefetch_useful_bytes, "wasted": stats.prefetch_wasted_bytes}
    yield _counter("krul_prefetched_bytes", "Fetched ahead: found later, or evicted.", outcomes, "outcome")
    yield _counter("krul_committed_segments", "Segments stored.", stats.committed_segments)
    yield _counter("krul_rejected_reservations", "Segments without room.", stats.rejected_reservations)
    yield _counter("krul_hints", "Hints that reached a stored conversation.", stats.hints)
    yield _counter("krul_comeback_pages", "Pages read into DRAM because of hints.", stats.comeback_pages)
    yield _gauge("krul_named_conversations", "Names that hints can use.", stats.named_conversations)
    yield _counter("krul_trimmed_segments", "Calls that dropped the head of layers.", stats.trimmed_segments)
    yield _counter("krul_trimmed_bytes", "Bytes that these dropped.", stats.trimmed_bytes)


def _dram(stats: StoreStats) -> Iterator[Metric]:
    yield _gauge("krul_leases", "Leases that pin segments.", stats.num_leases)
    yield _gauge("krul_reservations", "Reservations neither committed nor aborted.", stats.num_reservations)
    yield _gauge("krul_pinned_bytes", "Bytes that pins keep in DRAM.", stats.pinned_bytes)
    yield _gauge("krul_fast_copy_bytes", "Bytes that fast copies take.", stats.fast_copy_bytes)
    yield _gauge("krul_stored_tokens", "Tokens of the segments in DRAM.", stats.stored_tokens)
    yield _gauge("krul_largest_free_bytes", "Largest free range of the arena.", stats.largest_free_bytes)
    yield _gauge("krul_free_ranges", "Pieces that the arena's free bytes are in.", stats.num_free_ranges)


def _tiers(stats: StoreStats) -> Iterator[Metric]:
    """First what every tier has, then what only the tiers below DRAM have (there may be none)."""
    tiers: dict[str, StoreStats | TierStats] = {DRAM_TIER: stats, **{tier.name: tier for tier in stats.tiers}}

    def each(value: Callable[[StoreStats | TierStats], int]) -> dict[str, int]:
        return {name: value(tier) for name, tier in tiers.items()}

    def lower(value: Callable[[TierStats], int]) -> dict[str, int]:
        return {tier.name: value(tier) for tier in stats.tiers}

    yield _gauge("krul_capacity_bytes", "Size of a tier.", each(lambda tier: tier.capacity_bytes), "tier")
    yield _gauge("krul_used_bytes", "Bytes taken, overhead included.", each(lambda t: t.used_bytes), "tier")
    yield _gauge("krul_free_bytes", "Bytes not taken.", each(lambda tier: tier.free_bytes), "tier")
    yield _gauge("krul_stored_bytes", "Bytes of blocks to be found.", each(lambda t: t.stored_bytes), "tier")
    yield _gauge("krul_segments", "Segments to be found.", each(lambda tier: tier.num_segments), "tier")
    yield _gauge("krul_pages", "Pages to be found.", each(lambda tier: tier.num_pages), "tier")
    yield _counter(
        "krul_evicted_segments", "Segments evicted.", each(lambda tier: tier.evicted_segments), "tier"
    )
    yield _counter("krul_evicted_bytes", "Bytes evicted.", each(lambda tier: tier.evicted_bytes), "tier")
    yield _gauge(
        "krul_queued_segments",
        "Segments that wait to be written.",
        lower(lambda t: t.queued_segments),
        "tier",
    )
    yield _gauge(
        "krul_queued_bytes", "Bytes that wait to be written.", lower(lambda t: t.queued_bytes), "tier"
    )
    yield _counter("krul_written_segments", "Segments written.", lower(lambda t: t.written_segments), "tier")
    yield _counter("krul_written_bytes", "Bytes written.", lower(lambda t: t.written_bytes), "tier")
    yield _counter("krul_read_segments", "Segments read.", lower(lambda tier: tier.read_segments), "tier")
    yield _counter("krul_read_bytes", "Bytes read.", lower(lambda tier: tier.read_bytes), "tier")
    yield _gauge(
        "krul_waiting_segments",
        "Segments that a tier has not taken yet: they are offered again.",
        lower(lambda t: t.waiting_segments),
        "tier",
    )
    skipped = CounterMetricFamily(
        "krul_skipped_segments", "Segments not written, by tier and cause.", labels=["tier", "cause"]
    )
    for tier in stats.tiers:
        for cause, count in tier.skipped_segments.items():
            skipped.add_metric([tier.name, cause], count)
    yield skipped
    yield _gauge(
        "krul_tier_suspended", "1 while a tier is left alone.", lower(lambda t: int(t.is_suspended)), "tier"
    )
    yield _gauge(
        "krul_tier_opening",
        "1 until it is read what lies in a tier.",
        lower(lambda t: int(t.is_opening)),
        "tier",
    )
    errors = CounterMetricFamily("krul_tier_errors", "Errors, by tier and kind.", labels=["tier", "kind"])
    for tier in stats.tiers:
        errors.add_metric([tier.name, "checksum"], tier.corrupted_segments)
        errors.add_metric([tier.name, "read"], tier.failed_reads)
        errors.add_metric([tier.name, "slow_read"], tier.slow_reads)
        errors.add_metric([tier.name, "write"], tier.failed_writes)
    yield errors


def _daemon(stats: DaemonStats) -> Iterator[Metric]:
    yield _gauge("krul_sessions", "Clients that are connected.", stats.num_sessions)
    yield _gauge("krul_uptime_seconds", "Since the daemon's start.", stats.uptime_s)
    yield _counter("krul_requests", "Requests of any kind.", stats.requests)
    yield _counter(
        "krul_bad_messages", "Messages that were no requests, by cause.", stats.bad_messages, "cause"
    )


def _counter(
    name: str, text: str, value: float | Mapping[str, float], label: str = ""
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label] if label else [])
    _fill(family, value)
    return family


def _gauge(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label] if label else [])
    _fill(family, value)
    return family


def _fill(family: CounterMetricFamily | GaugeMetricFamily, value: float | Mapping[str, float]) -> None:
    """One sample, or one for each value of the family's label."""
    if isinstance(value, Mapping):
        for of_label, number in value.items():
            family.add_metric([of_label], number)
    else:
        family.add_metric([], value)
