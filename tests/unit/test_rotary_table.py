from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from krul_backend.codec.rotary import RotaryTable

SCALINGS = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    },
}


def random_vectors(num_tokens: int, num_heads: int, head_dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, num_heads, head_dim, generator=torch.Generator().manual_seed(seed))


def table_from_angles(angles: torch.Tensor, factor: float, is_neox: bool) -> RotaryTable:
    return RotaryTable((angles.cos() * factor).float(), (angles.sin() * factor).float(), is_neox)


def small_table(rotary_dim: int, is_neox: bool, factor: float = 1.0) -> RotaryTable:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    return table_from_angles(torch.arange(512, dtype=torch.float64).outer(frequencies), factor, is_neox)


@pytest.mark.parametrize("name", SCALINGS)
def test_rotation_equals_hugging_face_in_float64(name: str) -> None:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        head_dim=128,
        max_position_embeddings=16384,
        rope_parameters=SCALINGS[name],
    )
    embedding = LlamaRotaryEmbedding(config)
    factor = float(embedding.attention_scaling)
    assert (factor != 1.0) == (name == "yarn")
    angles = torch.arange(16384, dtype=torch.float64).outer(embedding.inv_freq.double())
    table = table_from_angles(angles, factor, is_neox=True)
    positions = torch.tensor([0, 1, 5, 4095, 4096, 9000, 16383])
    k = random_vectors(len(positions), 2, 128)

    both = torch.cat([angles, angles], dim=-1)[positions]
    expected, _ = apply_rotary_pos_emb(
        k.double()[None],
        k.double()[None],
        both.cos()[None] * factor,
        both.sin()[None] * factor,
        unsqueeze_dim=2,
    )
    torch.testing.assert_close(table.rotate(k, positions).double(), expected[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(table.unrotate(expected[0].float(), positions), k, rtol=0, atol=2e-6)
    # Keys that are turned to other positions are those that would have been computed there.
    for to in (positions.flip(0), (positions + 4000) % 16384, positions):
        torch.testing.assert_close(
            table.move(table.rotate(k, positions), positions, to), table.rotate(k, to), rtol=0, atol=1e-5
        )


@settings(max_examples=40)
@given(
    is_neox=st.booleans(),
    rotary_dim=st.sampled_from([2, 32, 64]),
    num_other=st.sampled_from([0, 1, 32]),
    factor=st.sampled_from([1.0, 1.3, 0.7]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_unrotate_is_the_inverse_and_leaves_other_channels(
    is_neox: bool, rotary_dim: int, num_other: int, factor: float, dtype: torch.dtype, seed: int
) -> None:
    table = small_table(rotary_dim, is_neox, factor)
    x = random_vectors(9, 3, rotary_dim + num_other, seed).to(dtype)
    positions = torch.randint(0, 512, (9,), generator=torch.Generator().manual_seed(seed))
    rotated = table.rotate(x, positions)
    assert torch.equal(rotated[..., rotary_dim:], x[..., rotary_dim:].float())
    torch.testing.assert_close(
        rotated[..., :rotary_dim].norm(dim=-1), x[..., :rotary_dim].float().norm(dim=-1) * factor
    )
    torch.testing.assert_close(table.unrotate(rotated, positions), x.float(), rtol=0, atol=4e-6)
    to = positions.flip(0)
    torch.testing.assert_close(table.move(rotated, positions, to), table.rotate(x, to), rtol=0, atol=1e-5)


def test_interleaved_pairs_are_neighbours() -> None:
    neox, interleaved = small_table(8, is_neox=True), small_table(8, is_neox=False)
    x = random_vectors(5, 1, 8)
    positions = torch.arange(5) * 7
    from_neighbours = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    expected = neox.rotate(from_neighbours, positions)
    rotated = interleaved.rotate(x, positions)
    torch.testing.assert_close(torch.cat([rotated[..., 0::2], rotated[..., 1::2]], dim=-1), expected)
    assert not torch.allclose(rotated, neox.rotate(x, positions))


def test_positions_outside_the_table_and_broken_tables_are_refused() -> None:
    table = small_table(8, is_neox=True)
    assert (table.max_positions, table.rotary_dim) == (512, 8)
    with pytest.raises(IndexError):
        table.rotate(torch.zeros(1, 1, 8), torch.tensor([512]))
    with pytest.raises(ValueError, match="not one table"):
        RotaryTable(torch.zeros(4, 2), torch.zeros(4, 3), is_neox=True)
    with pytest.raises(ValueError, match="fp32"):
        RotaryTable(torch.zeros(4, 2).double(), torch.zeros(4, 2).double(), is_neox=True)
