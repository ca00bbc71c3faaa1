from __future__ import annotations

import time

import pytest
import torch

from krul_backend.codec.interface import LayerShape
from krul_backend.codec.options import Sharing
from krul_backend.codec.restore import can_fuse, restore_layer
from krul_backend.codec.segment_codec import UnitBlocks
from krul_backend.codec.single_layer import CodedLayer
from krul_backend.strategy.strategy import Precision
from tests.unit.restore_oracle import RestoreCase, check_restored, encode_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a CUDA device")

LLAMA = LayerShape(8, 128, 128, torch.bfloat16)


def pool(shape: LayerShape, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    heads, dtype = shape.num_kv_heads, shape.dtype
    return (
        torch.zeros(num_slots, heads, shape.k_head_dim, dtype=dtype, device="cuda"),
        torch.zeros(num_slots, heads, shape.v_head_dim, dtype=dtype, device="cuda"),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("precision", list(Precision))
def test_every_precision_and_dtype(precision: Precision, is_pair: bool, dtype: torch.dtype) -> None:
    shape = LayerShape(8, 128, 128, dtype)
    case = RestoreCase(shape, precision, is_pair, rotary_dim=128, num_tokens=2049, group_size=64)
    check_restored(case, restore_layer, "cuda")


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_share", [0, 0.25, 0.5, 1])
@pytest.mark.parametrize("heads", [(1, 32, 32), (7, 64, 64), (4, 80, 96), (2, 256, 256), (3, 50, 31)])
def test_every_head_size_and_rotation(
    heads: tuple[int, int, int], rotary_share: float, is_neox: bool
) -> None:
    case = RestoreCase(
        LayerShape(*heads, torch.bfloat16),
        Precision.INT4,
        is_pair=True,
        rotary_dim=2 * int(heads[1] * rotary_share / 2),
        is_neox=is_neox,
        num_tokens=333,
        group_size=50,
        first_token=120,
        end_token=331,
        has_tail_only=True,
    )
    check_restored(case, restore_layer, "cuda")


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 40000])
@pytest.mark.parametrize("precision", [Precision.INT2, Precision.INT0])
def test_rows_that_are_stored_apart_are_exact(precision: Precision, num_tokens: int) -> None:
    shape = LayerShape(2, 64, 64, torch.bfloat16)
    # 40000 tokens: their numbers are stored in 32 bits. The table of angles must reach that far.
    rotary_dim = 64 if num_tokens < 8000 else 0
    case = RestoreCase(
        shape, precision, is_pair=True, rotary_dim=rotary_dim, num_tokens=num_tokens, retained_share=1
    )
    check_restored(case, restore_layer, "cuda")


def test_layers_of_a_predicted_pair() -> None:
    case = RestoreCase(
        LLAMA, Precision.INT8, is_pair=True, rotary_dim=128, num_tokens=300, sharing=Sharing.PREDICTED
    )
    check_restored(case, restore_layer, "cuda")


def test_nothing_waits_for_the_gpu() -> None:
    case = RestoreCase(LLAMA, Precision.INT4, is_pair=True, rotary_dim=128, num_tokens=500, group_size=64)
    blocks, decoder = encode_case(case, "cuda")
    k_buffer, v_buffer = pool(LLAMA, 500)
    slots = torch.arange(500, device="cuda")
    # The first call compiles, and copies the table of angles.
    restore_layer(decoder, 1, blocks, 0, 500, k_buffer, v_buffer, slots)
    expected = decoder.decode(1, blocks, 0, 500)
    k_buffer.zero_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        restore_layer(decoder, 1, blocks, 0, 500, k_buffer, v_buffer, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(k_buffer, expected.k)


def test_a_unit_that_the_kernels_do_not_know_is_decoded() -> None:
    class LaterCodedLayer(CodedLayer):
        """Derived from one that they know: it may decode in another way."""

    case = RestoreCase(LLAMA, Precision.INT4, is_pair=False, rotary_dim=128, num_tokens=100)
    blocks, decoder = encode_case(case, "cuda")
    target = (*pool(LLAMA, 100), torch.arange(100, device="cuda"))
    found = decoder.unit_blocks(0, blocks, 0, 100)
    assert can_fuse(found, *target)
    later = LaterCodedLayer(found.codec.place, Precision.INT4)
    assert not can_fuse(UnitBlocks(later, found.index, found.blocks), *target)
    assert not can_fuse(UnitBlocks(found.codec, found.index, (blocks[0].cpu(),)), *target)


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("precision", [Precision.NATIVE, Precision.INT8, Precision.INT4, Precision.INT2])
def test_print_how_fast(precision: Precision, is_pair: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed decides nothing; that the timed calls restored the right rows is checked."""
    num_tokens, num_calls = 8192 - 128, 50
    case = RestoreCase(LLAMA, precision, is_pair, rotary_dim=128, num_tokens=num_tokens, group_size=64)
    blocks, decoder = encode_case(case, "cuda")
    k_buffer, v_buffer = pool(LLAMA, num_tokens)
    slots = torch.randperm(num_tokens, device="cuda")
    layer = 1 if is_pair else 0

    def restore() -> None:
        restore_layer(decoder, layer, blocks, 0, num_tokens, k_buffer, v_buffer, slots)

    for _ in range(3):
        restore()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    start.record()
    for _ in range(num_calls):
        restore()
    end.record()
    host_s = (time.perf_counter() - began) / num_calls
    torch.cuda.synchronize()
    device_s = start.elapsed_time(end) / 1e3 / num_calls
    read = sum(blocks[source].numel() for source in decoder.sources(layer))
    written = k_buffer.nbytes + v_buffer.nbytes
    with capsys.disabled():
        print(
            f"\n{precision.value} {'pair' if is_pair else 'single'}: {device_s * 1e6:.0f} us, "
            f"{(read + written) / device_s / 1e9:.0f} GB/s, {host_s * 1e6:.0f} us on the host"
        )
    decoded = decoder.decode(layer, blocks, 0, num_tokens)
    torch.testing.assert_close(k_buffer[slots], decoded.k)
    torch.testing.assert_close(v_buffer[slots], decoded.v)
