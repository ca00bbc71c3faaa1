"""What krul takes of a device is left to it by SGLang's pool, and its work stays within that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.launches.__main__ import rows_of
from benchmarks.launches.operations import Shape
from krul_backend.codec.layout import LayerShape
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.held_bases import NoRoomError
from krul_backend.device import Device
from krul_backend.errors import CodecError, ConfigError
from krul_sglang.adapter.device_share import DeviceShare, leave_share
from krul_sglang.adapter.runtime import KrulRuntime
from krul_sglang.config import KrulConfig
from krul_sglang.learning.bases import most_bases_bytes
from tests.support.codec_builders import rotary_table
from tests.support.subspace_builders import make_bases

WIDE = Shape("wide", 8, 32, 8, 128)
NUM_TOKENS = 1000
GPU: Any = SimpleNamespace(shares_cores=False, memory_bytes=80 << 30)


def share_of(
    strategy: str, shape: Shape = WIDE, device: Any = GPU, dtype: Any = torch.bfloat16
) -> DeviceShare:
    of_layer = LayerShape(shape.num_kv_heads, shape.head_dim, shape.head_dim, dtype)
    return DeviceShare.of(KrulConfig(strategy=strategy), of_layer, shape.num_layers, NUM_TOKENS, device)


@pytest.fixture(scope="module")
def peaks() -> dict[str, int]:
    """Most bytes that each operation takes beside the pool, counted."""
    rows = rows_of(WIDE, NUM_TOKENS, captures=False)
    return {row["operation"]: row["peak_bytes"] for row in rows}


def test_work_stays_within_its_part_of_the_share(peaks: dict[str, int]) -> None:
    plain, share = share_of("none"), share_of("subspace")
    assert 0 < peaks["restore native"] <= plain.loading
    assert 0 < peaks["save native"] <= plain.storing
    assert 0 < peaks["restore subspace"] <= share.loading
    assert 0 < peaks["statistics"] <= share.statistics
    # They come one after the other.
    assert 0 < peaks["save subspace"] <= max(share.statistics, share.storing)
    rows = WIDE.num_layers * NUM_TOKENS * WIDE.num_query_heads * WIDE.head_dim
    # Attention of heads reads queries of the model's own, and returns as much as a prefill does.
    assert 0 < peaks["head recompute"] <= plain.heads + 2 * rows // WIDE.num_layers


def test_what_a_strategy_does_not_need_is_left_to_the_pool() -> None:
    none, pairs, subspace = map(share_of, ("none", "krul", "subspace"))
    assert none.query_rows == none.bases == none.statistics == 0 < none.loading
    assert pairs.bases == 0 < pairs.query_rows == subspace.query_rows
    assert pairs.query_rows == KrulConfig().query_memory_bytes(GPU.memory_bytes)
    assert share_of("subspace", dtype=torch.float8_e5m2).loading > subspace.loading
    assert subspace.loading > pairs.loading == none.loading
    assert share_of("subspace", device=Device(torch.device("cpu"))).total_bytes == 0


# ---- SGLang's budget ----


class Configurator:
    """SGLang's, which knows the model; ``budget`` is what it is given at last."""

    def __init__(self, runtime: KrulRuntime | None) -> None:
        self.model = nn.Linear(1, 1)
        if runtime is not None:
            runtime.attach_to(self.model)

    def config_from_budget(self, budget_bytes: int, *, cap_tokens: int | None = None) -> tuple[Any, ...]:
        return budget_bytes, cap_tokens

    def asked(self, budget_bytes: int, **options: Any) -> Any:
        return leave_share(Configurator.config_from_budget, self, budget_bytes, **options)


def runtime_with(share: DeviceShare) -> KrulRuntime:
    runtime = KrulRuntime(KrulConfig())
    runtime.share = share
    return runtime


def test_the_pool_gets_what_the_share_leaves() -> None:
    runtime = runtime_with(DeviceShare(query_rows=100, loading=20, heads=3))
    configurator = Configurator(runtime)
    assert configurator.asked(1000) == (1000 - 123, None)
    capture: Any = object()
    runtime.capture = capture
    # After graphs were captured: the query rows lie on the device by then.
    assert configurator.asked(1000, cap_tokens=7) == (1000 - 23, 7)


def test_the_pool_of_a_draft_model_or_of_a_server_without_krul_is_as_it_was() -> None:
    assert Configurator(None).asked(1000) == (1000, None)


def test_a_share_that_leaves_nothing_is_refused_with_what_to_change() -> None:
    configurator = Configurator(runtime_with(DeviceShare(loading=1 << 30)))
    with pytest.raises(ConfigError, match=r"1\.0 GiB .* krul needs 1\.0 GiB .* --mem-fraction-static"):
        configurator.asked(1 << 30)


# ---- bases within it ----

SHAPE = LayerShape(2, 8, 8, torch.bfloat16)


def codecs(max_bases_bytes: int | None, num_bases: int) -> tuple[ModelCodecs, list[SubspaceCodec]]:
    rotary = rotary_table(8)
    made = [SubspaceCodec(make_bases(SHAPE, [2, 1], seed=seed), rotary) for seed in range(num_bases)]
    found = ModelCodecs(SHAPE, 3, rotary, max_bases_bytes=max_bases_bytes)
    for subspace in made:
        found.add_bases(subspace)
    return found, made


def test_older_bases_make_room_for_others_and_the_newest_stay() -> None:
    num_bytes = make_bases(SHAPE, [2, 1]).working_bytes
    found, made = codecs(3 * num_bytes, 3)
    found.make_room_for_bases(num_bytes)
    assert found.bases.num_held == 2
    with pytest.raises(CodecError, match="not here"):
        found.bases._subspace(made[0].bases.digest)
    assert found.bases._subspace(made[2].bases.digest) is made[2]
    with pytest.raises(NoRoomError, match="beside"):
        found.make_room_for_bases(3 * num_bytes)
    assert found.bases._subspace(made[2].bases.digest) is made[2]


def test_there_is_room_for_bases_that_keep_all() -> None:
    bases = make_bases(SHAPE, [2, 1])
    assert bases.working_bytes <= most_bases_bytes(SHAPE, 3)
    assert share_of("subspace").bases >= most_bases_bytes(LayerShape(8, 128, 128, torch.bfloat16), 8)
    found, _ = codecs(None, 2)
    found.make_room_for_bases(1 << 60)
    assert found.bases.num_held == 2
