"""Makes the tables of a daemon's tiers and segments that operators read on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from krul_backend.daemon.protocol.messages import DaemonStats
from krul_backend.errors import StrategyError
from krul_backend.memory import format_bytes
from krul_backend.strategy import SUBSPACE, Precision, Strategy
from krul_backend.tiers.common.interface import (
    CHECKSUM_BYTES,
    DRAM_TIER,
    SegmentDetails,
    SegmentInfo,
    StoreStats,
    TierStats,
)

_NO_VALUE = "-"


def stats_report(store: StoreStats, daemon: DaemonStats) -> RenderableType:
    """A table with a column per tier; below it the store's and the daemon's own counts."""
    return Group(_tier_table(store), Text(_store_lines(store)), Text(_daemon_line(daemon)))


def segments_report(segments: Sequence[SegmentInfo], num_in_all: int) -> RenderableType:
    """A table with a line per segment. ``num_in_all``: how many there are, shown or not."""
    table = _table()
    for name in (
        "id",
        "model",
        "tenant",
        "start",
        "tokens",
        "size",
        "bits",
        "tiers",
        "leases",
        "idle",
        "pin",
    ):
        table.add_column(name, justify="left" if name in ("model", "tenant", "tiers") else "right")
    for info in segments:
        bits = bits_per_value(info.codec_params)
        table.add_row(
            str(info.segment_id),
            printable(info.model),
            printable(info.tenant) or _NO_VALUE,
            str(info.start_token),
            str(info.num_tokens),
            format_bytes(info.num_bytes),
            _NO_VALUE if bits is None else f"{bits:.2f}",
            "+".join(info.tiers) + (" (copy)" if info.is_fast_copy else ""),
            str(info.num_leases),
            format_seconds(info.idle_s),
            format_seconds(info.pinned_s) if info.pinned_s else _NO_VALUE,
        )
    return Group(table, Text(f"{len(segments)} of {num_in_all} segments"))


def details_report(details: SegmentDetails) -> RenderableType:
    """Facts about a segment, then a table with a line per layer."""
    info = details.info
    end_token = info.start_token + info.num_tokens
    facts = {
        "segment": str(info.segment_id),
        "model": f"{printable(info.model)} ({info.fingerprint})",
        "tenant": printable(info.tenant) or _NO_VALUE,
        "tokens": f"[{info.start_token}, {end_token}), pages of {details.page_size}",
        "after": printable(info.parent_key or "") or "the start of a conversation",
        "last page": printable(info.last_page_key),
        "size": f"{format_bytes(info.num_bytes)}, {info.num_bytes / info.num_tokens:.0f} bytes per token",
        "codec": _codec_line(info),
        "tiers": ", ".join(info.tiers) + (", as a fast copy" if info.is_fast_copy else ""),
        "leases": str(info.num_leases),
        "idle": format_seconds(info.idle_s),
        "pinned": f"{format_seconds(info.pinned_s)} more" if info.pinned_s else "no",
    }
    width = max(map(len, facts))
    lines = Text("\n".join(f"{name:<{width}}  {fact}" for name, fact in facts.items()))
    return Group(lines, _layer_table(details))


def bits_per_value(codec_params: Mapping[str, Any]) -> float | None:
    """Bits of one code, averaged over layers; a layer in a pair shares one direction, so it counts half.

    None if the codec's parameters do not say: no strategy, or one with layers in the pool's own type.
    """
    strategy = _strategy(codec_params)
    if strategy is None:
        return None
    total = 0.0
    for layer in strategy.layers:
        if layer.precision.bits is None:
            return None
        total += layer.precision.bits * (1.0 if layer.partner is None else 0.5)
    return total / len(strategy.layers)


def printable(text: str) -> str:
    """``text`` without control characters: names of models and tenants come from outside."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def format_seconds(seconds: float) -> str:
    """``0.2`` as ``0.2s``, ``3900`` as ``1h05m``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes = int(seconds // 60)
    return f"{minutes}m{int(seconds % 60):02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _tier_table(store: StoreStats) -> Table:
    tiers: list[tuple[str, StoreStats | TierStats]] = [
        (DRAM_TIER, store),
        *((tier.name, tier) for tier in store.tiers),
    ]
    table = _table()
    table.add_column("tier")
    for name, tier in tiers:
        table.add_column(f"{name}{_state(tier)}", justify="right")
    for name in ("capacity", "used", "free", "stored"):
        table.add_row(name, *(format_bytes(getattr(tier, f"{name}_bytes")) for _, tier in tiers))
    table.add_row("segments", *(str(tier.num_segments) for _, tier in tiers))
    table.add_row("pages", *(str(tier.num_pages) for _, tier in tiers))
    table.add_row("hit pages", *(str(store.tier_hit_pages.get(name, 0)) for name, _ in tiers))
    table.add_row("evicted segments", *(str(tier.evicted_segments) for _, tier in tiers))
    table.add_row("evicted", *(format_bytes(tier.evicted_bytes) for _, tier in tiers))
    table.add_row("written", *(_of_lower(tier, "written_bytes") for _, tier in tiers))
    table.add_row("read", *(_of_lower(tier, "read_bytes") for _, tier in tiers))
    table.add_row("queued", *(_of_lower(tier, "queued_bytes") for _, tier in tiers))
    table.add_row("waiting segments", *(_of_lower(tier, "waiting_segments") for _, tier in tiers))
    table.add_row("skipped segments", *(_skipped(tier) for _, tier in tiers))
    table.add_row("errors", *(_errors(tier) for _, tier in tiers))
    return table


def _state(tier: StoreStats | TierStats) -> str:
    """Why a tier is not used now, behind its name; nothing if it is."""
    if isinstance(tier, TierStats) and tier.is_opening:
        return " (opening)"
    return " (suspended)" if isinstance(tier, TierStats) and tier.is_suspended else ""


def _of_lower(tier: StoreStats | TierStats, field: str) -> str:
    """A field that only tiers below DRAM have."""
    if not isinstance(tier, TierStats):
        return _NO_VALUE
    value = getattr(tier, field)
    return format_bytes(value) if field.endswith("_bytes") else str(value)


def _skipped(tier: StoreStats | TierStats) -> str:
    """How many segments a lower tier has not written, by cause, or 0."""
    if not isinstance(tier, TierStats):
        return _NO_VALUE
    return ", ".join(f"{count} {cause}" for cause, count in tier.skipped_segments.items()) or "0"


def _errors(tier: StoreStats | TierStats) -> str:
    """How many of each kind, or 0: wrong checksums, failed and slow reads, failed writes."""
    kinds = {"checksum": tier.corrupted_segments}
    if isinstance(tier, TierStats):
        kinds |= {"read": tier.failed_reads, "slow": tier.slow_reads, "write": tier.failed_writes}
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count) or "0"


def _store_lines(store: StoreStats) -> str:
    asked = store.hit_pages + store.missed_pages
    hit_rate = f"{store.hit_pages / asked:.1%}" if asked else _NO_VALUE
    return "\n".join(
        (
            f"hit rate {hit_rate}: {store.hit_pages} of {asked} pages in {store.lookups} lookups; "
            f"{store.token_mismatches} contradicted, {store.failed_fetches} failed fetches, "
            f"{store.undecodable_segments} undecodable",
            f"prefetched and then found {format_bytes(store.prefetch_useful_bytes)}, and not "
            f"{format_bytes(store.prefetch_wasted_bytes)}",
            f"leases {store.num_leases}, reservations {store.num_reservations} "
            f"({store.rejected_reservations} rejected), pinned {format_bytes(store.pinned_bytes)}, "
            f"fast copies {format_bytes(store.fast_copy_bytes)}",
            f"hints {store.hints}, {store.comeback_pages} pages back because of them, "
            f"{store.named_conversations} named conversations",
            f"free space in {store.num_free_ranges} pieces, the largest "
            f"{format_bytes(store.largest_free_bytes)}; trimmed {format_bytes(store.trimmed_bytes)}",
        )
    )


def _daemon_line(daemon: DaemonStats) -> str:
    bad = ", ".join(f"{count} {cause}" for cause, count in sorted(daemon.bad_messages.items()) if count)
    return (
        f"sessions {daemon.num_sessions}, process {daemon.pid}, up {format_seconds(daemon.uptime_s)}, "
        f"{daemon.requests} requests ({daemon.failed_requests} failed), bad messages: {bad or 0}"
    )


def _layer_table(details: SegmentDetails) -> Table:
    strategy, is_subspace = _strategy(details.info.codec_params), details.info.codec == SUBSPACE
    end_token = details.info.start_token + details.info.num_tokens
    table = _table()
    for name in ("layer", "pair", "precision", "first token", "tokens", "size", "checksum"):
        table.add_column(name, justify="left" if name in ("pair", "precision", "checksum") else "right")
    for layer, (first, num_bytes) in enumerate(
        zip(details.layer_first_token, details.layer_num_bytes, strict=True)
    ):
        pair, precision = _NO_VALUE, SUBSPACE if is_subspace else Precision.NATIVE.value
        if strategy is not None and layer < len(strategy.layers):
            precision = strategy.layers[layer].precision.value
            partner = strategy.layers[layer].partner
            if partner is not None:
                pair = "{}+{}".format(*sorted((layer, partner)))
        table.add_row(
            str(layer),
            pair,
            precision,
            str(first),
            str(end_token - first),
            format_bytes(num_bytes),
            # Of the last range, which no trim cuts off.
            details.checksums[layer][-CHECKSUM_BYTES:].hex() or _NO_VALUE,
        )
    return table


def _codec_line(info: SegmentInfo) -> str:
    """The codec; of shared subspaces also the bases, the step and the damage in nats."""
    params = info.codec_params
    if info.codec != SUBSPACE:
        return printable(info.codec)
    named = (f"{name} {printable(str(params.get(name)))[:16]}" for name in ("bases", "step", "damage"))
    return ", ".join((SUBSPACE, *named))


def _strategy(codec_params: Mapping[str, Any]) -> Strategy | None:
    """The strategy in a codec's parameters; None if there is none, or one that this version does not know."""
    layers = codec_params.get("layers")
    if not isinstance(layers, list | tuple):
        return None
    try:
        return Strategy.from_json(layers)
    except StrategyError:
        return None


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold")
