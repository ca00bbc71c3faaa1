"""The same without a server: SGLang's engine in this process, with krul behind it.

python examples/offline_engine.py MODEL_PATH

A prompt is answered, pushed out of the device pool by others, and asked again: it comes back from host
memory.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def engine_arguments(model_path: str) -> dict[str, Any]:
    """Of ``sglang.Engine``. A small device pool, so that there is something to bring back."""
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "page_size": 16,
        "max_total_tokens": 2048,
        "radix_cache_backend": "krul",
        "unified_cache_external_linker_config": {"host_memory": "256MiB"},
        "enable_cache_report": True,
        "log_level": "error",
    }
    if not torch.cuda.is_available():
        arguments |= {"device": "cpu", "sampling_backend": "pytorch", "mem_fraction_static": 0.2}
    return arguments


def main(model_path: str) -> None:
    import sglang as sgl

    engine = sgl.Engine(**engine_arguments(model_path))
    try:
        letters = [" ".join(f"Line {line} of letter {letter}." for line in range(80)) for letter in range(6)]
        for round_number in (1, 2):
            for number, letter in enumerate(letters):
                answer = engine.generate(letter, {"max_new_tokens": 8, "temperature": 0})
                meta = answer["meta_info"]
                cached = meta.get("cached_tokens_details") or {}
                print(
                    f"round {round_number}, letter {number}: {meta['prompt_tokens']} tokens, cached on "
                    f"device {cached.get('device', 0)}, host {cached.get('host', 0)}"
                )
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
