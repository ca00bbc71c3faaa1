"""Probes compare the stored history with the true one, leave nothing behind, and correct the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from krul_backend.codec.layout import LayerKV
from krul_backend.errors import KrulError
from krul_sglang.adapter import probe_forward
from krul_sglang.adapter.probe_forward import HistoryAttention, prepare_probe
from krul_sglang.engine.budget import probing
from krul_sglang.engine.budget.probing import PROBED_TOKENS, ProbeOutcome, Prober
from krul_sglang.engine.restore.tail_groups import TailGroups
from tests.support.budget_builders import NUM_LAYERS, PAGE_SIZE, BudgetedServer
from tests.support.present import present

LIMIT = 0.05
FIRST_PAGES, MORE_PAGES = 8, 32
HISTORY = (FIRST_PAGES + MORE_PAGES) * PAGE_SIZE - PROBED_TOKENS


class FakeForward:
    """Stands in for the model, whose predictions depend on every element of the history.

    ``histories`` are those that it ran on, ``token_ids`` and ``first_position`` what it ran last.
    ``is_recorded`` says whether some capture saw it.
    """

    def __init__(self) -> None:
        self.histories: list[list[LayerKV]] = []
        self.is_recorded = False
        self.num_calls = 0
        self.error: Exception | None = None
        self.attention_error: Exception | None = None

    def __call__(
        self, model_runner: Any, token_ids: torch.Tensor, first_position: int, attention: Any, unrecorded: Any
    ) -> torch.Tensor:
        self.num_calls += 1
        self.token_ids, self.first_position = token_ids.tolist(), first_position
        attention.error = self.attention_error
        with unrecorded as is_suspended:
            self.is_recorded |= not is_suspended
            if self.error is not None:
                raise self.error
            self.histories.append([attention._history(layer) for layer in range(NUM_LAYERS)])
        return predictions(self.histories[-1], token_ids)


def predictions(history: Sequence[LayerKV], token_ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[W, 8]``."""
    features = torch.stack([kv.k.mean((0, 1)) + 2 * kv.v.mean((0, 1)) for kv in history]).sum(0)
    return (1 + token_ids[:, None] % 3) * features


class Capture:
    @contextmanager
    def suspended(self) -> Iterator[bool]:
        yield True


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> FakeForward:
    forward = FakeForward()
    monkeypatch.setattr(probe_forward, "probe_forward", forward)
    return forward


@pytest.fixture
def server() -> Iterator[BudgetedServer]:
    server = BudgetedServer(LIMIT)
    yield server
    server.close()


def make_prober(server: BudgetedServer, group: Any = None) -> Prober:
    capture: Any = Capture()
    prepare = partial(prepare_probe, SimpleNamespace(token_to_kv_pool=None, device="cpu"), capture)
    return Prober(prepare, server.pool, server.codec, server.store, server.model, group)


def store_two_turns(server: BudgetedServer) -> None:
    for num_pages in (FIRST_PAGES, MORE_PAGES):
        server.compute(num_pages)
        server.store_turn()


def damage_of_history(server: BudgetedServer) -> float:
    """What the tokens before the probed ones cost now. The second segment is among them in part."""
    first, second = server.damage_now()
    start = FIRST_PAGES * PAGE_SIZE
    return first + second * (HISTORY - start) / (len(server.slots) - start)


def measure(server: BudgetedServer, *, is_exact: bool = True, group: Any = None) -> ProbeOutcome | None:
    """Probe the conversation; whatever comes of it, nothing stays leased."""
    outcome = make_prober(server, group).measure(server.path, lambda: is_exact)
    assert server.store.stats().num_leases == 0
    return outcome


def is_equal(history: Sequence[LayerKV], other: Sequence[LayerKV], tolerance: float = 0.0) -> bool:
    """Whether a history has the first tokens of the other one."""
    return all(
        torch.allclose(one.k, two.k[: len(one.k)], rtol=tolerance, atol=tolerance)
        and torch.allclose(one.v, two.v[: len(one.v)], rtol=tolerance, atol=tolerance)
        for one, two in zip(history, other, strict=True)
    )


