"""A conversation begins on one host and goes on on another: what is stored is shared through Mooncake.

mooncake_master --rpc_port 50051        # on one host, here 10.0.0.1

python -m sglang.launch_server ...      # on each, with its own address as local_hostname
    --unified-cache-external-linker-config \
    '{"mooncake": "master_address=10.0.0.1:50051,local_hostname=10.0.0.2"}'

python examples/two_hosts.py http://10.0.0.1:30000 http://10.0.0.2:30000
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any

import openai

PATIENCE_S = 60.0


def ask(url: str, history: list[dict[str, str]]) -> str:
    """One turn on the server at ``url``; returns a line that says where its prompt came from."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
    started_s = time.monotonic()
    reply = client.chat.completions.create(
        model="default",
        messages=history,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=24,
        extra_body={"return_cached_tokens_details": True},
    )
    seconds = time.monotonic() - started_s
    history.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
    extension: dict[str, Any] = (reply.model_extra or {}).get("sglext") or {}
    cached = extension.get("cached_tokens_details") or {}
    asked = 0 if reply.usage is None else reply.usage.prompt_tokens
    return f"{asked} tokens: device {cached.get('device', 0)}, host {cached.get('host', 0)}; {seconds:.2f} s"


def wait_until_shared(url: str) -> int:
    """Wait until what the server at ``url`` has stored is in the cluster; returns the bytes that it put."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        with urllib.request.urlopen(f"{url}/server_info") as answer:
            krul = json.load(answer)["internal_states"][0]["krul"]
        cluster = next((tier for tier in krul["tiers"] if tier["name"] == "mooncake"), None)
        if cluster is None:
            sys.exit(f"{url} was started without the option mooncake")
        waiting = krul["offload"]["pending"] + cluster["queued_segments"] + cluster["waiting_segments"]
        if cluster["written_bytes"] and not waiting:
            return int(cluster["written_bytes"])
        time.sleep(0.2)
    sys.exit(f"nothing of {url} came to the cluster in {PATIENCE_S:.0f} s")


def main(first: str, second: str) -> None:
    letter = " ".join(f"Line {number} of a long letter says nothing new." for number in range(60))
    history = [{"role": "user", "content": f"{letter} Please remember that letter."}]
    print(f"first host, {ask(first, history)}")
    print(f"in the cluster: {wait_until_shared(first) / 1e6:.1f} MB")
    history.append({"role": "user", "content": "How many lines did the letter have?"})
    print(f"second host, {ask(second, history)}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
