"""Says line by line how many conversations fit, and how soon one comes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from krul_backend.memory import format_bytes
from krul_sglang.sizing.on_paper import (
    BASES_RATIO,
    COUNTED,
    ELEMENT_BYTES,
    MATMUL_SHARE,
    NVME4,
    PAGE_SIZE,
    PCIE5,
    PLANNED,
    Gpu,
    Link,
    Model,
    predict,
)


@dataclass(frozen=True)
class Wanted:
    """What is to be served. ``link_bytes_s``: from host memory to each GPU; ``ssd_bytes_s``: of the disk."""

    model: Model
    host_bytes: int
    ssd_bytes: int
    users: int
    turns: int
    turn_tokens: int
    new_tokens: int
    ratio: float
    gpu: Gpu
    link_bytes_s: float
    ssd_bytes_s: float


def size_lines(wanted: Wanted) -> Iterator[str]:
    """The arithmetic. There are no lines about bases for latent KV: no pretrained one was measured."""
    model = wanted.model
    token_bytes = model.num_layers * model.layer_token_bytes
    yield (
        f"a token: {model.num_layers} layers x {model.layer_channels} numbers x {model.element_bytes} B "
        f"= {token_bytes} B of KV on {model.num_gpus} GPU{'s' * (model.num_gpus > 1)} together"
    )
    tokens = -(-wanted.turns * wanted.turn_tokens // PAGE_SIZE) * PAGE_SIZE
    sizes = {"exact": tokens * token_bytes}
    yield (
        f"a conversation: {wanted.turns} turns x {wanted.turn_tokens} tokens, in pages of {PAGE_SIZE}: "
        f"{tokens} tokens x {token_bytes} B = {format_bytes(sizes['exact'])}"
    )
    if model.latent_size:
        yield "in bases: not measured for latent KV"
    else:
        plain = sizes["exact"] * ELEMENT_BYTES // model.element_bytes
        sizes["in bases"] = round(plain / wanted.ratio)
        measured = " (measured on a small model: docs/measured.md)" * (wanted.ratio == BASES_RATIO)
        yield (
            f"in bases: {format_bytes(plain)} in bf16 / {wanted.ratio:g}{measured} "
            f"= {format_bytes(sizes['in bases'])}"
        )
    for place, room in (("host memory", wanted.host_bytes), ("SSD", wanted.ssd_bytes)):
        for kept, size in sizes.items():
            num_held = room // size
            yield f"{place}, {kept}: {format_bytes(room)} / {format_bytes(size)} = {num_held} conversations"
    most = max(wanted.host_bytes, wanted.ssd_bytes)
    yield f"together: the larger, {format_bytes(most)}, for the SSD has what host memory has, too"
    for kept, size in sizes.items():
        need = wanted.users * size
        held = min(wanted.users, most // size)
        yield (
            f"{wanted.users} users, {kept}: x {format_bytes(size)} = {format_bytes(need)}; held: {held}, "
            f"of them in host memory {min(held, wanted.host_bytes // size)}"
        )
    yield from _times(wanted, tokens, sizes)


def _times(wanted: Wanted, tokens: int, sizes: dict[str, int]) -> Iterator[str]:
    """The time to the first token of a whole conversation that comes back to an idle server."""
    model, gpu = wanted.model, wanted.gpu
    parameters, computed = model.num_layers * model.layer_parameters, tokens + wanted.new_tokens
    flops = MATMUL_SHARE * gpu.peak_flops * model.num_gpus
    yield (
        f"products of a prefill: 2 x {parameters / 1e9:.2f}e9 parameters x {computed} tokens / "
        f"{flops / 1e12:.1f} TFLOP/s (half of {model.num_gpus} x {gpu.name}) "
        f"= {_ms(2 * parameters * computed / flops)}; attention comes on top"
    )
    num_links = 1 if model.latent_size else model.num_gpus
    link_bytes_s = num_links * wanted.link_bytes_s
    places = {"host memory": Link("host memory", link_bytes_s, PCIE5.latency_s, is_shared=True)}
    if wanted.ssd_bytes:
        slower = min(wanted.ssd_bytes_s, link_bytes_s)
        places["the SSD"] = Link("SSD", slower, NVME4.latency_s, is_shared=True)
    for place, link in places.items():
        for kept, size in sizes.items():
            yield (
                f"reading all of it from {place}, {kept}: {format_bytes(size)} / {link.bytes_s / 1e9:g} GB/s "
                f"= {_ms(size / link.bytes_s)}"
            )
    ends = {
        place: predict(model, link, COUNTED, tokens, wanted.new_tokens, gpu, wanted.ratio)
        for place, link in places.items()
    }
    yield f"TTFT computed, nothing stored: {_ms(ends['host memory']['recompute'])}"
    for place, of_place in ends.items():
        for kept in sizes:
            way = "native" if kept == "exact" else "bases"
            yield f"TTFT from {place}, {kept}, heads computed meanwhile: {_ms(of_place[f'{way}, {PLANNED}'])}"
    yield "TTFTs are predicted from data sheets for an idle server, and were never measured on a GPU"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
