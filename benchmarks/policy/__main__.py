"""``python -m benchmarks.policy --traces FILE --json FILE``: eviction policies on replayed sessions."""

from __future__ import annotations

import logging
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.policy.policies import BeladyPolicy, FifoPolicy, S3FifoPolicy
from benchmarks.policy.replay import SEGMENT_PAGES, Outcome, Replay
from benchmarks.policy.workload import (
    PAGE_TOKENS,
    Cost,
    Future,
    Session,
    Workload,
    make_workload,
    read_sessions,
)
from krul_backend.errors import KrulError
from krul_backend.tiers.common.eviction import POLICIES, EvictionPolicy, make_policy
from krul_backend.tiers.common.interface import Clock
from krul_sglang.demo import environment
from krul_sglang.json_file import write_result

logger = logging.getLogger(__name__)

REFERENCE = "belady"
_TURNS_OF_USER = 10
_SHARES = ("hit_rate", "byte_hit_rate", "saved", "hits_of_reference", "saved_of_reference")
POLICY_NAMES = (*POLICIES, "fifo", "s3-fifo", REFERENCE)


@dataclass(frozen=True)
class Configuration:
    """What is replayed. ``shares``: DRAM as shares of the working set, for ``users`` users.

    ``many_users``: numbers of users with DRAM of ``share_of_many``. Each replay has ``turns`` turns,
    or ten for each user if that is more. ``slots``: requests that the server answers at once where the
    queue is looked at, for ``users`` users.
    """

    shares: tuple[float, ...] = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5)
    users: int = 40
    many_users: tuple[int, ...] = (10, 100, 500)
    share_of_many: float = 0.1
    turns: int = 1500
    slots: int = 4
    size_spread: float = 1.5
    seed: int = 0
    cost: Cost = field(default_factory=Cost)


Row = dict[str, Any]
Tell = Callable[[str], None]


