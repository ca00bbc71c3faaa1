"""Builds the store that a configuration asks for: DRAM, and the tiers below it."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from krul_backend.daemon.server.config import DaemonConfig
from krul_backend.errors import ConfigError
from krul_backend.memory import parse_bytes
from krul_backend.numa import gpu_nodes, spread_pages
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.eviction import make_policy
from krul_backend.tiers.common.lower_tier import LowerTier
from krul_backend.tiers.dram import HostStore

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

Options = TypeVar("Options", bound="DataclassInstance")


def build_store(config: DaemonConfig) -> TieredStore:
    """Build the store. Raises ConfigError or DaemonError if a tier cannot be opened."""
    try:
        host = HostStore(config.arena_bytes, make_policy(config.eviction), tenant_quota=config.tenant_quota)
    except OSError as error:
        raise ConfigError(
            f"arena_bytes: got {config.arena_bytes}, which the system does not map: {error.strerror or error}"
        ) from error
    _place(host)
    tiers: list[LowerTier] = []
    try:
        if config.ssd_dirs:
            tiers.append(_ssd_tier(config, host))
        # One by one: if the next one cannot be opened, those before it are closed.
        for tier in _object_tiers(config, host):
            tiers.append(tier)
    except BaseException:
        for tier in tiers:
            tier.close()
        host.close()
        raise
    return TieredStore(host, tiers)


def _place(host: HostStore) -> None:
    """Spread the host tier over the NUMA nodes that GPUs are at, before its first page is touched."""
    nodes = gpu_nodes()
    try:
        if nodes and spread_pages(host.buffer, nodes):
            logger.info("stored KV lies on the NUMA nodes of the GPUs: %s", ", ".join(map(str, nodes)))
    except OSError as error:
        logger.warning("stored KV may lie on another NUMA node than the GPU that reads it: %s", error)


def _ssd_tier(config: DaemonConfig, host: HostStore) -> LowerTier:
    # Imported late, here and below: a daemon without the tier loads nothing that the tier needs.
    from krul_backend.tiers.ssd import SsdTier

    capacity_bytes = config.ssd_capacity_bytes
    if capacity_bytes is None:
        capacity_bytes = default_ssd_capacity(config.ssd_dirs)
    directory, *others = config.ssd_dirs
    return SsdTier(
        directory,
        capacity_bytes,
        others=others,
        read_timeout_s=config.ssd_timeout_s,
        eviction=config.eviction,
        max_queued_bytes=config.ssd_queue_bytes,
        patience_s=config.ssd_patience_s,
        page_filter=host.page_filter,
    )


def _object_tiers(config: DaemonConfig, host: HostStore) -> Iterator[LowerTier]:
    if config.mooncake is None and config.bucket is None:
        return
    from krul_backend.tiers.objects import BucketOptions, MooncakeOptions, ObjectTier

    if config.mooncake is not None:
        yield ObjectTier(parse_options(MooncakeOptions, "mooncake", config.mooncake), host.buffer)
    if config.bucket is not None:
        yield ObjectTier(parse_options(BucketOptions, "bucket", config.bucket), host.buffer)


def parse_options(kind: type[Options], name: str, given: Mapping[str, str]) -> Options:
    """Parse the options of a tier, given as text, into its dataclass of texts, numbers and sizes.

    Raises:
        ConfigError: an option is unknown, missing or cannot be parsed; the message begins with ``name``.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for option in given:
        if option not in fields:
            raise ConfigError(f"{name}: got {option!r}, accepted are {', '.join(fields)}")
    for option, field in fields.items():
        if option not in given and field.default is dataclasses.MISSING:
            raise ConfigError(f"{name}: {option} is needed, got {', '.join(given)}")
    # By the fields' annotations, which are text because of ``from __future__ import annotations``.
    parsers: dict[object, Callable[[str], object]] = {"str": str, "int": parse_bytes, "float": float}
    values: dict[str, object] = {}
    for option, text in given.items():
        try:
            values[option] = parsers[fields[option].type](text)
        except ValueError as error:
            raise ConfigError(f"{name}: {option}={text!r}: {error}") from error
    return kind(**values)


def default_ssd_capacity(directories: Sequence[Path]) -> int:
    """Half of the free bytes on the disks of directories, which need not exist yet.

    Files of the tier that are there already count as free. Other files do not, wherever they are.

    Raises:
        ConfigError: a disk cannot be asked.
    """
    from krul_backend.tiers.ssd import one_per_disk, own_bytes

    try:
        free_bytes = sum(shutil.disk_usage(path).free for path in one_per_disk(directories))
        return (free_bytes + sum(map(own_bytes, directories))) // 2
    except OSError as error:
        given = ",".join(map(str, directories))
        raise ConfigError(f"ssd_dir: got {given!r}: {error.strerror or error}") from error
