"""Puts krul into an SGLang server: reads options, names the model, proves and measures, installs hooks.

Called once per process, from ``plugin.py``; nothing else imports it.
"""
