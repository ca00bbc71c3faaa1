"""``python -m benchmarks.stalls --json FILE``: users who are being answered while another one returns.

The KV of the one that returns lies on an SSD that is slowed down. One server loads it at once, in a forward
for which the others stand still; in the other, which is krul as it is, it may wait until it is in DRAM.
Prompts are random tokens. After each return a server ends what it stores, and other prompts push what
returned out of DRAM.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import orjson
from transformers import AutoConfig

from benchmarks import runner
from benchmarks.runner import Result, names, numbers
from benchmarks.serving.configuration import Configuration, ServingBenchmarkError
from benchmarks.serving.servers import WITHOUT_PREFETCH, Server, kv_token_bytes, make_server
from benchmarks.tables import Columns, cell, machine, model, ms, table_of
from demo.sizing import PoolSizes
from demo.summary import quantiles
from krul_sglang.models.find import find_model

logger = logging.getLogger(__name__)

SERVERS = {"at-once": WITHOUT_PREFETCH, "waits": "sglang.launch_server"}
"""The module that starts each server, by what a returning request does there."""
_SSD_BYTES = "8GiB"
_CONVERSATIONS_IN_DRAM = 2.2
_OTHERS_TOKENS = 64
_FIRST_TOKENS = 10
"""Each of the others has got so many tokens when one returns."""
_NEW_TOKENS = 40
_ANSWER_TOKENS = 8
_MOST_TOKENS = 400
"""Of the others' answers, which end with that of the one that returns."""
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Return:
    """One that returned while ``others`` were being answered. ``gap_s``: the longest time between two tokens
    of any of them until its first one; ``steady_s``: the median before. It ``has_waited`` for what was read.
    """

    others: int
    ttft_s: float
    gap_s: float
    steady_s: float
    found: float
    has_waited: bool


