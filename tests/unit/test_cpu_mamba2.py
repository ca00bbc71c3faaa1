"""The CPU platform's Mamba-2 recurrence computes what transformers defines, whole and token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from krul_sglang.adapter.platforms import cpu_mamba2
from krul_sglang.adapter.platforms.cpu_convolution import convolve_next, convolve_prompts
from tests.unit.test_cpu_delta_rule import CUTS, HIDDEN, SLOTS, check_cut_and_decoded

HEADS, GROUPS, P, N, CHUNK = 4, 2, 6, 8, 64
WIDTHS = (HEADS * P, GROUPS * N, GROUPS * N)
"""Of a token's x, B and C."""


@pytest.fixture
def layer() -> Any:
    config = NemotronHConfig(
        hidden_size=HIDDEN,
        hybrid_override_pattern="M",
        mamba_num_heads=HEADS,
        mamba_head_dim=P,
        mamba_n_groups=GROUPS,
        ssm_state_size=N,
        chunk_size=CHUNK,
        # The fields of a step that is too short to matter.
        time_step_min=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = NemotronHMamba2Mixer(config, 0)
        for weight in (layer.norm.weight, layer.dt_bias, layer.D):
            torch.nn.init.normal_(weight)
    with torch.no_grad():
        layer.A_log.copy_(torch.linspace(-6, 1, HEADS))
    return layer


class Rig:
    """A layer's states, those of earlier owners in all slots but 2 and 4, and the layer as SGLang runs it."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.conv_args = layer.conv1d.weight[:, 0], layer.conv1d.bias
        self.of_heads = {"D": layer.D, "dt_bias": layer.dt_bias}
        self.rates = -layer.A_log.exp()
        generator = torch.Generator().manual_seed(2)
        self.conv = torch.randn(SLOTS, sum(WIDTHS), layer.conv_kernel_size - 1, generator=generator)
        self.recurrent = torch.randn(SLOTS, HEADS, P, N, generator=generator)

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A gate, what is convolved, and a step for each token."""
        return self.layer.in_proj(hidden).split([HEADS * P, sum(WIDTHS), HEADS], dim=-1)  # type: ignore[no-any-return]

    def finish(self, core: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.layer.out_proj(self.layer.norm(core.flatten(1), gate))  # type: ignore[no-any-return]

    def extend(self, hidden: list[torch.Tensor], slots: list[int], are_resumed: list[bool]) -> torch.Tensor:
        gate, mixed, dt = self.project(torch.cat(hidden))
        starts = torch.tensor([0, *(len(x) for x in hidden)]).cumsum(0)
        resumed = torch.tensor(are_resumed)
        mixed = convolve_prompts(
            mixed.T,
            *self.conv_args,
            conv_states=self.conv,
            query_start_loc=starts,
            seq_lens_cpu=[],
            cache_indices=torch.tensor(slots),
            has_initial_state=resumed,
            activation="silu",
        ).T
        before = torch.where(resumed[:, None, None, None], self.recurrent[slots], 0)
        core = torch.full((1, len(mixed), HEADS, P), torch.nan)
        _, self.recurrent[slots], _ = cpu_mamba2.scan_prompts(
            *_inputs(mixed, dt, self.rates),
            chunk_size=CHUNK,
            cu_seqlens=starts,
            initial_states=before if any(are_resumed) else None,
            track_end_locs=None,
            out=core,
            **self.of_heads,
        )
        return self.finish(core[0], gate)

    def decode(self, hidden: torch.Tensor, slots: list[int]) -> torch.Tensor:
        gate, mixed, dt = self.project(hidden)
        indices = torch.tensor(slots, dtype=torch.int32)
        mixed = convolve_next(mixed, self.conv, *self.conv_args, "silu", conv_state_indices=indices)
        x, dt, rates, b, c = _inputs(mixed, dt, self.rates)
        core = torch.full((len(hidden), HEADS, P), torch.nan)
        cpu_mamba2.scan_next(
            self.recurrent,
            x[0],
            dt[0, :, :, None].expand(-1, -1, P),
            rates[:, None, None].expand(-1, P, N),
            b[0],
            c[0],
            z=None,
            dt_softplus=True,
            state_batch_indices=indices,
            out=core,
            **{name: value[:, None].expand(-1, P) for name, value in self.of_heads.items()},  # type: ignore[arg-type]
        )
        return self.finish(core, gate)


def _inputs(mixed: torch.Tensor, dt: torch.Tensor, rates: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x, dt, A, B and C as SGLang hands them over."""
    x, b, c = mixed.split(WIDTHS, dim=-1)
    b, c = (each.unflatten(1, (GROUPS, N))[None] for each in (b, c))
    return x.unflatten(1, (HEADS, P))[None], dt[None], rates, b, c


@pytest.mark.parametrize("cut", CUTS)
def test_prompts_that_are_cut_and_decoded_equal_transformers(layer: Any, cut: int) -> None:
    check_cut_and_decoded(Rig(layer), cut)


@torch.no_grad()
def test_states_within_prompts_are_those_of_shorter_prompts() -> None:
    """Before each 64 tokens of the batch, and where they are asked for."""
    generator = torch.Generator().manual_seed(4)
    lengths = (100, 110)
    mixed = torch.randn(sum(lengths), sum(WIDTHS), generator=generator)
    dt = torch.randn(sum(lengths), HEADS, generator=generator)
    before = torch.randn(2, HEADS, P, N, generator=generator)
    of_heads = torch.rand(3, HEADS, generator=generator)

    def scan(*parts: range, tracked: tuple[int, ...] = ()) -> tuple[torch.Tensor, ...]:
        tokens = [token for part in parts for token in part]
        x, step, rates, b, c = _inputs(mixed[tokens], dt[tokens], -of_heads[0])
        within, after, of_tracked = cpu_mamba2.scan_prompts(
            x,
            step,
            rates,
            b,
            c,
            chunk_size=CHUNK,
            D=of_heads[1],
            dt_bias=of_heads[2],
            cu_seqlens=torch.tensor([0, *map(len, parts)]).cumsum(0),
            initial_states=before[[part.start // 100 for part in parts]],
            track_end_locs=torch.tensor(tracked),
            out=torch.empty_like(x),
        )
        return within[0], after, after if of_tracked is None else of_tracked[0]

    within, after, of_tracked = scan(range(100), range(100, 210), tracked=(100, 164, 90))
    assert torch.equal(within[0], before[0])
    assert torch.equal(of_tracked[0], before[1])
    alone = [scan(range(64)), scan(range(100, 128)), scan(range(100, 192)), scan(range(100, 164))]
    for found, expected in zip([*within[1:], of_tracked[1]], alone, strict=True):
        torch.testing.assert_close(found, expected[1][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(of_tracked[2], scan(range(90))[1][0], rtol=1e-4, atol=1e-5)
    apart = torch.cat([scan(range(100))[1], scan(range(100, 210))[1]])
    torch.testing.assert_close(after, apart, rtol=1e-4, atol=1e-5)
