"""krul inside of SGLang's scheduler: packages in the order in which KV passes them.

``attach`` starts them; a turn ends in ``cache``, and goes through ``capture`` and ``save`` to the store; a
turn that returns goes from ``cache`` through ``restore`` into the pool; ``budget`` learns what compression
costs. Imports run one way: common, capture, save, restore, budget, cache, attach.
"""
