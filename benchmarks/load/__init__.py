"""How soon answers come when users ask side by side and a server runs as anybody would start it.

``run`` lets users have their conversations with one server after another; ``rows`` make numbers of it.
"""
