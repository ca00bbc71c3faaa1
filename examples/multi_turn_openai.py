"""Several users talk in turns; while one is away, the others push their conversation out of the device pool.

python examples/multi_turn_openai.py http://127.0.0.1:30000
"""

from __future__ import annotations

import sys
from typing import Any

import openai

USERS = ("Mira", "Jonas", "Aiko", "Tariq")
FACTS = "Please note: the locker code of {user} is {code}. The bike of {user} is in the yard."
QUESTION = "What is the locker code of {user}?"


def ask(client: openai.OpenAI, history: list[dict[str, str]], tenant: str) -> tuple[str, dict[str, int]]:
    """One turn. Returns the answer and how many prompt tokens came from the device and from the host."""
    reply = client.chat.completions.create(
        model="default",
        messages=history,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=32,
        # A tenant's KV is never used for another tenant, even for the same text.
        extra_body={"cache_salt": tenant, "return_cached_tokens_details": True},
    )
    extension: dict[str, Any] = (reply.model_extra or {}).get("sglext") or {}
    return reply.choices[0].message.content or "", extension.get("cached_tokens_details") or {}


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
    padding = " ".join(f"Line {number} of a long letter says nothing new." for number in range(60))
    histories: dict[str, list[dict[str, str]]] = {user: [] for user in USERS}
    for turn in range(2):
        for index, user in enumerate(USERS):
            fact = FACTS.format(user=user, code=48210 + index)
            text = f"{fact} {padding}" if turn == 0 else QUESTION.format(user=user)
            history = histories[user]
            history.append({"role": "user", "content": text})
            answer, cached = ask(client, history, tenant=user)
            history.append({"role": "assistant", "content": answer})
            source = f"device {cached.get('device', 0)}, host {cached.get('host', 0)}"
            print(f"turn {turn + 1}, {user}: cached on {source} tokens; answer: {answer.strip()}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
