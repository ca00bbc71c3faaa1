"""An SGLang frontend program for multi-turn conversations, whose users come back after others had their turn.

python examples/multi_turn_frontend.py http://127.0.0.1:30000
"""

from __future__ import annotations

import sys
from typing import Any

import sglang as sgl

USERS = ("Mira", "Jonas", "Aiko", "Tariq")

History = list[tuple[str, str]]


@sgl.function  # type: ignore[untyped-decorator]
def next_turn(s: Any, history: History, text: str) -> None:
    """The conversation so far, one more user message, and the model's answer to it."""
    for user_text, answer in history:
        s += sgl.user(user_text)
        s += sgl.assistant(answer)
    s += sgl.user(text)
    s += sgl.assistant(sgl.gen("answer", max_tokens=32, temperature=0))


def main(url: str) -> None:
    sgl.set_default_backend(sgl.RuntimeEndpoint(url))
    padding = " ".join(f"Line {number} of a long letter says nothing new." for number in range(60))
    histories: dict[str, History] = {user: [] for user in USERS}
    for turn in range(2):
        # By the second round, the first conversations have left the device pool: they continue from the host.
        for index, user in enumerate(USERS):
            fact = f"Please note: the locker code of {user} is {48210 + index}. {padding}"
            text = fact if turn == 0 else f"What is the locker code of {user}?"
            state = next_turn.run(history=histories[user], text=text)
            histories[user].append((text, state["answer"]))
            cached = state.get_meta_info("answer").get("cached_tokens_details") or {}
            source = f"device {cached.get('device', 0)}, host {cached.get('host', 0)}"
            print(f"turn {turn + 1}, {user}: cached on {source} tokens; answer: {state['answer'].strip()}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