def test_the_last_tokens_run_on_the_true_history_and_on_the_one_that_would_come_back(
    server: BudgetedServer, forward: FakeForward
) -> None:
    store_two_turns(server)
    outcome = measure(server)
    before, noted = server.read_pool(), damage_of_history(server)
    server.leave_and_return()
    true, stored = forward.histories
    assert [len(kv.k) for kv in (*true, *stored)] == [HISTORY] * (2 * NUM_LAYERS)
    assert is_equal(true, before)
    # A restore decodes both segments together, which rounds products in another way.
    assert is_equal(stored, server.read_pool(), tolerance=0.01)
    assert not is_equal(stored, true, tolerance=0.02)
    assert (forward.token_ids, forward.first_position) == (server.path.token_ids[HISTORY:].tolist(), HISTORY)
    assert not forward.is_recorded
    of_true, of_stored = (
        predictions(history, torch.tensor(forward.token_ids)).double().log_softmax(-1)
        for history in (true, stored)
    )
    divergence = torch.nn.functional.kl_div(of_stored, of_true, reduction="batchmean", log_target=True)
    assert outcome is not None
    assert divergence > 1e-7
    assert outcome.kl == pytest.approx(float(divergence), rel=0.1)
    assert outcome.noted == pytest.approx(noted)


def test_tokens_that_are_not_stored_stay_as_they_are_in_the_pool(
    server: BudgetedServer, forward: FakeForward
) -> None:
    """A restore computes them, from a history that is as exact."""
    head_ends = (64, 64, 0, 0)
    allocation: Any = SimpleNamespace(head_ends=lambda num_tokens, encoding: head_ends)
    server.decide_by(server.budget, allocation=allocation)
    server.compute(FIRST_PAGES + MORE_PAGES)
    server.store_turn()
    assert server.headers[0].layer_first_token[0] == 64
    assert measure(server) is not None
    server.leave_and_return(head_ends)
    true, stored = forward.histories
    assert is_equal(stored, server.read_pool())
    for layer, head_end in enumerate(head_ends):
        is_same = (true[layer].k == stored[layer].k).all((1, 2))
        assert is_same[:head_end].all()
        assert not is_same[max(head_end, 1) :].any()


def cleared(server: BudgetedServer) -> None:
    store_two_turns(server)
    server.store.clear()


def stored_in_part(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES)
    server.store_turn()
    server.compute(MORE_PAGES)


def damaged(server: BudgetedServer) -> None:
    store_two_turns(server)
    lease = present(server.store.lease(server.model.identity, server.keys, server.path.token_ids))
    block = lease.slices[0].blocks[2]
    memory = np.frombuffer(server.store.host.buffer, np.uint8)
    memory[block.ctypes.data - memory.ctypes.data] ^= 1
    server.store.release(lease)


def native(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES + MORE_PAGES)
    server.store_turn(is_observed=False)


