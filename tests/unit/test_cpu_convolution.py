"""The CPU platform's convolutions compute what transformers defines, in one piece and token by token."""

from __future__ import annotations

import pytest
import torch
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from krul_sglang.adapter.platforms.cpu_convolution import PAD_SLOT, convolve_next, convolve_prompts

HIDDEN, WIDTH, SLOTS = 8, 3, 6


@pytest.fixture
def module() -> Lfm2ShortConv:
    config = Lfm2Config(
        hidden_size=HIDDEN,
        conv_L_cache=WIDTH,
        conv_bias=True,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Lfm2ShortConv(config, 0)


def weight_of(module: Lfm2ShortConv) -> tuple[torch.Tensor, torch.Tensor]:
    return module.conv.weight[:, 0], module.conv.bias


def gated(module: Lfm2ShortConv, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is convolved, and what its result is multiplied with: ``[T, HIDDEN]`` each."""
    b, c, x = module.in_proj(hidden).chunk(3, dim=-1)
    return b * x, c


@torch.no_grad()
@pytest.mark.parametrize("cut", [0, 1, 2, 5, 9])
def test_prompts_that_are_cut_and_decoded_equal_transformers(module: Lfm2ShortConv, cut: int) -> None:
    """Two requests and a row of padding. After ``cut`` of its nine tokens the first request is a new batch,
    whose state is what the first batch left; the last two tokens of both are decoded."""
    generator = torch.Generator().manual_seed(1)
    hidden = [torch.randn(length, HIDDEN, generator=generator) for length in (11, 3)]
    # Of earlier owners.
    states = torch.randn(SLOTS, HIDDEN, WIDTH - 1, generator=generator)
    untouched = states[[0, 1, 3, 5]].clone()
    inputs, gates = zip(*(gated(module, of_request) for of_request in hidden), strict=True)
    parts: list[torch.Tensor] = []
    for num_requests, first, end in ((2, 0, cut), (1, cut, 9)):
        x = torch.cat([inputs[0][first:end], inputs[1][: num_requests - 1]]).T.contiguous()
        parts.append(
            convolve_prompts(
                x,
                *weight_of(module),
                conv_states=states,
                query_start_loc=torch.tensor([0, end - first, end - first + 1][: num_requests + 1]),
                seq_lens_cpu=[],
                cache_indices=torch.tensor([2, 4][:num_requests]),
                has_initial_state=torch.tensor([first > 0, False][:num_requests]),
                activation=None,
            )
        )
    of_first = [parts[0][:, :cut], parts[1]]
    of_second = [parts[0][:, cut:]]
    for step in range(2):
        x = torch.stack([inputs[0][9 + step], torch.zeros(HIDDEN), inputs[1][1 + step]])
        slots = torch.tensor([2, PAD_SLOT, 4])
        output = convolve_next(x, states, *weight_of(module), conv_state_indices=slots)
        of_first.append(output[0][:, None])
        of_second.append(output[2][:, None])
    for convolved, gate, of_request in zip((of_first, of_second), gates, hidden, strict=True):
        actual = module.out_proj(gate * torch.cat(convolved, dim=1).T)
        torch.testing.assert_close(actual, module(of_request[None])[0])
    assert torch.equal(states[[0, 1, 3, 5]], untouched)


def test_an_activation_is_applied() -> None:
    x = torch.tensor([[1.0, -2.0]])
    output = convolve_prompts(
        x, torch.tensor([[0.0, 1.0]]), None, torch.zeros(1, 1, 1), torch.tensor([0, 2]), [], torch.tensor([0])
    )
    torch.testing.assert_close(output, torch.nn.functional.silu(x))
