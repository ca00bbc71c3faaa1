"""A ``KVStore`` whose tiers are in another process, and the tools to start and ask that process.

Calls of the store's interface enter and become requests; views of the daemon's shared memory leave. A daemon
that is gone makes every lookup a miss. Engines and the command line call it.
"""