def short(server: BudgetedServer) -> None:
    server.compute(PROBED_TOKENS // PAGE_SIZE)
    server.store_turn()


@pytest.mark.parametrize("prepare", [cleared, stored_in_part, damaged, native, short])
def test_what_cannot_be_compared_is_not_probed(
    server: BudgetedServer, forward: FakeForward, prepare: Callable[[BudgetedServer], None]
) -> None:
    prepare(server)
    assert measure(server) is None
    assert forward.histories == []


def test_without_exact_kv_there_is_nothing_to_compare_with(
    server: BudgetedServer, forward: FakeForward
) -> None:
    store_two_turns(server)
    assert measure(server, is_exact=False) is None
    assert forward.histories == []


def test_long_histories_are_not_probed(
    server: BudgetedServer, forward: FakeForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_two_turns(server)
    monkeypatch.setattr(probing, "MOST_HISTORY_TOKENS", HISTORY - 1)
    assert measure(server, group=OtherRanks(monkeypatch)) is None
    assert forward.histories == []
    monkeypatch.setattr(probing, "MOST_HISTORY_TOKENS", HISTORY)
    assert measure(server) is not None


def test_a_forward_that_fails_leaves_nothing_leased(server: BudgetedServer, forward: FakeForward) -> None:
    store_two_turns(server)
    forward.error = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        measure(server)
    assert server.store.stats().num_leases == 0


class OtherRanks:
    """Another rank, which adds to this rank's values in the exchanges, in turn. ``mine`` are those of this
    rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *added: list[float]) -> None:
        self.mine: list[list[float]] = []
        self._added = iter(added)
        monkeypatch.setattr(torch.distributed, "all_reduce", self.all_reduce)

    def all_reduce(self, total: torch.Tensor, group: Any) -> None:
        assert group is self
        self.mine.append(total.tolist())
        total += torch.tensor(next(self._added), dtype=torch.float64)


# Of another rank: whether it failed, then whether it is not ready and what it noted, or its divergence and 1.
READY, NOT_READY, WENT_WELL, FAILED = [0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]


def test_no_rank_probes_unless_all_can(
    server: BudgetedServer, forward: FakeForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_two_turns(server)
    assert measure(server, group=OtherRanks(monkeypatch, NOT_READY)) is None
    assert forward.histories == []


def test_a_rank_that_cannot_probe_says_so(
    server: BudgetedServer, forward: FakeForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_two_turns(server)
    others = OtherRanks(monkeypatch, READY)
    assert measure(server, is_exact=False, group=others) is None
    assert others.mine == [NOT_READY]


@pytest.mark.parametrize("tp_size", [2, 1], ids=["heads each", "the same latent KV"])
def test_all_ranks_have_one_outcome(
    tp_size: int, forward: FakeForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(BudgetedServer(LIMIT, tp_size=tp_size)) as server:
        store_two_turns(server)
        outcome = present(measure(server, group=OtherRanks(monkeypatch, [0.0, 0.0, 0.0], [0.0, 0.0, 0.0])))
        own, num_sharing = outcome.kl, 2 / tp_size
        outcome = present(measure(server, group=OtherRanks(monkeypatch, [0.0, 0.0, 3.0], [0.0, 0.25, 1.0])))
        assert outcome.noted == pytest.approx((damage_of_history(server) + 3.0) / num_sharing)
        assert outcome.kl == pytest.approx((own + 0.25) / 2)


@pytest.mark.parametrize("added", [([1.0, 0.0, 0.0],), (READY, FAILED)], ids=["not ready", "in the forward"])
def test_no_rank_has_an_outcome_if_another_one_failed(
    added: tuple[list[float], ...],
    server: BudgetedServer,
    forward: FakeForward,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store_two_turns(server)
    with pytest.raises(KrulError, match="another rank"):
        measure(server, group=OtherRanks(monkeypatch, *added))
    assert len(forward.histories) == 2 * (len(added) - 1)


def raise_error(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no memory")


def fail_to_lease(server: BudgetedServer, forward: FakeForward, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(server.store, "lease", raise_error)


def fail_to_open(server: BudgetedServer, forward: FakeForward, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(probing, "open_segments", raise_error)


def fail_in_a_forward(server: BudgetedServer, forward: FakeForward, patch: pytest.MonkeyPatch) -> None:
    forward.error = RuntimeError("no memory")


def fail_in_the_check(server: BudgetedServer, forward: FakeForward, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TailGroups, "check", raise_error)


@pytest.mark.parametrize(
    ("fail", "num_exchanges"),
    [(fail_to_lease, 1), (fail_to_open, 1), (fail_in_a_forward, 2), (fail_in_the_check, 2)],
)
def test_a_rank_that_fails_tells_the_others_and_runs_what_they_run(
    fail: Callable[..., None],
    num_exchanges: int,
    server: BudgetedServer,
    forward: FakeForward,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store_two_turns(server)
    others = OtherRanks(monkeypatch, READY, WENT_WELL)
    with monkeypatch.context() as patch:
        fail(server, forward, patch)
        with pytest.raises(RuntimeError, match="no memory"):
            measure(server, group=others)
    assert [failed for failed, *_ in others.mine] == [0.0] * (num_exchanges - 1) + [1.0]
    assert forward.num_calls == 2 * (num_exchanges - 1)
    assert server.store.stats().num_leases == 0


def test_an_error_in_attention_does_not_end_the_forward() -> None:
    """The model's collectives go on, in which other ranks wait."""
    attention = HistoryAttention(4, 2, raise_error, torch.device("cpu"), None)
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=4,
        tp_k_head_num=2,
        tp_v_head_num=2,
        qk_head_dim=8,
        v_head_dim=6,
        scaling=1.0,
    )
    output = attention.forward(torch.ones(2, 32), torch.ones(2, 16), torch.ones(2, 12), layer)
    assert torch.equal(output, torch.zeros(2, 24))
    assert str(attention.error) == "no memory"


def test_a_history_that_cannot_be_decoded_fails_the_probe(
    server: BudgetedServer, forward: FakeForward
) -> None:
    store_two_turns(server)
    forward.attention_error = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        measure(server)


def test_a_probe_moves_the_expected_damage_towards_the_truth(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES)
    server.store_turn()
    assert server.budget.as_dict()["damage_factor"] == 1.0
    # Beside four histories that cost what was expected, one that cost six times as much.
    server.prober.outcome = ProbeOutcome(kl=0.06, noted=0.01)
    server.budget.probe(server.path)
    said = server.budget.as_dict()
    assert said["damage_factor"] == pytest.approx((4 * 1.0 + 6.0) / 5)
    assert (said["probes"], said["last_kl"], said["last_expected"]) == (1, 0.06, 0.01)


def test_probes_of_one_conversation_end_at_the_truth(server: BudgetedServer) -> None:
    """Its segments were noted before the first probe, and are compared as they would be expected now."""
    server.compute(FIRST_PAGES)
    server.store_turn()
    server.prober.outcome = ProbeOutcome(kl=0.05, noted=0.01)
    factors = []
    for _ in range(40):
        server.budget.probe(server.path)
        factors.append(server.budget.as_dict()["damage_factor"])
    assert factors == sorted(factors)
    assert factors[-1] == pytest.approx(5.0, rel=1e-3)
    assert server.budget.as_dict()["last_expected"] == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(("kl", "bound"), [(100.0, 8.0), (1e-9, 1.0)])
def test_the_correction_is_bounded(server: BudgetedServer, kl: float, bound: float) -> None:
    server.compute(FIRST_PAGES)
    server.store_turn()
    correct(server, kl / 0.01)
    assert server.budget.as_dict()["damage_factor"] == pytest.approx(bound)


def correct(server: BudgetedServer, ratio: float) -> None:
    """Probe until damage is taken for ``ratio`` times what was noted, if that is within the bounds."""
    server.prober.outcome = ProbeOutcome(kl=0.01 * ratio, noted=0.01)
    for _ in range(60):
        server.budget.probe(server.path)


def test_turns_are_stored_with_the_corrected_expectation(server: BudgetedServer) -> None:
    """Errors that cost eight times as much must be smaller, which takes more bytes."""
    server.compute(MORE_PAGES)
    server.store_turn()
    num_bytes = server.store.stats().stored_bytes
    server.store.clear()
    correct(server, 8.0)
    said = server.store_turn()
    assert said["last_damage"] == pytest.approx(0.9 * LIMIT, rel=0.06)
    assert server.store.stats().stored_bytes > 1.2 * num_bytes


@pytest.mark.parametrize("is_decoded", [True, False], ids=["came back", "on the device"])
def test_older_segments_cost_what_they_would_be_expected_to_cost_now(
    server: BudgetedServer, is_decoded: bool
) -> None:
    server.compute(FIRST_PAGES + MORE_PAGES)
    before = server.store_turn()["last_damage"]
    if is_decoded:
        server.leave_and_return()
    correct(server, 1.1)
    server.compute(FIRST_PAGES)
    share = (FIRST_PAGES + MORE_PAGES) / (2 * FIRST_PAGES + MORE_PAGES)
    said = server.store_turn()
    assert said["last_spent"] == pytest.approx(1.1 * before * share, rel=1e-3)
    assert said["last_damage"] == pytest.approx(0.9 * (LIMIT - said["last_spent"]), rel=0.06)


def test_new_tokens_of_a_conversation_that_cost_more_than_was_noted_may_lose_their_share(
    server: BudgetedServer,
) -> None:
    server.compute(FIRST_PAGES + MORE_PAGES)
    server.store_turn()
    correct(server, 4.0)
    server.compute(FIRST_PAGES)
    said = server.store_turn()
    assert said["last_spent"] > LIMIT
    share = FIRST_PAGES / (2 * FIRST_PAGES + MORE_PAGES)
    assert said["last_damage"] == pytest.approx(0.9 * LIMIT * share, rel=0.06)


def test_a_conversation_without_an_outcome_teaches_nothing(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES)
    server.store_turn()
    server.budget.probe(server.path)
    said = server.budget.as_dict()
    assert (said["damage_factor"], said["probes"]) == (1.0, 0)


def test_a_probe_says_whether_the_kv_in_the_pool_is_exact(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES)
    server.store_turn()
    server.budget.probe(server.path)
    server.leave_and_return()
    server.budget.probe(server.path)
    assert [is_exact for _, is_exact in server.prober.asked] == [True, False]


def test_the_first_turn_and_then_a_share_of_them_is_probed() -> None:
    server = BudgetedServer(LIMIT, probe_share=0.25)
    probed = [turn for turn in range(1, 13) if server.budget.wants_probe()]
    assert probed == [1, 4, 8, 12]
    server.budget.stop_probes()
    assert not any(server.budget.wants_probe() for _ in range(9))
    server.close()


def test_other_weights_are_not_probed(server: BudgetedServer) -> None:
    server.budget.forget_model()
    assert not any(server.budget.wants_probe() for _ in range(3))
