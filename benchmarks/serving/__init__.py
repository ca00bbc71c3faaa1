"""How soon the first token of a returning turn comes from real servers, without krul and with it.

``conversations`` are the load, ``servers`` what is compared, ``load`` asks them in turns, ``rows`` make
numbers of it; ``bench_serving`` puts SGLang's own load generator in the place of ``load``. ``divergence``
asks what the servers predict instead of how soon.
"""
