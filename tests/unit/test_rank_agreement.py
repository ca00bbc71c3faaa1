"""Ranks come to one result: alone, and in real processes over gloo, all together or in groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from krul_sglang.engine.common.agreement import RankAgreement

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from krul_sglang.engine.common.agreement import RankAgreement

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
agreement = RankAgreement.create(2)
assert agreement.broadcast(b"of rank 0" if rank == 0 else b"ignored") == b"of rank 0"
assert agreement.broadcast(b"") == b""
for contents in ([b"one", b"of rank 1"], [b"", b"\\0x\\0"], [b"", b""], [b"same", b"same"]):
    assert agreement.gather_bytes(contents[rank]) == contents
mine = torch.full((2, 3), float(rank + 1), dtype=torch.float64)
gathered = agreement.gather(mine, (2, 3))
assert [part.shape for part in gathered] == [(2, 3), (2, 3)]
assert [part[0, 0].item() for part in gathered] == [1.0, 2.0]
assert agreement.gather(mine if rank == 0 else None, (2, 3)) is None
assert agreement.gather(None, (2, 3)) is None
assert not agreement.holds_on_all(rank == 0) and agreement.holds_on_all(True)
# Still in step after a rank had nothing.
assert len(agreement.gather(mine, (2, 3))) == 2
dist.destroy_process_group()
print("agreed")
"""


IN_PAIRS = """
import sys
import torch.distributed as dist
from krul_sglang.engine.common.agreement import RankAgreement

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
pairs = RankAgreement.create(2)
assert (pairs.rank, pairs.num_ranks) == (rank % 2, 2)
pair = range(rank - rank % 2, rank - rank % 2 + 2)
# The pairs exchange once and twice: none waits for the other.
for _ in range(1 + rank // 2):
    assert pairs.gather_bytes(str(rank).encode()) == [str(other).encode() for other in pair]
dist.destroy_process_group()
print("agreed")
"""


def test_a_single_rank_agrees_with_itself() -> None:
    agreement = RankAgreement.create(1)
    values = torch.rand(3, dtype=torch.float64)
    assert agreement.gather(values, (3,)) == [values]
    assert agreement.gather(None, (3,)) is None
    assert agreement.holds_on_all(True)
    assert not agreement.holds_on_all(False)
    assert agreement.broadcast(b"table") == b"table"
    assert agreement.gather_bytes(b"table") == [b"table"]
    assert agreement.gather_bytes(b"") == [b""]


def test_two_ranks_get_the_values_of_both_or_of_none(tmp_path: Path) -> None:
    run_ranks(PROGRAM, 2, tmp_path)


def test_ranks_of_a_group_agree_without_the_others(tmp_path: Path) -> None:
    run_ranks(IN_PAIRS, 4, tmp_path)


def run_ranks(program: str, num_ranks: int, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    for process in ranks:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert output == "agreed\n"
