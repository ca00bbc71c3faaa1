"""Before anything serves: the machine, kernels against the reference, copies and overlap. No SGLang."""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from demo.summary import quantiles
from krul_backend import page_lock
from krul_backend.codec.layout import LayerShape, PoolRows
from krul_backend.codec.pairs.units import can_fuse
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.restore import GroupTarget, begin_groups
from krul_backend.codec.unit import NativeLayer
from krul_backend.codec.unit_restore import restore_layer
from krul_backend.device import Device
from krul_backend.memory import format_bytes
from krul_backend.strategy.strategy import Precision
from krul_sglang.cli.doctor import check_machine, to_json
from krul_sglang.cli.machine import available_bytes, gather
from krul_sglang.config import KrulConfig
from tests.gpu.stage import LeftOut, Setting, Stage
from tests.support.codec_builders import rotary_table
from tests.support.group_restore_cases import GroupCase, check_group, check_groups, check_wave, encode_drawn
from tests.support.restore_oracle import RestoreCase, check_restored, encode_case
from tests.support.strict_device import lock_all
from tests.support.subspace_builders import make_bases

REPEATS = 20
PROCESSES = 8
CODED_COEFFICIENTS, DECAY, DAMAGE_PER_TOKEN = 2560, 0.03, 0.4
"""A quarter of the channels, and so large steps that a twentieth of them is multiplied in fp32, as of
SmolLM2's at a limit of 0.01 nats (a tenth at 0.003). With smaller steps it would be most of them."""
GROUPS_OF_WAVE = 8
HEADS = ((1, 32, 32), (7, 64, 64), (4, 80, 96), (2, 256, 256), (3, 50, 31))
"""KV heads, channels of a key, channels of a value."""


def kernels_equal_the_reference(setting: Setting) -> dict[str, int]:
    """Every precision, pair, element type, head size and rotation: pool rows are what the decoder says."""
    num_tokens = 100 if setting.is_dry else 2049
    cases = [
        RestoreCase(LayerShape(8, 128, 128, dtype), precision, is_pair, rotary_dim=128, num_tokens=num_tokens)
        for dtype, precision, is_pair in itertools.product(
            (torch.bfloat16, torch.float16, torch.float32), Precision, (False, True)
        )
    ]
    cases += [
        RestoreCase(
            LayerShape(*heads, torch.bfloat16),
            Precision.INT4,
            is_pair=True,
            rotary_dim=2 * int(heads[1] * share / 2),
            is_neox=is_neox,
            num_tokens=333,
            group_size=50,
            first_token=120,
            end_token=331,
            has_tail_only=True,
        )
        for heads, share, is_neox in itertools.product(HEADS, (0, 0.25, 0.5, 1), (True, False))
    ]
    cases += [
        RestoreCase(
            LayerShape(2, 64, 64, torch.bfloat16),
            Precision.INT2,
            is_pair=True,
            rotary_dim=64,
            num_tokens=length,
            retained_share=1,
        )
        for length in (1, 63, 64, 65)
    ]
    # Beyond 32767 tokens, rows that are stored apart have their numbers in 32 bits.
    cases.append(
        RestoreCase(
            LayerShape(2, 64, 64, torch.bfloat16),
            Precision.INT2,
            is_pair=True,
            rotary_dim=0,
            num_tokens=40_000,
            retained_share=1,
        )
    )
    cases = cases[::7] if setting.is_dry else cases
    _check_each(_check_restore, cases, setting)
    return {"cases": len(cases)}


def _check_restore(setting: Setting, case: RestoreCase) -> None:
    check_restored(case, restore_layer, setting.device)


def unknown_units_are_decoded(setting: Setting) -> str:
    """Native layers, and blocks on another device, take the ordinary way."""
    shape = LayerShape(8, 128, 128, torch.bfloat16)
    case = RestoreCase(shape, Precision.INT4, is_pair=False, rotary_dim=128, num_tokens=100)
    blocks, decoder = encode_case(case, setting.device)
    k_buffer, v_buffer = (
        torch.zeros(100, 8, 128, dtype=shape.dtype, device=setting.device) for _ in range(2)
    )
    target = PoolRows(k_buffer, v_buffer, torch.arange(100, device=setting.device))
    found = decoder.unit_blocks(0, blocks, 0, 100)
    assert can_fuse(found.codec, found.blocks, target) is not setting.is_dry
    assert not can_fuse(NativeLayer(found.codec.place), found.blocks, target)
    assert not can_fuse(found.codec, (blocks[0].cpu(),), target)
    return "decoded without the kernels"


