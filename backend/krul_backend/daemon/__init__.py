"""The daemon: a process that owns a host's KV store, and outlives the engines that use it.

``client`` runs in the engine and asks, ``server`` runs in the daemon and answers, ``protocol`` has the
messages between them, ``cli`` the commands that an operator types.
"""
