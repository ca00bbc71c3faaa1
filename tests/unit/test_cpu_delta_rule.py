"""The CPU platform's gated delta rule computes what transformers defines, in one piece and token by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import KimiLinearConfig, Qwen3NextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearDeltaAttention,
    recurrent_kimi_delta_attention,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    Qwen3NextSparseMoeBlock,
    torch_recurrent_gated_delta_rule,
)

from krul_sglang.adapter.platforms import cpu_delta_rule
from krul_sglang.adapter.platforms.cpu_convolution import PAD_SLOT, convolve_next, convolve_prompts

HIDDEN, KEY_HEADS, HEADS, K, V, SLOTS = 16, 2, 4, 8, 6, 6
LENGTHS, CUTS = (150, 3), (0, 1, 64, 100, 147)
"""Of two requests, of which one has several chunks; and after how many tokens that one is cut."""


@pytest.fixture
def config() -> Any:
    return Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        moe_intermediate_size=HIDDEN,
        shared_expert_intermediate_size=HIDDEN,
        num_experts=2,
        num_experts_per_tok=2,
    )


class Rig:
    """A layer of Qwen3-Next as SGLang runs it, and its states: those of earlier owners in all slots but 2 and
    4."""

    key_heads, v_dim = KEY_HEADS, V

    def __init__(self, config: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = layer = self.make_layer(config)
            for name, weights in layer.named_parameters():
                if name.endswith(("norm.weight", "dt_bias")):
                    torch.nn.init.normal_(weights)
                elif name.endswith("A_log"):
                    weights.data.copy_(torch.linspace(-6, 1, HEADS).view_as(weights))
        self.gate = getattr(layer, "forget_gate", layer)
        self.weight = layer.conv1d.weight[:, 0]
        generator = torch.Generator().manual_seed(2)
        self.conv = torch.randn(SLOTS, len(self.weight), layer.conv_kernel_size - 1, generator=generator)
        self.recurrent = torch.randn(SLOTS, HEADS, self.v_dim, K, generator=generator)
        self.recurrent[[2, 4]] = 0

    def make_layer(self, config: Any) -> Any:
        return Qwen3NextGatedDeltaNet(config, 0)

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        projections = self.layer.in_proj_qkvz(hidden), self.layer.in_proj_ba(hidden)
        return cpu_delta_rule.split_projections(*projections, KEY_HEADS, HEADS, K, V)

    def finish(self, core: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """``[T, HEADS, V]`` each, to ``[T, HIDDEN]``."""
        norm = self.layer.norm
        rows = core.reshape(-1, self.v_dim), z.reshape(-1, self.v_dim)
        normed = cpu_delta_rule.normalize_gated(
            *rows, norm.weight, None, "silu", eps=norm.variance_epsilon, prenorm=False
        )
        output: torch.Tensor = self.layer.out_proj(normed.view(-1, HEADS * V))
        return output

    def apply_rule(
        self, qkv: tuple[torch.Tensor, ...], a: torch.Tensor, b: torch.Tensor, **options: Any
    ) -> Any:
        gates = cpu_delta_rule.compute_gates(self.layer.A_log, a, b, self.layer.dt_bias)
        return cpu_delta_rule.extend_prompts(*qkv, *gates, **options)[0]

    def extend(self, hidden: list[torch.Tensor], slots: list[int], are_resumed: list[bool]) -> torch.Tensor:
        qkv, z, b, a = self.project(torch.cat(hidden))
        starts = torch.tensor([0, *(len(x) for x in hidden)]).cumsum(0)
        indices = torch.tensor(slots)
        qkv = convolve_prompts(
            qkv.T,
            self.weight,
            None,
            conv_states=self.conv,
            query_start_loc=starts,
            seq_lens_cpu=[],
            cache_indices=indices,
            has_initial_state=torch.tensor(are_resumed),
            activation="silu",
        ).T
        q, k, v = qkv.split([self.key_heads * K, self.key_heads * K, HEADS * self.v_dim], dim=-1)
        core = self.apply_rule(
            tuple(x.unflatten(1, (-1, dim))[None] for x, dim in ((q, K), (k, K), (v, self.v_dim))),
            a,
            b,
            initial_state=self.recurrent,
            initial_state_indices=indices,
            cu_seqlens=starts,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
        )
        return self.finish(core[0], z)

    def decode(self, hidden: torch.Tensor, slots: list[int]) -> torch.Tensor:
        qkv, z, b, a = self.project(hidden)
        indices = torch.tensor(slots, dtype=torch.int32)
        qkv = convolve_next(qkv, self.conv, self.weight, None, "silu", conv_state_indices=indices)
        core = torch.full((len(hidden), 1, HEADS, self.v_dim), torch.nan)
        cpu_delta_rule.decode_next(
            qkv,
            a,
            b,
            A_log=self.gate.A_log.view(-1),
            dt_bias=self.gate.dt_bias,
            scale=K**-0.5,
            initial_state=self.recurrent,
            out=core,
            ssm_state_indices=indices,
            use_qk_l2norm_in_kernel=True,
        )
        return self.finish(core[:, 0], z)

    def verify(
        self, hidden: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, tree: Any
    ) -> torch.Tensor:
        """Outputs of drafted tokens ``[batch, n, HIDDEN]``; then the states after ``accepted`` are kept."""
        batch, num_drafted, _ = hidden.shape
        qkv, z, b, a = self.project(hidden.flatten(0, 1))
        caches = SimpleNamespace(
            conv=[self.conv[None]],
            temporal=self.recurrent[None],
            intermediate_conv_window=[torch.zeros(1, SLOTS, num_drafted, *self.conv.shape[1:])],
            intermediate_ssm=torch.zeros(1, SLOTS, num_drafted, HEADS, V, K),
        )
        rows = torch.arange(SLOTS)
        if tree is not None:
            links = [torch.tensor(link).expand(batch, -1) for link in tree]
            names = ("retrieve_next_token", "retrieve_next_sibling")
            tree = dict(zip(names, links, strict=True)) | {
                "retrieve_parent_token": torch.empty_like(links[0])
            }
        qkv = convolve_next(
            qkv.view(batch, num_drafted, -1).transpose(1, 2),
            self.conv,
            self.weight,
            None,
            "silu",
            conv_state_indices=slots,
            intermediate_conv_window=caches.intermediate_conv_window[0][0],
            intermediate_state_indices=rows[:batch],
            **(tree or {}),
        )
        qkv = qkv.transpose(1, 2).view(batch * num_drafted, -1)
        q, k, v = qkv.split([KEY_HEADS * K, KEY_HEADS * K, HEADS * V], dim=-1)
        q, k, v = (x.unflatten(1, (-1, dim))[None] for x, dim in ((q, K), (k, K), (v, V)))
        core = cpu_delta_rule.verify_drafts(
            A_log=self.layer.A_log,
            dt_bias=self.layer.dt_bias,
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            initial_state_source=self.recurrent,
            initial_state_indices=slots,
            cu_seqlens=torch.arange(batch + 1) * num_drafted,
            intermediate_states_buffer=caches.intermediate_ssm[0],
            intermediate_state_indices=rows,
            retrieve_parent_token=None if tree is None else tree["retrieve_parent_token"],
        )
        cpu_delta_rule.commit_drafts(caches, slots, accepted, None, None)
        return self.finish(core[0], z).view(batch, num_drafted, HIDDEN)


class KimiRig(Rig):
    """As ``Rig``, of Kimi-Linear."""

    key_heads, v_dim = HEADS, K

    def make_layer(self, config: Any) -> Any:
        rule = {"num_heads": HEADS, "head_dim": K, "kda_layers": [1], "full_attn_layers": []}
        kimi = KimiLinearConfig(hidden_size=HIDDEN, num_hidden_layers=1, linear_attn_config=rule)
        return KimiLinearDeltaAttention(kimi, 0)

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layer, gate = self.layer, self.gate
        qkv = torch.cat([layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)], dim=-1)
        return (
            qkv,
            layer.g_b_proj(layer.g_a_proj(hidden)),
            layer.b_proj(hidden),
            gate.f_b_proj(gate.f_a_proj(hidden)),
        )

    def finish(self, core: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        norm = self.layer.o_norm
        normed = cpu_delta_rule.normalize_gated(
            core, z.view_as(core), norm.weight, None, "sigmoid", eps=norm.variance_epsilon
        )
        output: torch.Tensor = self.layer.o_proj(normed.flatten(1))
        return output

    def apply_rule(
        self, qkv: tuple[torch.Tensor, ...], a: torch.Tensor, b: torch.Tensor, **options: Any
    ) -> Any:
        track = {"output_intermediate_states": False, "track_state": None, "track_chunk_idx": None}
        return cpu_delta_rule.extend_kda_prompts(
            *qkv,
            a.view(1, -1, HEADS, K),
            b[None],
            A_log=self.gate.A_log,
            dt_bias=self.gate.dt_bias,
            lower_bound=None,
            beta_is_raw=True,
            **track,
            **options,
        )


@torch.no_grad()
def check_cut_and_decoded(rig: Any, cut: int) -> None:
    """Compare what a rig computes with its layer: of two requests and a row of padding.

    After ``cut`` of its tokens the first request is a new batch, whose state is what the first batch left.
    The last two tokens of both are decoded.
    """
    generator = torch.Generator().manual_seed(1)
    hidden = [torch.randn(length, HIDDEN, generator=generator) for length in LENGTHS]
    untouched = [states[[0, 1, 3, 5]].clone() for states in (rig.conv, rig.recurrent)]
    together = rig.extend([hidden[0][:cut], hidden[1][:1]], [2, 4], [False, False])
    of_first = [together[:cut], rig.extend([hidden[0][cut:148]], [2], [cut > 0])]
    of_second = [together[cut:]]
    for step in range(2):
        rows = torch.stack([hidden[0][148 + step], torch.zeros(HIDDEN), hidden[1][1 + step]])
        output = rig.decode(rows, [2, PAD_SLOT, 4])
        of_first.append(output[:1])
        of_second.append(output[2:])
    for found, of_request in zip((of_first, of_second), hidden, strict=True):
        expected = rig.layer(of_request[None])[0]
        torch.testing.assert_close(torch.cat(found), expected.view(len(of_request), -1), rtol=1e-4, atol=1e-5)
    for states, before in zip((rig.conv, rig.recurrent), untouched, strict=True):
        assert torch.equal(states[[0, 1, 3, 5]], before)


@pytest.mark.parametrize("make_rig", [Rig, KimiRig])
@pytest.mark.parametrize("cut", CUTS)
def test_prompts_that_are_cut_and_decoded_equal_transformers(
    config: Any, make_rig: type[Rig], cut: int
) -> None:
    check_cut_and_decoded(make_rig(config), cut)


@torch.no_grad()
@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        (None, [[0, 1, 2, 3, 4]]),
        # First children, and next siblings.
        (([1, 3, 4, -1, -1], [-1, 2, -1, -1, -1]), [[0, 1, 3], [0, 2, 4]]),
    ],
    ids=["chain", "tree"],
)
def test_drafts_are_computed_along_their_paths(config: Any, tree: Any, paths: list[list[int]]) -> None:
    """Of two requests, which accept other tokens; what is not accepted leaves nothing."""
    prompts, drafts = torch.randn(2, 7, HIDDEN), torch.randn(2, 5, HIDDEN)
    rig, slots = Rig(config), [2, 4]
    rig.extend(list(prompts), slots, [False, False])
    accepted = [paths[-1][1], paths[0][-1]]
    outputs = rig.verify(drafts, torch.tensor(slots), torch.tensor(accepted), tree)
    for path in paths:
        for request, slot in enumerate(slots):
            along = Rig(config)
            along.extend([prompts[request]], [slot], [False])
            for token in path:
                found = along.decode(drafts[request, token][None], [slot])[0]
                torch.testing.assert_close(outputs[request, token], found, rtol=1e-4, atol=1e-5)
                if token == accepted[request]:
                    for states, expected in ((rig.conv, along.conv), (rig.recurrent, along.recurrent)):
                        torch.testing.assert_close(states[slot], expected[slot], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("channels", "one_by_one"), [(1, torch_recurrent_gated_delta_rule), (K, recurrent_kimi_delta_attention)]
)
def test_a_chunk_equals_its_tokens_one_by_one(channels: int, one_by_one: Any) -> None:
    """From a state that is not zero, with decays that would overflow where they are masked."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(HEADS, 64, dim, generator=generator) for dim in (K, K, V))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    rates = torch.tensor([0.01, 0.1, 1, 10])[:, None, None]
    log_decay = -torch.rand(HEADS, 64, channels, generator=generator) * rates
    beta = torch.rand(HEADS, 64, generator=generator)
    state = torch.randn(HEADS, V, K, generator=generator)
    output, after = cpu_delta_rule.delta_rule(state, q * K**-0.5, k, v, log_decay, beta)
    if channels == 1:
        log_decay = log_decay[..., 0]
    inputs = (x.transpose(0, 1)[None] for x in (q, k, v, log_decay, beta))
    expected, expected_state = one_by_one(*inputs, initial_state=state.mT[None], output_final_state=True)
    torch.testing.assert_close(output.transpose(0, 1), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.mT, expected_state[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_states_within_prompts_are_those_of_shorter_prompts() -> None:
    """Before each 64 tokens of a request, whatever lies before it in the batch."""
    generator = torch.Generator().manual_seed(4)
    num_tokens = sum(LENGTHS)
    q, k, v = (torch.randn(1, num_tokens, n, d, generator=generator) for n, d in ((2, K), (2, K), (HEADS, V)))
    g, beta = (torch.rand(1, num_tokens, HEADS, generator=generator) for _ in range(2))
    before = torch.randn(SLOTS, HEADS, V, K, generator=generator)

    def extend(*parts: range) -> tuple[torch.Tensor, torch.Tensor]:
        states = before.clone()
        tokens = [token for part in parts for token in part]
        starts = torch.tensor([0, *map(len, parts)]).cumsum(0)
        slots = torch.tensor([2, 4][: len(parts)])
        inputs = (x[:, tokens] for x in (q, k, v, -g, beta))
        _, _, within = cpu_delta_rule.extend_prompts(
            *inputs, initial_state=states, initial_state_indices=slots, cu_seqlens=starts
        )
        return states, within

    _, within = extend(range(LENGTHS[0]), range(LENGTHS[0], num_tokens))
    assert within.shape == (1, 3 + 1, HEADS, V, K)
    assert torch.equal(within[0, [0, 3]], before[[2, 4]])
    for chunk in (1, 2):
        torch.testing.assert_close(within[0, chunk], extend(range(64 * chunk))[0][2])


@torch.no_grad()
def test_kda_returns_the_states_that_sglang_keeps_of_prompts() -> None:
    """Of each request the state before one of its chunks, or none."""
    generator = torch.Generator().manual_seed(5)
    q, k, v, g = torch.randn(4, 1, sum(LENGTHS), HEADS, K, generator=generator)
    track = torch.full((2, HEADS, K, K), torch.nan)
    _, states = cpu_delta_rule.extend_kda_prompts(
        *(q, k, v, g, torch.randn(1, sum(LENGTHS), HEADS, generator=generator)),
        A_log=torch.linspace(-6, 1, HEADS).view(1, 1, HEADS, 1),
        dt_bias=torch.zeros(HEADS * K),
        lower_bound=None,
        beta_is_raw=True,
        output_intermediate_states=True,
        track_state=track,
        track_chunk_idx=torch.tensor([-1, 1], dtype=torch.int32),
        initial_state=torch.randn(SLOTS, HEADS, K, K, generator=generator),
        initial_state_indices=torch.tensor([2, 4]),
        cu_seqlens=torch.tensor([0, LENGTHS[1], sum(LENGTHS)]),
    )
    assert track[0].isnan().all()
    assert torch.equal(track[1], states[0, 2])


@pytest.mark.parametrize("num_layers", [None, 3])
def test_snapshots_are_of_the_requests_in_the_mask(num_layers: int | None) -> None:
    layers = () if num_layers is None else (num_layers,)
    conv, recurrent = torch.randn(*layers, SLOTS, 5, 3), torch.randn(*layers, SLOTS, HEADS, V, K)
    befores = [conv.clone(), recurrent.clone()]
    mask, sources, targets = (
        torch.tensor([True, False, True]),
        torch.tensor([1, 2, 3]),
        torch.tensor([4, 0, 5]),
    )
    cpu_delta_rule.snapshot_states(conv, recurrent, sources, mask, targets, 3)
    at = [0, 1, 2, 3, 1, 3]
    for now, before in zip((conv, recurrent), befores, strict=True):
        assert torch.equal(now, before[at] if num_layers is None else before[:, at])


@torch.no_grad()
def test_the_shared_expert_is_added_as_by_transformers(config: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = Qwen3NextSparseMoeBlock(config)
        for weight in block.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        hidden = torch.randn(5, HIDDEN)
    shared = block.shared_expert(hidden)
    with_all = block(hidden[None])[0]
    block.shared_expert.down_proj.weight.zero_()
    output = block(hidden[None])[0]
    cpu_delta_rule.add_shared_expert(hidden, block.shared_expert_gate.weight[0], shared, output)
    torch.testing.assert_close(output, with_all)
