"""The vectors that a basis is multiplied with, in compiled loops and by torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.layout import LayerKV
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace import vectors as vectors_module
from krul_backend.codec.subspace.bases import group_vectors
from krul_backend.codec.subspace.vectors import TokenRows, put_vectors


@settings(max_examples=60)
@given(st.data())
def test_vectors_are_the_kv_without_embedding_less_the_mean(data: st.DataObject) -> None:
    num_heads, k_dim, v_dim = (
        data.draw(st.sampled_from(sizes)) for sizes in ([1, 2, 3], [8, 32, 64], [4, 32, 64])
    )
    num_layers, num_tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    rotary_dim = data.draw(st.sampled_from([0, k_dim // 2, k_dim]))
    start_token = data.draw(st.integers(0, 50))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rotary = None
    if rotary_dim:
        # With yarn's factor.
        angles = 6 * torch.rand(100, rotary_dim // 2, generator=generator)
        rotary = RotaryTable(1.2 * angles.cos(), 1.2 * angles.sin(), data.draw(st.booleans(), "is neox"))
    layers = [
        LayerKV(
            *(
                torch.randn(num_tokens, num_heads, dim, generator=generator).to(dtype)
                for dim in (k_dim, v_dim)
            )
        )
        for _ in range(num_layers)
    ]
    mean = torch.randn(num_layers * num_heads * (k_dim + v_dim), generator=generator)
    rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, num_tokens - 1), min_size=1))))
    positions = start_token + torch.arange(num_tokens)
    bare = [kv if rotary is None else LayerKV(rotary.unrotate(kv.k, positions), kv.v) for kv in layers]
    found = torch.empty(len(rows), len(mean))
    with pytest.MonkeyPatch.context() as patches:
        if data.draw(st.booleans(), "by torch, as on a GPU"):
            patches.setattr(vectors_module.Device, "of", lambda _: SimpleNamespace(shares_cores=False))
        put_vectors(layers, TokenRows(rows, start_token, rotary), mean, found)
    torch.testing.assert_close(found, group_vectors(bare)[rows] - mean, rtol=1e-6, atol=2e-6)
