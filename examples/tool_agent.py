"""An agent that waits for its tools: each request says when the conversation is expected back.

python examples/tool_agent.py http://127.0.0.1:30000

While a tool runs, other agents push the conversation out of the device pool. ``next_use_s`` is the tool's
usual time: host memory keeps what comes back soonest, and what lies on a disk is read back before that.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import openai


@dataclass(frozen=True)
class Tool:
    """``usual_s``: how long it takes; ``output``: what it says here, where it is only played."""

    name: str
    usual_s: float
    output: str


FILES = " ".join(f"src/module_{number}.py" for number in range(60))
TOOLS = (
    Tool("list_files", 0.5, f"The repository has these files: {FILES}."),
    Tool("run_tests", 3.0, "58 passed, 2 failed: test_parse_empty, test_parse_nested."),
    Tool("read_file", 0.2, "def parse(text): return text.split(',')"),
)
AGENTS = ("fixer", "tester", "writer")


def ask(client: openai.OpenAI, name: str, history: list[dict[str, str]], next_use_s: float) -> str:
    """One step of the agent ``name``; returns a line that says where its prompt came from."""
    started_s = time.monotonic()
    reply = client.chat.completions.create(
        model="default",
        messages=history,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=24,
        extra_body={
            "session_id": name,
            "custom_params": {"krul_hints": {"next_use_s": next_use_s}},
            "return_cached_tokens_details": True,
        },
    )
    seconds = time.monotonic() - started_s
    history.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
    extension: dict[str, Any] = (reply.model_extra or {}).get("sglext") or {}
    cached = extension.get("cached_tokens_details") or {}
    return f"device {cached.get('device', 0)}, host {cached.get('host', 0)} tokens; {seconds:.2f} s"


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
    task = "You mend a parser step by step. Answer with one short sentence about what to do next."
    histories = {name: [{"role": "user", "content": f"You are the {name}. {task}"}] for name in AGENTS}
    for step, tool in enumerate(TOOLS, start=1):
        for name, history in histories.items():
            source = ask(client, name, history, next_use_s=tool.usual_s)
            print(f"step {step}, {name}: cached on {source}; then {tool.name} for {tool.usual_s} s")
            history.append({"role": "user", "content": f"{tool.name} says: {tool.output} {task}"})
        time.sleep(tool.usual_s)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
