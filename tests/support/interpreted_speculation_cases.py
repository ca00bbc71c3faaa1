"""The CPU platform's kernels for speculation against SGLang's Triton kernels, in triton's interpreter.

Not collected by itself: ``test_cpu_speculation`` runs it in a process of its own, because triton decides when
it is imported whether it interprets.
"""

from __future__ import annotations

import random
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from sglang.kernels.ops.memory.common import get_last_loc_triton
from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
from sglang.srt.mem_cache import allocation

from krul_sglang.adapter.platforms import cpu_speculation

SEEDS = range(20)
QLEN_ONLY = spec_tree.TreeMaskMode.QLEN_ONLY


@pytest.fixture(scope="module")
def reconstruct_in_triton() -> Any:
    """SGLang's kernel; its module imports another one that needs CUDA, which is not looked at."""
    names = ("sgl_kernel", "sgl_kernel.speculative")
    missing = {name: ModuleType(name) for name in names}
    missing[names[1]].__dict__["reconstruct_indices_from_tree_mask"] = None
    with pytest.MonkeyPatch.context() as patch:
        for name, module in missing.items():
            patch.setitem(sys.modules, name, module)
        from sglang.kernels.ops.speculative import reconstruct_tree
    return reconstruct_tree.reconstruct_indices_from_tree_mask_triton