class Answer:
    """Asks for tokens that follow a prompt, and notes when they come, until it ``is_over``."""

    def __init__(self, url: str, prompt: Sequence[int]) -> None:
        self.prompt = [*prompt]
        self.asked_s = time.perf_counter()
        self.times: list[float] = []
        self.is_over = threading.Event()
        self.last: dict[str, Any] = {}
        self._url = f"{url}/generate"

    def run(self, max_tokens: int) -> None:
        sampling = {"max_new_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        asked = {"input_ids": self.prompt, "sampling_params": sampling, "stream": True}
        with httpx.stream("POST", self._url, json=asked, timeout=_TIMEOUT_S) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.times.append(time.perf_counter())
                    self.last = orjson.loads(line.removeprefix("data: "))
                if self.is_over.is_set():
                    break

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Times between tokens, as far as they lie between ``begin_s`` and ``end_s``."""
        pairs = pairwise(self.times)
        return [after - before for before, after in pairs if before < end_s and after > begin_s]


def run(
    base: Configuration, servers: Sequence[str], others: Sequence[int], num_returns: int
) -> dict[str, Any]:
    """Measure the servers, and make a row for each of them and each number of others."""
    (num_tokens,), num_ids = base.history_tokens, AutoConfig.from_pretrained(base.model_path).vocab_size
    most = num_tokens + max(others) * (_OTHERS_TOKENS + _MOST_TOKENS) + 4 * _MOST_TOKENS
    pools = PoolSizes(most, most, num_tokens, most)
    rows = []
    for name in servers:
        with tempfile.TemporaryDirectory(prefix="krul-stalls-") as folder:
            server = make_server("native", base, pools, Path(folder))
            command = server.process.command
            command[command.index("sglang.launch_server")] = SERVERS[name]
            returned = list(_play(server, num_ids, num_tokens, others, num_returns))
        for number in others:
            of_number = [each for each in returned if each.others == number]
            rows.append(
                {
                    "server": name,
                    "others": number,
                    "ttft_s": quantiles([each.ttft_s for each in of_number]),
                    "gap_s": quantiles([each.gap_s for each in of_number]),
                    "steady_s": statistics.median(each.steady_s for each in of_number),
                    "found": statistics.mean(each.found for each in of_number),
                    "waited": sum(each.has_waited for each in of_number),
                }
            )
    return {"configuration": base.to_json(), "rows": rows}


def _play(
    server: Server, num_ids: int, num_tokens: int, others: Sequence[int], num_returns: int
) -> Iterator[Return]:
    """Everybody's first turn; then each returns while others are being answered. There are ``num_ids``
    different tokens."""
    draw = random.Random(0)
    prompts = (draw.choices(range(num_ids), k=num_tokens) for _ in itertools.count())
    with ExitStack() as stack:
        assert server.daemon is not None
        stack.enter_context(server.daemon)
        stack.enter_context(server.process)
        url = server.process.url
        threads = stack.enter_context(ThreadPoolExecutor(max(others) + 1))

        def ask(prompt: Sequence[int]) -> Answer:
            answer = Answer(url, prompt)
            answer.run(_ANSWER_TOKENS)
            return answer

        def push_out() -> None:
            for _ in range(round(_CONVERSATIONS_IN_DRAM)):
                ask(next(prompts))
                server.settle()

        firsts = []
        for _ in range(len(others) * num_returns):
            firsts.append(ask(next(prompts)))
            server.settle()
        push_out()
        num_waited = _num_held_back(server)
        for number, first in zip([*others] * num_returns, firsts, strict=True):
            those = [Answer(url, next(prompts)[:_OTHERS_TOKENS]) for _ in range(number)]
            running = [threads.submit(each.run, _MOST_TOKENS) for each in those]
            while any(len(each.times) < _FIRST_TOKENS for each in those):
                time.sleep(0.01)
            again = ask([*first.prompt, *first.last["output_ids"], *next(prompts)[:_NEW_TOKENS]])
            for each in those:
                each.is_over.set()
            for stream in running:
                stream.result()
            num_before, num_waited = num_waited, _num_held_back(server)
            yield _returned(again, those, has_waited=num_waited > num_before)
            server.settle()
            push_out()


def _num_held_back(server: Server) -> int:
    """Requests that were passed over so far."""
    number: int = server.process.server_info()["internal_states"][0]["krul"]["held_back"]
    return number


def _returned(again: Answer, others: Sequence[Answer], *, has_waited: bool) -> Return:
    begin_s, end_s = again.asked_s, again.times[0]
    returned = Return(
        len(others),
        ttft_s=end_s - begin_s,
        gap_s=max(gap for each in others for gap in each.gaps_s(begin_s, end_s)),
        steady_s=statistics.median(gap for each in others for gap in each.gaps_s(0.0, begin_s)),
        found=again.last["meta_info"]["cached_tokens"] / len(again.prompt),
        has_waited=has_waited,
    )
    logger.info("%s", returned)
    return returned


COLUMNS: Columns = {
    "returning request": cell("server"),
    "others": cell("others"),
    "its TTFT": cell("ttft_s", lambda ttft_s: ms(ttft_s["median"])),
    "others' longest time between tokens": cell("gap_s", lambda gap_s: ms(gap_s["median"])),
    "largest": cell("gap_s", lambda gap_s: ms(gap_s["max"])),
    "before": cell("steady_s", ms),
    "found": cell("found", "{:.0%}"),
    "waited": cell("waited"),
}


def stalls_table(result: Result, path: Path | None) -> str:
    """A line for each server and number of others."""
    configuration = result["configuration"]
    heading = (
        f"**{model(result)}: {configuration['history_tokens'][0]} tokens return from an SSD that reads "
        f"{configuration['ssd_read_mbs']:g} MB/s, while others are being answered:**"
    )
    words = "Medians; largest: of all returns; before: median time between tokens; waited: how many returns."
    return f"{heading}\n\n{table_of(COLUMNS, result['rows'])}\n\n{words} {machine(result, path)}"


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)

    def measure() -> Result:
        if unknown := set(given.servers) - SERVERS.keys():
            raise ServingBenchmarkError(
                f"--servers: no {', '.join(unknown)}; accepted are {', '.join(SERVERS)}"
            )
        if min(given.others) < 1:
            raise ServingBenchmarkError(f"--others {min(given.others)} is not possible; expected more than 0")
        base = Configuration(
            model_path=find_model(given.model, logger.info, option="--model"),
            history_tokens=(given.tokens,),
            dtype=given.dtype,
            ssd=_SSD_BYTES,
            ssd_read_mbs=given.ssd_read_mbs,
            krul_options={"ssd_timeout": 30.0},
        )
        in_dram = int(_CONVERSATIONS_IN_DRAM * given.tokens * kv_token_bytes(base))
        return run(replace(base, host_memory=str(in_dram)), given.servers, given.others, given.returns)

    return runner.run(given, measure, stalls_table)


def _parser() -> argparse.ArgumentParser:
    parser = runner.make_parser("stalls", __doc__, model="smollm2", dtype="bfloat16")
    add = parser.add_argument
    add("--servers", type=names, default=(*SERVERS,), help=", ".join(SERVERS))
    add("--others", type=numbers, default=(1, 4), help="how many are being answered, several (1,4)")
    add("--returns", type=int, default=3, help="returns for each of these (3)")
    add("--tokens", type=int, default=2000, help="length of what returns (2000)")
    add("--ssd-read-mbs", type=float, default=60.0, help="what the SSD reads, in 1e6 bytes per second (60)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