def run(sessions: Sequence[Session], configuration: Configuration, tell: Tell) -> dict[str, Any]:
    """All rows: by share of DRAM, by number of users, and with a queue."""
    rows = list(_rows(sessions, configuration, tell))
    return {
        "configuration": {
            **asdict(configuration),
            "sessions": len(sessions),
            "requests": sum(map(len, sessions)),
            "page_tokens": PAGE_TOKENS,
            "segment_pages": SEGMENT_PAGES,
        },
        "rows": rows,
    }


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result with fewer numbers in each row, and quantiles of what policies reach of the reference."""
    rows = result["rows"]
    of_policy = {
        name: [row for row in rows if row["policy"] == name] for name in POLICY_NAMES if name != REFERENCE
    }
    kept = ("part", "users", "holds_waiting", "share", "policy", *_SHARES)
    return {
        **result,
        "relative": {
            name: {measure: _quantiles([row[measure] for row in of_rows]) for measure in _SHARES[-2:]}
            for name, of_rows in of_policy.items()
        },
        "rows": [{key: row[key] for key in kept if key in row} for row in rows],
    }


def make_policies(workload: Workload) -> dict[str, Callable[[Clock], EvictionPolicy]]:
    """What makes each policy, for the store of one replay."""
    future = Future(workload)
    return {
        **{name: partial(make_policy, name) for name in POLICIES},
        "fifo": lambda _: FifoPolicy(),
        "s3-fifo": lambda _: S3FifoPolicy(),
        REFERENCE: lambda clock: BeladyPolicy(future, clock),
    }


def _rows(sessions: Sequence[Session], configuration: Configuration, tell: Tell) -> Iterator[Row]:
    def workload(num_users: int, num_slots: int | None = None) -> Workload:
        return make_workload(
            sessions,
            num_users,
            max(configuration.turns, _TURNS_OF_USER * num_users),
            size_spread=configuration.size_spread,
            num_slots=num_slots,
            seed=configuration.seed,
        )

    of_users = workload(configuration.users)
    for share in configuration.shares:
        yield from _of_all(of_users, share, configuration, tell, {"part": "dram"})
    for num_users in configuration.many_users:
        share = configuration.share_of_many
        part: Row = {"part": "users"}
        yield from _of_all(workload(num_users), share, configuration, tell, part | {"users": num_users})
    queued = workload(configuration.users, configuration.slots)
    for holds in (False, True):
        part = {"part": "queue", "holds_waiting": holds}
        yield from _of_all(queued, configuration.share_of_many, configuration, tell, part)


def _of_all(
    workload: Workload, share: float, configuration: Configuration, tell: Tell, names: Row
) -> Iterator[Row]:
    """A row for each policy in one setting."""
    capacity_bytes = int(share * workload.working_set_bytes)
    outcomes: dict[str, Outcome] = {}
    holds_waiting = names.get("holds_waiting", True)
    for name, policy in make_policies(workload).items():
        replay = Replay(
            workload,
            capacity_bytes,
            policy,
            configuration.cost,
            holds_waiting=holds_waiting,
        )
        outcomes[name] = replay.run()
        tell(f"{names}, {share:.0%} in DRAM, {name}: {outcomes[name].hit_rate:.1%} hits")
    best = outcomes[REFERENCE]
    for name, outcome in outcomes.items():
        yield {
            **names,
            "share": share,
            "policy": name,
            "hit_rate": outcome.hit_rate,
            "byte_hit_rate": outcome.hit_bytes / outcome.prompt_bytes,
            "saved": outcome.saved_s / outcome.recompute_s,
            "hits_of_reference": outcome.hit_pages / max(1, best.hit_pages),
            "saved_of_reference": outcome.saved_s / max(1e-9, best.saved_s),
            **asdict(outcome),
        }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


_DEFAULTS = Configuration()


def main(
    traces: Annotated[Path, typer.Option(help="File of recorded sessions, one JSON object a line.")],
    json: Annotated[Path, typer.Option(help="File for the summary of the result.")],
    raw: Annotated[Path | None, typer.Option(help="File for the result with every number.")] = None,
    figure: Annotated[Path | None, typer.Option(help="PNG file: hit rate by DRAM and by users.")] = None,
    share: Annotated[
        list[float] | None, typer.Option(help="DRAM as a share of the working set; repeatable.")
    ] = None,
    users: Annotated[int, typer.Option(help="Users while the share varies.", min=1)] = _DEFAULTS.users,
    many_users: Annotated[
        list[int] | None, typer.Option(help="Users at one share of DRAM; repeatable.")
    ] = None,
    share_of_many: Annotated[float, typer.Option(help="That share.")] = _DEFAULTS.share_of_many,
    turns: Annotated[int, typer.Option(help="Turns of each replay.", min=1)] = _DEFAULTS.turns,
    slots: Annotated[
        int, typer.Option(help="Requests answered at once where others wait.", min=1)
    ] = _DEFAULTS.slots,
    size_spread: Annotated[
        float, typer.Option(help="Bytes per token differ by up to this factor either way.", min=1)
    ] = _DEFAULTS.size_spread,
    seed: Annotated[int, typer.Option(help="Of the order of sessions and the sizes.")] = _DEFAULTS.seed,
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    configuration = Configuration(
        shares=tuple(share or _DEFAULTS.shares),
        users=users,
        many_users=tuple(many_users or _DEFAULTS.many_users),
        share_of_many=share_of_many,
        turns=turns,
        slots=slots,
        size_spread=size_spread,
        seed=seed,
    )
    try:
        result = {
            # Files by their names: where they lie says nothing of the result.
            "command": shlex.join(
                ["python", "-m", "benchmarks.policy", *(Path(word).name for word in sys.argv[1:])]
            ),
            "git_revision": environment.git_revision(),
            "versions": environment.versions(("numpy",)),
            **run(read_sessions(traces), configuration, logger.info),
        }
    except KrulError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    summary = summarize(result)
    write_result(result, summary, json=json, raw=raw)
    if figure is not None:
        from benchmarks.figures.charts import draw_policy

        draw_policy(summary, figure)


if __name__ == "__main__":
    typer.run(main)
