"""SGLang's own server tests, those of its wheel (``sglang.test.kits``), against a server with krul.

``make peer-tests`` runs them. Here are only the servers that they ask, the sizes that fit two cores, and the
tests that are left out or fail without krul, too. ``make peer-tests ARGS=--without-krul`` runs the same
against SGLang alone, with a pool that holds everything, and so checks the second of these lists.
"""
