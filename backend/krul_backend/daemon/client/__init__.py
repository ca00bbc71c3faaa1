"""A ``KVStore`` that a daemon keeps, and what starts a daemon and asks it for its state.

Engines and the command line use this package. Calls of the store's interface come in and become requests to
the daemon; arrays in the daemon's shared memory come out. While the daemon is gone, every lookup is a miss.
"""

from krul_backend.daemon.client.admin import AdminClient, resolve_endpoint
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.daemon.client.launcher import EmbeddedDaemon
