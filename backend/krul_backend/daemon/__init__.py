"""The process that keeps stored KV: protocol, server, sessions, clients."""
