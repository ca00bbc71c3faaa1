"""SGLang's radix cache and cache linker, extended by krul.

Requests enter as SGLang looks them up, finishes and evicts them; loads and stored turns leave to the other
packages. SGLang calls it.
"""
