from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.figures import draw_simulate
from benchmarks.simulate import summary, timeline
from benchmarks.simulate.__main__ import make_problem, winner
from benchmarks.simulate.codecs import decode_token_s, last_use, layer_token_bytes, make_codecs
from benchmarks.simulate.hardware import LLAMA3_70B, LLAMA_7B, PAPER_LINK, network
from benchmarks.simulate.pipeline import simulate
from krul_backend.planner.planners import make_planner
from krul_sglang.sizing import on_paper
from krul_sglang.sizing.on_paper import A100, H100, MATMUL_SHARE, PCIE4, restore_costs

CODECS = {codec.name: codec for codec in make_codecs(32)}


def test_models_have_their_published_sizes() -> None:
    # Without embeddings Llama-7B has 6.48 billion parameters, Llama-3-70B 68.5.
    assert 32 * LLAMA_7B.layer_parameters == pytest.approx(6.48e9, rel=0.01)
    assert 80 * LLAMA3_70B.layer_parameters == pytest.approx(68.5e9, rel=0.01)
    assert (LLAMA_7B.layer_token_bytes, LLAMA3_70B.layer_token_bytes) == (16384, 4096)


def test_costs_are_operations_and_bytes_over_the_assumed_rates() -> None:
    costs = restore_costs(A100, PCIE4, LLAMA_7B)
    assert costs.head.token_s == pytest.approx(2 * 202.4e6 / (MATMUL_SHARE * 312e12), rel=1e-3)
    assert costs.tiers[PCIE4.name].byte_s == pytest.approx(1 / 25.6e9)
    assert costs.head == costs.own


def test_gpus_have_links_of_their_own_but_share_a_network_card() -> None:
    assert restore_costs(A100, PCIE4, LLAMA3_70B).tiers[PCIE4.name].byte_s == pytest.approx(1 / (4 * 25.6e9))
    card = network(100)
    assert restore_costs(A100, card, LLAMA3_70B).tiers[card.name].byte_s == pytest.approx(1 / 11.25e9)


def test_the_papers_link_loads_all_in_two_thirds_of_computing_all() -> None:
    costs = restore_costs(A100, PAPER_LINK, LLAMA_7B)
    load_s = costs.tiers[PAPER_LINK.name].byte_s * LLAMA_7B.layer_token_bytes
    assert load_s == pytest.approx(costs.head.token_s * 2 / 3)


def test_both_kinds_of_pairs_have_the_same_bytes_at_other_layers() -> None:
    minicache, krul = CODECS["minicache"], CODECS["krul"]
    assert minicache.pairs == tuple((layer, layer + 1) for layer in range(16, 32, 2))
    assert krul.pairs == tuple((layer, layer + 1) for layer in range(8, 24, 2))
    sizes = layer_token_bytes(krul, LLAMA_7B)
    assert sum(sizes) == pytest.approx(sum(layer_token_bytes(minicache, LLAMA_7B)))
    # A layer saved by each of 8 pairs, less what norms and retained tokens take.
    assert 24 / 32 < sum(sizes) / (32 * LLAMA_7B.layer_token_bytes) < 0.8
    assert last_use(krul, 32)[8:10] == (9, 9)
    assert layer_token_bytes(CODECS["native"], LLAMA_7B) == (16384.0,) * 32


def test_only_coded_layers_are_decoded() -> None:
    assert not any(decode_token_s(CODECS["native"], LLAMA_7B, A100))
    pairs = decode_token_s(CODECS["krul"], LLAMA_7B, A100)
    assert [layer for layer in range(32) if pairs[layer] > 0] == list(range(8, 24))
    assert all(decode_token_s(CODECS["krul-int4"], LLAMA_7B, A100))


def test_a_full_load_takes_what_its_bytes_take() -> None:
    problem = make_problem(A100, PCIE4, LLAMA_7B, CODECS["native"], 4096, 128)
    pipeline = simulate(problem, make_planner("full-load").plan(problem).head_ends)
    assert pipeline.bytes_loaded == 32 * 16384 * 4096
    assert pipeline.load_s == pytest.approx(32 * (2e-5 + 16384 * 4096 / 25.6e9))


@pytest.mark.parametrize(
    ("recompute_s", "load_s", "planned_s", "expected"),
    [
        (5.0, 2.0, 1.0, "both"),
        (5.0, 2.0, 1.99, "load"),
        (2.0, 5.0, 2.0, "recompute"),
        (2.0, 5.0, 1.9, "both"),
    ],
)
def test_the_winner_is_clear(recompute_s: float, load_s: float, planned_s: float, expected: str) -> None:
    assert winner({"full-recompute": recompute_s, "full-load": load_s, "local-search": planned_s}) == expected