def groups_equal_the_reference(setting: Setting) -> dict[str, int]:
    """Groups in shared subspaces: every element type, head size, rotation, length and first token."""
    cases = [
        GroupCase(LayerShape(8, 128, 128, dtype), rank, decay=0.99, rotary_dim=128, num_tokens=length)
        for dtype, rank, length in itertools.product(
            (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn),
            (20, 90),
            (1, 63, 64, 65, 1100),
        )
    ]
    cases += [
        GroupCase(
            LayerShape(*heads, dtype),
            rotary_dim=2 * int(heads[1] * share / 2),
            is_neox=is_neox,
            start_token=1000,
            num_tokens=333,
            first_token=120,
            end_token=331,
            head_tokens=50,
        )
        for heads, dtype, share, is_neox in itertools.product(
            HEADS, (torch.bfloat16, torch.float32), (0, 0.25, 0.5, 1), (True, False)
        )
    ]
    cases = cases[::11] if setting.is_dry else cases
    _check_each(_check_group, cases, setting)
    # A conversation of many turns.
    turns = [
        replace(cases[0], rank=90, num_tokens=10 + 37 * number, start_token=1000 * number, head_tokens=number)
        for number in range(3 if setting.is_dry else 30)
    ]
    check_groups(turns, begin_groups, setting.on_device)
    check_wave([turns, cases[:1], turns[:2]], begin_groups, setting.on_device)
    return {"cases": len(cases), "segments together": len(turns)}


def _check_group(setting: Setting, case: GroupCase) -> None:
    check_group(case, begin_groups, setting.on_device)


