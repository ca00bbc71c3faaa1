"""``krul-sglang demo``: plays conversations against SGLang with and without krul, and compares."""
