"""Vectors of groups of layers from native blocks: by a kernel in triton's interpreter, compiled for GPUs, and
all that a GPU makes of them, on a device that computes on the host."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from unittest.mock import PropertyMock, patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.launches.counter import DEVICE, counting
from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.vectors import BlockReads, TokenRows, put_vectors
from krul_backend.codec.unit_restore import NativeTail, NativeTails
from krul_backend.codec.units import UnitPlan
from krul_backend.device import Device
from krul_backend.strategy.strategy import Strategy
from tests.support.codec_builders import rotary_table
from tests.support.subspace_builders import make_bases, make_layers
from tests.support.triton_runs import compiled_ptx, run_interpreted

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = Device(torch.device("cpu"))


class Reads(BlockReads):
    """A segment that is stored natively in two parts, of which each has tokens that are not wanted."""

    def __init__(self, layers: list[LayerKV], shape: LayerShape, num_first: int, device: Device) -> None:
        self.layers = layers
        codec = ModelCodecs(shape, len(layers), None, CodecOptions(group_size=16)).native
        num_tokens = len(layers[0].k)
        self._blocks: list[dict[int, torch.Tensor]] = []
        tails = []
        for first, end in ((0, num_first), (num_first, num_tokens)):
            # Three tokens before, and one after.
            rows = torch.arange(first - 3, end + 1).clamp(0, num_tokens - 1)
            part = [LayerKV(kv.k[rows], kv.v[rows]) for kv in layers]
            encoded = codec.encode(
                TokenRun(part.__getitem__, 0, len(rows)), UnitPlan(Strategy.from_pairs(len(layers)))
            )
            self._blocks.append(dict(encoded.blocks))
            unit = codec.open(encoded.params, start_token=0, num_tokens=len(rows)).native_units[0]
            assert unit is not None
            tails.append(NativeTail(unit, 3, len(rows) - 1))
        self._rows = NativeTails(tails, device)

    @property
    def rows(self) -> NativeTails:
        return self._rows

    def __call__(self, layer: int) -> LayerKV:
        raise AssertionError("blocks are read")

    def blocks(self, layer: int) -> list[NDArray[np.uint8]]:
        blocks = [blocks[layer] for blocks in self._blocks]
        return [
            block[block.numel() - tail.num_bytes :].numpy()
            for block, tail in zip(blocks, self.rows.tails, strict=True)
        ]

    def first_tokens(self, layer: int, num_tokens: int) -> LayerKV:
        return LayerKV(self.layers[layer].k[:num_tokens], self.layers[layer].v[:num_tokens])


SHAPES = [
    LayerShape(2, 16, 16, torch.bfloat16),
    LayerShape(3, 8, 12, torch.float32),
    LayerShape(1, 20, 6, torch.float16),
    LayerShape(2, 16, 16, torch.float8_e4m3fn),
]

if IS_INTERPRETED:

    @pytest.mark.parametrize("is_neox", [True, False])
    @pytest.mark.parametrize("rotary_dim", [0, 4, 8])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_vectors_are_those_of_torch(shape: LayerShape, rotary_dim: int, *, is_neox: bool) -> None:
        from krul_backend.codec.subspace.triton_vectors import put_on_device

        angles = 6 * torch.rand(100, max(1, rotary_dim // 2))
        rotary = RotaryTable(1.2 * angles.cos(), 1.2 * angles.sin(), is_neox) if rotary_dim else None
        layers = [
            LayerKV(*(torch.randn(37, shape.num_kv_heads, dim).to(shape.dtype) for dim in dims))
            for dims in [(shape.k_head_dim, shape.v_head_dim)] * 6
        ]
        with patch.object(Device, "runs_triton", PropertyMock(return_value=True)):
            reads = Reads(layers, shape, 20, CPU)
        rows = TokenRows(torch.tensor([0, 1, 2, 5, 19, 20, 21, 30, 36]), 50, rotary)
        dim = 3 * shape.num_kv_heads * (shape.k_head_dim + shape.v_head_dim)
        mean, found = torch.randn(2, dim), torch.full((2, 9, dim), torch.nan)
        lowered = found.bfloat16()
        blocks = CPU.upload_joined([piece for layer in range(6) for piece in reads.blocks(layer)])
        numbers = blocks.view(shape.dtype).to(shape.of_numbers.dtype)
        put_on_device(numbers.view(6, -1), reads.rows, rows.index, 2, 50, shape, rotary, mean, found, lowered)
        torch.testing.assert_close(lowered, found.bfloat16())
        for group in range(2):
            expected = torch.empty(9, dim)
            put_vectors(layers[3 * group : 3 * group + 3], rows, mean[group], expected)
            expected[:2] = 0
            torch.testing.assert_close(found[group], expected, rtol=1e-5, atol=1e-5)

else:

    def test_the_kernel_in_the_interpreter() -> None:
        run_interpreted("tests/unit/test_group_vectors.py")

    @pytest.mark.parametrize("compute_capability", [80, 90, 100])
    def test_the_kernel_compiles(compute_capability: int) -> None:
        from krul_backend.codec.subspace.triton_vectors import put_group_vectors, vectors_launch

        shape = LayerShape(8, 128, 128, torch.bfloat16)
        layers = [LayerKV(*torch.zeros(2, 30, 8, 128, dtype=torch.bfloat16))] * 2
        with patch.object(Device, "runs_triton", PropertyMock(return_value=True)):
            rows = Reads(layers, shape, 20, CPU).rows
        blocks, mean = torch.zeros(2, rows.num_bytes // 2, dtype=shape.dtype), torch.zeros(1, 4096)
        out = torch.zeros(1, 8, 4096)
        _, arguments = vectors_launch(
            *(blocks, rows, torch.arange(8), 1, 0, shape, rotary_table(128), mean, out, out.bfloat16())
        )
        ptx = compiled_ptx(put_group_vectors, arguments, compute_capability)
        # Of 16 bits, four at a time; of 32, too.
        assert {"st.global.v4.b32"} <= set(re.findall(r"st\.global[.\w]*", ptx))

    @pytest.mark.parametrize("num_tokens", [90, 400])
    @pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 2, 1), (3,)])
    def test_what_a_gpu_makes_of_them_is_what_a_cpu_makes(
        num_tokens: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Groups are multiplied together, one of another size apart. The last one has fewer coefficients."""
        monkeypatch.setattr(Device, "multiplies_bf16_fast", True)
        shape, rotary = LayerShape(2, 32, 32, torch.bfloat16), rotary_table(32)
        groups = make_bases(shape, sizes, rank=100, shift_cost=1e-3).groups
        narrow = {"encoder": groups[-1].encoder[:, :90], "decoder": groups[-1].decoder[:90]}
        narrow = {name: tensor.contiguous() for name, tensor in narrow.items()}
        narrow["magnitudes"] = groups[-1].magnitudes[:90]
        bases = ModelBases(shape, (*groups[:-1], replace(groups[-1], **narrow)))
        layers = make_layers(bases, num_tokens, rotary, start_token=7, outside=0.1)
        attention = torch.rand(sum(sizes), 2, num_tokens, generator=torch.Generator().manual_seed(3))
        how = {"start_token": 0, "num_tokens": num_tokens, "attention": attention / 50, "max_damage": 0.5}
        by_cpu = SubspaceCodec(bases, rotary).encode(layers.__getitem__, **how)
        with counting():
            codec = SubspaceCodec(bases.to(DEVICE), rotary)
            by_gpu = codec.encode(Reads(layers, shape, 33, Device(DEVICE)), **how)
        assert by_gpu.params["step"] == pytest.approx(by_cpu.params["step"], rel=1e-3)
        assert by_gpu.damage == pytest.approx(by_cpu.damage, rel=1e-3)
        assert by_gpu.shift_damage == pytest.approx(by_cpu.shift_damage, rel=0.02, abs=1e-6)
        assert by_gpu.num_bytes == pytest.approx(by_cpu.num_bytes, rel=0.01)
