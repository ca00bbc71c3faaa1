"""Many conversations in DRAM and a disk that do not hold them, on real servers.

It is ``benchmarks.serving`` with other servers and another load, which ``__main__`` names: natively stored
and compressed, evicted by ``lru`` and by krul's own order, with and without what is fetched for requests that
wait. ``rows`` says what is kept of a result.
"""