def _check_each(check: Callable[[Setting, Any], None], cases: Sequence[Any], setting: Setting) -> None:
    """Check all cases, on a GPU in several processes: most of the time goes into compiling kernels."""
    if setting.is_dry:
        for case in cases:
            check(setting, case)
        return
    num_processes = min(PROCESSES, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        # What a case has raised is raised here.
        list(pool.map(partial(check, setting), cases))


def group_bandwidth(setting: Setting) -> list[dict[str, Any]]:
    """GB of bf16 KV written per second: groups of 5 layers of 8 heads of 128, upload, coder and product
    together, where eight groups are decoded together as a restore does."""
    settings, rank = (
        ([(2, 100)], 20)
        if setting.is_dry
        else ([(1, 512), (1, 2048), (1, 8192), (16, 512)], CODED_COEFFICIENTS)
    )
    shape = LayerShape(8, 128, 128, torch.bfloat16)
    layers_of_group = 1 if setting.is_dry else 5
    bases = make_bases(shape, [layers_of_group], rank=rank, decay=DECAY ** (1 / rank))
    codec = SubspaceCodec(bases.to(torch.device(setting.device)), rotary_table(128, 8192))
    device, rows = setting.on_device, []
    for num_segments, num_tokens in settings:
        decoder, block = encode_drawn(codec, num_tokens, device, DAMAGE_PER_TOKEN * num_tokens)
        buffers = [
            tuple(
                torch.zeros(num_segments * num_tokens, 8, 128, dtype=shape.dtype, device=setting.device)
                for _ in range(2)
            )
            for _ in range(layers_of_group)
        ]
        slots = torch.randperm(num_segments * num_tokens).to(setting.device)
        tail = decoder.tail(0, block, 0, num_tokens)
        targets = [
            GroupTarget(tail, [0] * layers_of_group, of_segment)
            for of_segment in torch.split(slots, num_tokens)
        ]
        wave = GROUPS_OF_WAVE * [targets]
        coder_s = _seconds(device, begin_groups, [targets], device)
        wave_coder_s = _seconds(device, begin_groups, wave, device)
        group_s = _seconds(device, _restore_groups, [targets], device, buffers)
        wave_s = _seconds(device, _restore_groups, wave, device, buffers)
        num_bytes = sum(buffer.nbytes for of_layer in buffers for buffer in of_layer)
        gbs = GROUPS_OF_WAVE * num_bytes / wave_s / 1e9
        rows.append(
            {
                "segments": num_segments,
                "tokens": num_tokens,
                "ratio": round(num_bytes / num_segments / block.nbytes, 1),
                "coefficients": int((tail.scales > 0).sum()),
                "in_fp32": tail.num_exact,
                "coder_us": round(coder_s * 1e6, 1),
                "us": round(group_s * 1e6, 1),
                "coder_of_wave_us": round(wave_coder_s * 1e6, 1),
                "wave_us": round(wave_s * 1e6, 1),
                "gbs": round(gbs, 1),
            }
        )
        print(f"groups, {num_segments} x {num_tokens} tokens: {gbs:.1f} GB of bf16 KV per second", flush=True)
    return rows


def _restore_groups(groups: Sequence[Sequence[GroupTarget]], device: Device, buffers: Any) -> None:
    for group in begin_groups(groups, device):
        group.write(buffers)


def kernel_bandwidth(setting: Setting) -> list[dict[str, Any]]:
    """Bytes that one layer's restore reads and writes, by the time it takes: 8 heads of 128, bf16."""
    num_tokens = 256 if setting.is_dry else 8064
    rows = []
    for precision, is_pair in itertools.product(
        (Precision.NATIVE, Precision.INT8, Precision.INT4, Precision.INT2), (False, True)
    ):
        shape = LayerShape(8, 128, 128, torch.bfloat16)
        case = RestoreCase(shape, precision, is_pair, rotary_dim=128, num_tokens=num_tokens, group_size=64)
        blocks, decoder = encode_case(case, setting.device)
        k_buffer, v_buffer = (
            torch.zeros(num_tokens, 8, 128, dtype=shape.dtype, device=setting.device) for _ in range(2)
        )
        slots = torch.randperm(num_tokens).to(setting.device)
        layer = 1 if is_pair else 0
        target = PoolRows(k_buffer, v_buffer, slots)
        seconds = _seconds(
            setting.on_device, restore_layer, decoder, layer, blocks, range(num_tokens), target
        )
        decoded = decoder.decode(layer, blocks, 0, num_tokens)
        torch.testing.assert_close(k_buffer[slots], decoded.k)
        torch.testing.assert_close(v_buffer[slots], decoded.v)
        num_bytes = sum(blocks[source].numel() for source in decoder.sources(layer))
        num_bytes += k_buffer.nbytes + v_buffer.nbytes
        rows.append(
            {
                "precision": precision.value,
                "is_pair": is_pair,
                "tokens": num_tokens,
                "us": round(seconds * 1e6, 1),
                "gbs": round(num_bytes / seconds / 1e9, 1),
            }
        )
    return rows


def restoring_waits_for_nothing(setting: Setting) -> str:
    """No call of a restore synchronizes with the GPU, once kernels are compiled."""
    shape = LayerShape(8, 128, 128, torch.bfloat16)
    case = RestoreCase(shape, Precision.INT4, is_pair=True, rotary_dim=128, num_tokens=500, group_size=64)
    blocks, decoder = encode_case(case, setting.device)
    k_buffer, v_buffer = (
        torch.zeros(500, 8, 128, dtype=shape.dtype, device=setting.device) for _ in range(2)
    )
    slots = torch.arange(500, device=setting.device)
    bases = make_bases(shape, [1]).to(torch.device(setting.device))
    codec = SubspaceCodec(bases, rotary_table(128))
    decoder_of_group, block = encode_drawn(codec, 500, setting.on_device)

    def restore() -> None:
        restore_layer(decoder, 1, blocks, range(500), PoolRows(k_buffer, v_buffer, slots))
        targets = [
            GroupTarget(decoder_of_group.tail(0, block, 0, 250), [0], of_tail) for of_tail in slots.split(250)
        ]
        _restore_groups([targets], setting.on_device, [(k_buffer, v_buffer)])

    restore()
    if setting.is_dry:
        raise LeftOut("a CPU has nothing to synchronize with")
    torch.cuda.set_sync_debug_mode("error")
    try:
        restore()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no synchronization"


def copies(setting: Setting) -> list[dict[str, Any]]:
    """GB/s of copies between device and host memory: pageable, pinned, and a mapped arena that is locked."""
    num_bytes = 1 << 20 if setting.is_dry else 256 << 20
    device = setting.on_device
    arena = _mapped_arena(num_bytes)
    status = lock_all(device, arena)
    assert status == 0, f"the arena could not be locked: error {status}"
    memories = {
        "pageable": torch.empty(num_bytes, dtype=torch.uint8),
        "pinned": device.host_empty((num_bytes,), torch.uint8),
        "arena": torch.from_numpy(arena),
    }
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=setting.device)
    rows = []
    try:
        for name, host in memories.items():
            host.random_(0, 256)
            expected = host.clone()
            to_device = _seconds(device, device.upload, host, on_device)
            host.zero_()
            to_host = _seconds(device, device.download, host, on_device)
            assert torch.equal(host, expected), f"{name} memory came back changed"
            rows.append(
                {
                    "memory": name,
                    "to_device_gbs": round(num_bytes / to_device / 1e9, 2),
                    "to_host_gbs": round(num_bytes / to_host / 1e9, 2),
                }
            )
    finally:
        device.unlock_pages()
    return rows