COUNTED = [
    {
        "shape": "s",
        "num_layers": 32,
        "operation": f"restore {kept}",
        "tokens": tokens,
        "launches": 32 * n,
        "syncs": n,
    }
    for kept, n in (("native", 4), ("subspace", 8))
    for tokens in (100, 1000)
]


def test_a_timeline_adds_counted_launches_to_copies() -> None:
    steps = timeline.count_steps(COUNTED, "s")
    assert steps.layer_s == pytest.approx(4 * timeline.LAUNCH_S + timeline.WAIT_S / 8)
    assert steps.group_s == pytest.approx(2 * (8 * timeline.LAUNCH_S + timeline.WAIT_S / 4))
    model = timeline.MODELS["Llama-3-8B"]
    found = timeline.predict(model, PCIE4, steps, 8192, 128)
    costs = restore_costs(H100, PCIE4, model)
    assert found["recompute"] == pytest.approx(32 * costs.own.layer_s(8192 + 128, 0))
    # Loading is slower than the forward of the new tokens, whose last layer comes after it.
    copy_s = PCIE4.latency_s + steps.layer_s + 8192 * 4096 / PCIE4.bytes_s
    write_s = 2 * 8192 * 4096 / (0.7 * H100.hbm_bytes_s)
    assert found["native, full-load"] == pytest.approx(32 * (copy_s + write_s) + costs.own.layer_s(128, 8192))


def test_a_timeline_gets_longer_with_launches_and_tokens_and_shorter_by_plans() -> None:
    model = timeline.MODELS["Llama-3-70B, TP 8"]
    few, many = on_paper.Steps(2e-5, 4e-5), on_paper.Steps(1e-3, 1e-3)
    at = {
        (steps.layer_s, tokens): timeline.predict(model, PCIE4, steps, tokens, 128)
        for steps in (few, many)
        for tokens in (1024, 32_768)
    }
    for kept in ("native", "bases"):
        whole = f"{kept}, {timeline.WHOLE}"
        assert at[few.layer_s, 1024][whole] < at[many.layer_s, 1024][whole]
        assert at[few.layer_s, 1024][whole] < at[few.layer_s, 32_768][whole]
        assert all(each[f"{kept}, {timeline.PLANNED}"] <= each[whole] for each in at.values())
    long = at[few.layer_s, 32_768]
    assert long["bases, full-load"] < long["native, full-load"] < long["recompute"]


def test_a_timeline_says_that_it_was_computed() -> None:
    rows = [{**row, "shape": shape} for shape in timeline.MODELS for row in COUNTED]
    shown = timeline.timeline_table({"rows": rows}, None)
    assert "Computed, never measured" in shown
    assert shown.count("| Llama-3-8B |") == len(timeline.LINKS) * len(timeline.HISTORY_TOKENS)


def test_the_figure_has_a_panel_per_model_and_codec(tmp_path: Path) -> None:
    panels = [
        {
            "hardware": "A100",
            "model": model,
            "codec": "native",
            "rates_gb_s": [1, 2],
            "history_tokens": [1024],
            "winner": [["both", "load"]],
            "gain": [[1.5, 1.0]],
        }
        for model in ("one", "two")
    ]
    draw_simulate({"map": panels}, tmp_path / "figures" / "map.png")
    assert (tmp_path / "figures" / "map.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_says_how_far_plans_are_behind_the_oracle() -> None:
    row = {
        "hardware": A100.name,
        "codec": "krul",
        "model": LLAMA_7B.name,
        "method": "planned",
        "winner": "both",
        "ideal_s": 1.0,
        "oracle_bound_s": 1.0,
        "plan_s": 0.002,
        "oracle_plan_s": 0.001,
    }
    oracle = summary.against_oracle(
        [{**row, "end_s": end_s, "oracle_end_s": 1.0, "history_tokens": 1} for end_s in (1.0, 1.0, 1.5)]
    )
    assert oracle["settings"] == 3
    assert oracle["end_over_oracle_end"] == {"median": 1.0, "p90": 1.4, "p99": 1.49, "max": 1.5}
    assert oracle["planning"]["plan_ms"]["median"] == 2.0
    assert oracle["planning"]["plan_over_oracle_plan"]["max"] == 2.0
