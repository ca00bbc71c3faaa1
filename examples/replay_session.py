"""Replays recorded conversations, with their pauses: how soon does each turn get its first token?

python examples/replay_session.py http://127.0.0.1:30000 SESSION.jsonl [MORE.jsonl ...] [--speed 10]

Each file is a conversation, each line of it a turn: {"timestamp": seconds, "input": text, "output": text}.
The recorded outputs go into the history, whatever this server answers. Conversations run side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx


async def ask(client: httpx.AsyncClient, prompt: str) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token of an answer, and what SGLang says of the prompt."""
    request = {"text": prompt, "stream": True, "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
    started_s, first_s, meta = time.monotonic(), 0.0, {}
    async with client.stream("POST", "/generate", json=request) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.monotonic() - started_s
                meta = json.loads(line.removeprefix("data: "))["meta_info"]
    return first_s, meta


async def replay(client: httpx.AsyncClient, path: Path, begin_s: float, speed: float) -> None:
    history = ""
    turns = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    for number, turn in enumerate(turns, start=1):
        due_s = begin_s + (turn["timestamp"] - turns[0]["timestamp"]) / speed
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        history += turn["input"]
        ttft_s, meta = await ask(client, history)
        history += turn["output"]
        cached = meta.get("cached_tokens_details") or {}
        print(
            f"{path.stem} turn {number}: {meta['prompt_tokens']} tokens, cached on device "
            f"{cached.get('device', 0)}, host {cached.get('host', 0)}; first token after {ttft_s:.2f} s"
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description="Replays recorded conversations with their pauses.")
    parser.add_argument("url")
    parser.add_argument("sessions", nargs="+", type=Path)
    parser.add_argument("--speed", type=float, default=1.0, help="by how much pauses are shortened")
    args = parser.parse_args()
    async with httpx.AsyncClient(base_url=args.url, timeout=600) as client:
        begin_s = time.monotonic()
        await asyncio.gather(*(replay(client, path, begin_s, args.speed) for path in args.sessions))


if __name__ == "__main__":
    asyncio.run(main())