def copies_run_beside_compute(setting: Setting) -> dict[str, float]:
    """A copy on a side stream and products on the current one, together and one after the other.

    ``overlapped_share`` of the shorter of the two was hidden: 1 is a perfect overlap, 0 none.
    """
    device = setting.on_device
    num_bytes, size, num_products = (1 << 20, 64, 2) if setting.is_dry else (512 << 20, 8192, 8)
    host = device.host_empty((num_bytes,), torch.uint8)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=setting.device)
    matrix = torch.randn(size, size, device=setting.device).to(torch.bfloat16)
    side = device.new_stream()

    def compute() -> None:
        for _ in range(num_products):
            torch.mm(matrix, matrix)

    def load() -> None:
        with device.on_stream(side):
            device.upload(host, target)

    def both() -> None:
        device.wait_for(device.record(), side)
        load()
        compute()
        device.wait_for(device.record(side))

    def load_alone() -> None:
        device.wait_for(device.record(), side)
        load()
        device.wait_for(device.record(side))

    compute_s, load_s = _seconds(device, compute), _seconds(device, load_alone)
    both_s = _seconds(device, both)
    return {
        "compute_ms": compute_s * 1e3,
        "load_ms": load_s * 1e3,
        "both_ms": both_s * 1e3,
        "overlapped_share": (compute_s + load_s - both_s) / min(compute_s, load_s),
    }


def copies_go_across_chunks(setting: Setting) -> dict[str, str]:
    """Memory in several chunks is copied right, however many of them are locked.

    Returns what the device says to a copy that is not cut between two chunks, of which so many are locked.
    """
    device, num_bytes = setting.on_device, 1 << 20 if setting.is_dry else 256 << 20
    chunk_bytes, page_lock.CHUNK_BYTES = page_lock.CHUNK_BYTES, num_bytes // 8
    said = {}
    try:
        arena = _mapped_arena(num_bytes)
        host = torch.from_numpy(arena)
        on_device = torch.empty(num_bytes, dtype=torch.uint8, device=setting.device)
        middle = page_lock.cuts_of(host.data_ptr(), num_bytes)[3]
        for name, locked in (("none", arena[:0]), ("one", arena[:middle]), ("both", arena)):
            device.unlock_pages()
            assert lock_all(device, locked) == 0
            expected = host.random_(0, 256).clone()
            device.upload(host, on_device)
            device.synchronize()
            host.zero_()
            device.download(host, on_device)
            device.synchronize()
            assert torch.equal(host, expected), f"the copy is wrong, {name} locked"
            said[f"{name} locked"] = _said_to_copy(
                device, host[middle - 4096 : middle + 4096], on_device[: 2 * 4096]
            )
    finally:
        page_lock.CHUNK_BYTES = chunk_bytes
        device.unlock_pages()
    return said


