"""What client and server say to each other: requests, replies, their limits, and where the sockets lie.

Dataclasses enter, frames of JSON leave, and back; KV itself never passes here, but through shared memory.
Client, server and command line use it.
"""
