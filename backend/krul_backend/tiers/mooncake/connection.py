"""The tier's way to the cluster: connected when it is first needed, again after a failure."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from krul_backend.tiers.common.suspension import Suspension
from krul_backend.tiers.mooncake.cluster_cost import ClusterCost
from krul_backend.tiers.mooncake.object_store import ObjectStore, ObjectStoreError

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


class Connection:
    """Thread-safe. Once connected the client reconnects by itself; until then each ``store`` tries."""

    def __init__(self, connect: Callable[[], ObjectStore], suspension: Suspension, cost: ClusterCost) -> None:
        self._connect = connect
        self._suspension = suspension
        self._cost = cost
        self._lock = threading.Lock()
        self._store: ObjectStore | None = None
        self._is_closed = False

    def store(self) -> ObjectStore:
        """May take long the first time.

        Raises:
            ObjectStoreError: suspended, closed, or the cluster cannot be joined.
        """
        if self._suspension.is_active:
            raise ObjectStoreError("the Mooncake tier is suspended")
        with self._lock:
            if self._is_closed:
                raise ObjectStoreError("the Mooncake tier was closed")
            if self._store is None:
                self._store = self._connect()
                logger.info("joined the Mooncake cluster")
                try:
                    self._cost.measure(self._store)
                except ObjectStoreError as error:
                    logger.warning("the Mooncake cluster's speed could not be measured: %s", error)
            return self._store

    def close(self) -> None:
        """Leave the cluster, or give up after some seconds: a client whose master is gone can take long."""
        thread = threading.Thread(target=self._leave, name="krul-mooncake-close", daemon=True)
        thread.start()
        thread.join(_CLOSE_TIMEOUT_S)
        if thread.is_alive():
            logger.warning("the Mooncake client does not end within %g s: left to itself", _CLOSE_TIMEOUT_S)

    def _leave(self) -> None:
        with self._lock:
            self._is_closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()