def _said_to_copy(device: Device, host: torch.Tensor, target: torch.Tensor) -> str:
    try:
        target.copy_(host, non_blocking=True)
        device.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "copied" if torch.equal(target.cpu(), host) else "copied wrongly"


def large_memory_is_pinned(setting: Setting) -> dict[str, Any]:
    """64 GiB of mapped memory are locked, as the daemon's arena is, while the device computes."""
    num_bytes = 1 << 20 if setting.is_dry else 64 << 30
    if 1.25 * num_bytes > available_bytes():
        raise LeftOut(f"only {format_bytes(available_bytes())} of memory are available")
    device, arena = setting.on_device, _mapped_arena(num_bytes)
    matrix = torch.ones(64, 64, device=setting.device)

    def computed_ms() -> float:
        began_s = time.perf_counter()
        torch.mm(matrix, matrix)
        device.synchronize()
        return (time.perf_counter() - began_s) * 1e3

    before = [computed_ms() for _ in range(1000)]
    is_done = threading.Event()
    lock = device.lock_pages(arena, lambda lock: is_done.set())
    beside = [computed_ms()]
    while lock is not None and not is_done.is_set():
        beside.append(computed_ms())
    assert lock is None or lock.error == 0, f"{format_bytes(num_bytes)} could not be locked: {lock.error}"
    try:
        end = torch.from_numpy(arena[-(1 << 20) :])
        end.fill_(7)
        arrived = device.upload(end)
        device.synchronize()
        assert int(arrived.sum()) == 7 << 20
    finally:
        device.unlock_pages()
    return {
        "gib": num_bytes / 2**30,
        "seconds": 0.0 if lock is None else round(lock.seconds, 2),
        "product_ms_before": quantiles(before),
        "product_ms_beside": quantiles(beside),
        "beside_of_more_than_1_ms": [round(each, 1) for each in beside if each > 1],
    }


def the_machine_is_ready(setting: Setting) -> dict[str, Any]:
    """The rows of ``krul-sglang doctor``, none of which is a problem."""
    rows = check_machine(gather(KrulConfig.load(None), 0))
    found = to_json(rows)
    for row in rows:
        print(f"{row.check}: {row.state}: {row.found} {row.remedy}", flush=True)
    assert found["passed"], [row for row in found["rows"] if row["state"] == "problem"]
    return found


def the_device_computes(setting: Setting) -> dict[str, Any]:
    """A product of two matrices is right, and the device says what it is."""
    left, right = (torch.randn(64, 64, device=setting.device) for _ in range(2))
    torch.testing.assert_close((left @ right).cpu(), left.cpu() @ right.cpu(), rtol=1e-2, atol=1e-1)
    return {"name": setting.on_device.name, "memory_bytes": setting.on_device.memory_bytes}


def _seconds(device: Device, work: Callable[..., Any], *arguments: Any) -> float:
    """The median time of ``work`` on the current stream, by its events, after two calls to warm up."""
    for _ in range(2):
        work(*arguments)
    spans = []
    for _ in range(REPEATS):
        start = device.record()
        work(*arguments)
        spans.append((start, device.record()))
    device.synchronize()
    return statistics.median(start.seconds_until(end) for start, end in spans)


def _mapped_arena(num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A memory file that is mapped, as the daemon's arena is in an engine."""
    file = os.memfd_create("krul-gpu-check", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, num_bytes)
        return np.frombuffer(mmap.mmap(file, num_bytes), dtype=np.uint8)
    finally:
        os.close(file)


CHECKS: Stage = (
    ("kernels equal the reference", kernels_equal_the_reference),
    ("groups equal the reference", groups_equal_the_reference),
    ("unknown units are decoded", unknown_units_are_decoded),
    ("kernel bandwidth", kernel_bandwidth),
    ("group bandwidth", group_bandwidth),
    ("restoring waits for nothing", restoring_waits_for_nothing),
    ("copies", copies),
    ("copies go across chunks", copies_go_across_chunks),
    ("copies run beside compute", copies_run_beside_compute),
    ("large memory is pinned", large_memory_is_pinned),
)

PREFLIGHT: Stage = (
    ("the machine is ready", the_machine_is_ready),
    ("the device computes", the_device_computes),
)
