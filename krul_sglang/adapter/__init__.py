"""All that touches SGLang: the plugin, its hooks, the radix cache and its linker, forwards, what is refused.

SGLang calls it; it calls ``krul_sglang.engine``, which knows nothing of SGLang. So a new release of SGLang
concerns this folder alone.
"""