class Drafts:
    """Random trees of drafted tokens, of which nodes have several children or none, and a few no parent."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.batch_size, self.num_nodes = rng.randint(1, 4), rng.choice([1, 2, 3, 5, 8])
        self.seq_lens = torch.tensor([rng.randint(1, 90) for _ in range(self.batch_size)])
        shape = (self.batch_size, self.num_nodes, self.num_nodes)
        self.mask = torch.zeros(shape, dtype=torch.bool)
        for tree in self.mask:
            for node in range(self.num_nodes):
                if node and rng.random() < 0.9:
                    tree[node] = tree[rng.choice([node - 1, rng.randrange(node)])]
                tree[node, node] = True
        # Few different tokens, so that many are accepted, and siblings may be equal.
        self.candidates, self.target = (
            torch.tensor([[rng.randrange(2) for _ in range(self.num_nodes)] for _ in range(self.batch_size)])
            for _ in range(2)
        )

    def reconstructed(self, function: Any) -> list[torch.Tensor]:
        shape = (self.batch_size, self.num_nodes)
        outputs = [torch.full(shape, -7) for _ in range(4)]
        outputs[0] = outputs[0].flatten()
        function(self.mask.flatten(), self.seq_lens, *outputs, *shape)
        return outputs

    def verified(self, function: Any, max_depth: int) -> list[torch.Tensor]:
        _, *tree = self.reconstructed(cpu_speculation.reconstruct_tree)
        predicts = torch.zeros(self.batch_size * self.num_nodes, dtype=torch.int32)
        accepted = torch.full((self.batch_size, max_depth), -1, dtype=torch.int32)
        num_accepted = torch.zeros(self.batch_size, dtype=torch.int32)
        function(predicts, accepted, num_accepted, self.candidates, *tree, self.target)
        return [predicts, accepted, num_accepted]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.tolist() == wanted.tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_trees_are_reconstructed(seed: int, reconstruct_in_triton: Any) -> None:
    drafts = Drafts(seed)
    ours = drafts.reconstructed(cpu_speculation.reconstruct_tree)
    assert_equal(ours, drafts.reconstructed(reconstruct_in_triton))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_tokens_are_accepted(seed: int) -> None:
    drafts = Drafts(seed)
    for max_depth in {drafts.num_nodes, (drafts.num_nodes + 1) // 2}:

        def by_name(*tensors: torch.Tensor) -> None:
            names = ("predicts", "accept_index", "accept_token_num", "candidates")
            links = ("retrive_index", "retrive_next_token", "retrive_next_sibling", "target_predict")
            cpu_speculation.verify_tree_greedy(**dict(zip((*names, *links), tensors, strict=True)))

        ours = drafts.verified(by_name, max_depth)
        assert_equal(ours, drafts.verified(spec_tree.verify_tree_greedy_triton, max_depth))


def test_the_cases_accept_some_and_refuse_some() -> None:
    """Without this the equality above could hold for functions that accept nothing."""
    counts = set()
    for seed in SEEDS:
        drafts = Drafts(seed)
        counts.update(drafts.verified(spec_tree.verify_tree_greedy_triton, drafts.num_nodes)[2].tolist())
    assert {0, 1, 2, 3} <= counts


class Candidates:
    """What a draft model has proposed, in groups of ``topk``, and a selection of it that hangs together."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        batch_size, self.topk, num_steps = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 4)
        num_candidates = self.topk + (num_steps - 1) * self.topk**2
        self.num_nodes = rng.randint(1, min(8, num_candidates)) + 1
        self.num_steps = num_steps
        self.seq_lens = torch.tensor([rng.randint(1, 90) for _ in range(batch_size)])
        self.parents, self.selected = [], []
        for _ in range(batch_size):
            # Each group of a step follows one of the candidates of the step before.
            last, parents = range(self.topk), [-1]
            for _ in range(num_steps - 1):
                followed = sorted(rng.sample(last, self.topk))
                first = len(parents) * self.topk
                parents += followed
                last = range(first, first + self.topk**2)
            selected: set[int] = set()
            while len(selected) < self.num_nodes - 1:
                reached = [
                    candidate
                    for candidate in range(num_candidates)
                    if candidate < self.topk or parents[candidate // self.topk] in selected
                ]
                selected.add(rng.choice([candidate for candidate in reached if candidate not in selected]))
            self.parents.append(parents)
            self.selected.append(sorted(selected))

    def built(self, function: Any) -> list[torch.Tensor]:
        shape = (len(self.seq_lens), self.num_nodes)
        mask = torch.ones(len(self.seq_lens) * self.num_nodes**2, dtype=torch.bool)
        links = [torch.full(shape, -1) for _ in range(4)]
        outputs = [mask, links[0].flatten(), *links[1:]]
        given = (torch.tensor(self.parents), torch.tensor(self.selected), self.seq_lens)
        function(*given, *outputs, self.topk, self.num_steps, self.num_nodes, QLEN_ONLY)
        return outputs


@pytest.mark.parametrize("seed", SEEDS)
def test_trees_are_built(seed: int) -> None:
    candidates = Candidates(seed)
    ours = candidates.built(cpu_speculation.build_tree)
    assert_equal(ours, candidates.built(spec_tree.sgl_build_tree_kernel_triton))


def test_the_cases_have_branches() -> None:
    assert any((Candidates(seed).built(cpu_speculation.build_tree)[4] >= 0).any() for seed in SEEDS)


class Requests:
    """Rows of SGLang's table of slots, and a span of tokens of each request."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        batch_size = rng.randint(1, 5)
        self.rows = torch.randperm(400).view(8, 50).int()
        self.indices = torch.tensor(rng.sample(range(8), batch_size))
        self.starts = torch.tensor([rng.randrange(40) for _ in range(batch_size)])
        self.ends = self.starts + torch.tensor([rng.randrange(10) for _ in range(batch_size)])
        self.num_tokens = int((self.ends - self.starts).sum())

    @property
    def spans(self) -> tuple[torch.Tensor, ...]:
        return self.indices, self.rows, self.starts, self.ends


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_are_read_and_written(seed: int) -> None:
    requests = Requests(seed)
    batch_size, width = len(requests.indices), requests.rows.shape[1]
    ours, theirs = (torch.full((requests.num_tokens + 3,), -7) for _ in range(2))
    cpu_speculation.read_slots(*requests.spans, ours, width)
    cache_locs.assign_extend_cache_locs[(batch_size,)](*requests.spans, theirs, width, 8)
    assert_equal([ours], [theirs])

    new = torch.arange(1000, 1000 + requests.num_tokens)
    ours, theirs = (requests.rows.clone() for _ in range(2))
    spans = (requests.starts, requests.ends, new, width)
    cpu_speculation.write_slots(requests.indices, ours, *spans)
    allocation.assign_req_to_token_pool[(batch_size,)](requests.indices, theirs, *spans, 8)
    assert_equal([ours], [theirs])


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_of_drafts_are_read(seed: int) -> None:
    requests = Requests(seed)
    batch_size, (topk, num_steps) = len(requests.indices), random.Random(seed).choice([(1, 3), (2, 4)])
    given = (requests.indices, requests.rows, requests.starts)
    ours, theirs = (torch.full((batch_size * topk * num_steps,), -7) for _ in range(2))
    cpu_speculation.read_draft_slots(*given, ours, requests.rows.shape[1], topk, num_steps)
    cache_locs.assign_draft_cache_locs_contiguous_func(*given, theirs, topk, num_steps)
    assert_equal([ours], [theirs])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_accepted_tokens_are_read(seed: int) -> None:
    rng = random.Random(seed)
    batch_size, width = rng.randint(1, 4), rng.randint(1, 6)
    tokens = torch.randperm(batch_size * width).int().view(batch_size, width)
    num_accepted = torch.tensor([rng.randint(1, width) for _ in range(batch_size)], dtype=torch.int32)
    ours, theirs = (torch.full((batch_size,), -7, dtype=torch.int32) for _ in range(2))
    cpu_speculation.read_bonus_tokens(tokens, num_accepted, ours, width)
    eagle.fill_bonus_tokens_func(tokens, num_accepted, theirs, width, batch_size)
    assert_equal([ours], [theirs])


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_of_accepted_rows_are_read(seed: int) -> None:
    rng = random.Random(seed)
    width = rng.randint(1, 6)
    accepted = torch.full((rng.randint(1, 4), width), -1, dtype=torch.int32)
    slots = torch.randperm(accepted.numel())
    for request, row in enumerate(accepted):
        for place in range(rng.randint(1, width)):
            row[place] = request * width + place
    ours, theirs = (torch.full((accepted.numel(),), -7) for _ in range(2))
    cpu_speculation.read_accepted_slots(accepted, slots, ours)
    eagle.fill_accept_out_cache_loc[(accepted.numel(),)](accepted, slots, theirs, 32)
    assert_equal([ours], [theirs])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_slot_is_the_same(seed: int) -> None:
    requests = Requests(seed)
    spans = (requests.rows, requests.indices, requests.starts)
    assert_equal([allocation.get_last_loc_torch(*spans)], [get_last_loc_triton(*spans)])
