"""Plays conversations against SGLang with and without krul, and compares."""
