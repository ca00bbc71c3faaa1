"""Agents that take turns on one task: a shared system prompt, and the steps until each of them runs again.

python examples/agent_team.py http://127.0.0.1:30000

The system prompt is stored once, whoever has sent it. The workflow knows its order, so each request says in
how many steps its agent runs next; an agent that is done says that its conversation may leave host memory
first.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import httpx

RULES = " ".join(f"Rule {number}: keep sentence {number} short and friendly." for number in range(40))
SYSTEM = f"You are one of three agents who write a letter together. {RULES}"
WORKFLOW = ("planner", "writer", "critic", "writer", "critic", "writer")


def steps_until_next(step: int) -> int | None:
    """After how many steps the agent of ``step`` runs again; None if it is done."""
    later = WORKFLOW[step + 1 :]
    return later.index(WORKFLOW[step]) + 1 if WORKFLOW[step] in later else None


def main(url: str) -> None:
    messages: dict[str, str] = {}
    step_s = 1.0
    for step, name in enumerate(WORKFLOW):
        waits = steps_until_next(step)
        hint: dict[str, Any] = {"demote": True} if waits is None else {"next_use_s": waits * step_s}
        text = messages.get(name, f"{SYSTEM} You are the {name}.")
        before = max(messages.values(), key=len)[-400:] if messages else "Nothing was written yet."
        prompt = f"{text} Step {step + 1}. The others wrote: {before} Your contribution:"
        started_s = time.monotonic()
        action = {"action_id": "1", "action_type": "krul.hint", "action_version": "1.0", "payload": hint}
        reply = httpx.post(
            f"{url}/generate",
            json={
                "text": prompt,
                "session_id": f"team/{name}",
                "sampling_params": {"max_new_tokens": 24, "temperature": 0},
                "kv_hints": {"protocol_version": "0.1", "message_id": f"step-{step}", "actions": [action]},
            },
            timeout=300,
        )
        reply.raise_for_status()
        answer = reply.json()
        step_s = time.monotonic() - started_s
        messages[name] = prompt + answer["text"]
        meta = answer["meta_info"]
        then = "done" if waits is None else f"runs again in {waits} steps"
        cached = f"{meta['cached_tokens']} of {meta['prompt_tokens']} tokens cached"
        print(f"step {step + 1}, {name}: {cached}; {then}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
