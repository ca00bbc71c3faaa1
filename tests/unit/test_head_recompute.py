"""Heads through layers like those of SGLang's models: cut, continued, and with KV written by the model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from krul_backend.device import Device
from krul_sglang.adapter import attach
from krul_sglang.adapter.head_attention import NoHeadsError
from krul_sglang.adapter.head_recompute import HeadRecompute
from krul_sglang.adapter.hook_targets import IncompatibleEngineError
from krul_sglang.engine.restore.heads import Head
from krul_sglang.engine.restore.restore_forward import _Prefix
from krul_sglang.engine.restore.restore_path import RestoreMode
from tests.support.engine_builders import bare_load
from tests.support.head_rig import NUM_LAYERS, NUM_SLOTS, VOCAB_SIZE, Rig, fake_engine

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine(monkeypatch)


TOKEN_IDS = (torch.arange(40) * 7) % VOCAB_SIZE
SLOTS = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))[:40]


def whole(rig: Rig, num_tokens: int) -> None:
    """The KV of a conversation's first tokens in every layer, all computed at once."""
    rig.heads.run([Head(TOKEN_IDS[:num_tokens], SLOTS[:num_tokens], 0, (num_tokens,) * NUM_LAYERS)])


@pytest.mark.parametrize("writes_kv", [False, True])
def test_heads_that_get_shorter_are_those_of_a_whole_prefill(writes_kv: bool) -> None:
    expected, rig = Rig(), Rig(writes_kv=writes_kv)
    whole(expected, 40)
    # One request continues what is in the pool, the other one begins.
    whole(rig, 10)
    before = rig.pool.copy()
    ends = (36, 36, 21, 10)
    short = Head(TOKEN_IDS[:12], 63 - torch.arange(12), 0, (12, 5, 5, 0))
    other = sorted(set(range(NUM_SLOTS)) - set(SLOTS.tolist()))[:12]
    short = Head(short.token_ids, torch.tensor(other), 0, short.ends)
    rig.engine_pool.asked.clear()
    rig.heads.run([Head(TOKEN_IDS[10:36], SLOTS[:36], 10, ends), short])
    assert rig.engine_pool.asked == ([0, 1, 2] if writes_kv else [])
    for layer, (old, new, right) in enumerate(
        zip(before, rig.pool.copy(), expected.pool.copy(), strict=True)
    ):
        end, short_end = ends[layer], short.ends[layer]
        for written, unchanged, reference in ((new.k, old.k, right.k), (new.v, old.v, right.v)):
            torch.testing.assert_close(written[SLOTS[:end]], reference[SLOTS[:end]], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                written[other[:short_end]], reference[SLOTS[:short_end]], rtol=1e-4, atol=1e-5
            )
            # Loads write there meanwhile.
            rest = [*SLOTS[end:].tolist(), *other[short_end:]]
            assert torch.equal(written[rest], unchanged[rest])


def test_layers_are_told_of_once_each_and_the_end() -> None:
    told: list[int] = []
    Rig().heads.run([Head(TOKEN_IDS[:8], SLOTS[:8], 0, (8, 8, 3, 0))], told.append)
    assert told == [0, 1, 2, NUM_LAYERS]


# ---- copies from the host ----


class NoHiddenCopies(TorchDispatchMode):
    """Fails where an operation takes values from the host to the device, other than ``from_list``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = [part for part in args if isinstance(part, torch.Tensor)]
        is_copy = isinstance(output, torch.Tensor) and output.is_meta
        assert not (is_copy and any(not part.is_meta and part.dim() for part in inputs)), func
        return output


@pytest.fixture
def from_list(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What is copied to a device whose tensors have no values."""
    copied: list[list[int]] = []
    meta = torch.device("meta")

    def note(values: list[int]) -> torch.Tensor:
        copied.append(list(values))
        return torch.empty(len(values), dtype=torch.int64, device=meta)

    device = SimpleNamespace(torch_device=meta, shares_cores=True, from_list=note)
    monkeypatch.setattr(Device, "of", lambda tensor: device)
    return copied


class BlindAttention:
    """Computes nothing. Torch's own needs a mask on a device that has no kernels."""

    name = "blind"

    def plan(self, spans: Any) -> None:
        pass

    def attend(self, q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, layer: Any) -> Any:
        return torch.empty_like(q)


def test_lengths_of_all_cuts_come_to_the_device_in_one_copy(
    from_list: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("krul_sglang.adapter.head_recompute.span_attention", lambda *of: BlindAttention())
    rig = Rig(device="meta")
    slots = torch.empty(40, dtype=torch.int64, device="meta")
    long = Head(slots[:20], slots[:30], 10, (30, 30, 20, 10))
    short = Head(slots[:8], slots[:8], 0, (8, 4, 4, 4))
    with NoHiddenCopies():
        rig.heads.run([long, short])
    assert from_list == [[30, 8, 30, 4, 20, 4, 4]]


def test_token_ids_of_a_head_come_to_the_device_by_the_staging(from_list: list[list[int]]) -> None:
    load = bare_load(10, 20, (25, 25, 20, 10))
    prefix = _Prefix("r", load, 0, list(range(100, 160)), torch.empty(64, dtype=torch.int32, device="meta"))
    with NoHiddenCopies():
        head = prefix.head()
    assert from_list == [list(range(110, 125))]
    assert (head.token_ids.device.type, len(head.slots)) == ("meta", 25)


# ---- models that krul does not know ----


class OtherRank:
    """Stands in for ``RankAgreement`` of two ranks: the other one says ``failure`` of its own proof."""

    def __init__(self, failure: str, rank: int) -> None:
        self._failure = failure
        self.rank = rank

    def gather_bytes(self, content: bytes) -> list[bytes]:
        return [content, self._failure.encode()]


def proven(
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[], object],
    *,
    planner: str = "local-search",
    other_rank: str = "",
    tp_rank: int = 0,
    model: Any = None,
    takes_images: bool = False,
) -> tuple[HeadRecompute | None, Any, RestoreMode]:
    monkeypatch.setattr(attach, "prove_heads", lambda *args: run())
    rig = Rig()
    runner: Any = SimpleNamespace(
        lora_manager=None,
        model_config=SimpleNamespace(
            is_multimodal=takes_images,
            is_audio_model=False,
            is_image_understandable_model=takes_images,
            is_audio_understandable_model=False,
        ),
        model=rig.model if model is None else model,
        token_to_kv_pool=rig.engine_pool,
        dtype=torch.float32,
        device="cpu",
    )
    setup: Any = SimpleNamespace(
        model_runner=runner,
        pool=rig.pool,
        capture=None,
        config=SimpleNamespace(planner=planner),
        start_agreement=OtherRank(other_rank, tp_rank),
        states=None,
        has_dp_attention=False,
    )
    return attach._proven_heads(setup, None)


def fail(error: Exception) -> Callable[[], object]:
    def prove() -> None:
        raise error

    return prove


def test_proven_heads_are_planned_as_configured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proof = object()
    heads, found, mode = proven(monkeypatch, lambda: proof, planner="pyramid")
    assert isinstance(heads, HeadRecompute)
    assert found is proof
    assert mode == RestoreMode("pyramid", "as configured")
    assert not caplog.records


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'HeadAttention' object\n has no attribute 'req_to_token_pool'"),
        NoHeadsError("K of layer 1 differs by 1.2"),
        IncompatibleEngineError("start of an unknown engine"),
        OUT_OF_MEMORY,
    ],
)
def test_without_a_proof_whole_prefixes_are_loaded_and_one_line_says_why(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heads, proof, mode = proven(monkeypatch, fail(error))
    assert (heads, proof, mode.planner) == (None, None, "full-load")
    assert mode.why.startswith("heads of ExpertsForCausalLM cannot be recomputed: ")
    assert " ".join(str(error).split()) in mode.why
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert mode.why in record.getMessage()
    assert "loaded whole" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_model_of_another_kind_is_loaded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, _, mode = proven(monkeypatch, object, model=torch.nn.Linear(1, 1))
    assert (heads, mode.planner) == (None, "full-load")
    assert "Linear" in mode.why
    assert "no stack of decoder layers" in mode.why


def test_a_model_that_takes_images_is_loaded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers are of a known kind, but heads know only token ids."""
    heads, proof, mode = proven(monkeypatch, object, takes_images=True)
    assert (heads, proof, mode.planner) == (None, None, "full-load")
    assert "without images and sounds" in mode.why


def test_a_proof_that_failed_on_another_rank_fails_here_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heads, proof, mode = proven(monkeypatch, object, other_rank="V of layer 2 differs by 0.4", tp_rank=1)
    assert (heads, proof, mode.planner) == (None, None, "full-load")
    assert "V of layer 2 differs" in mode.why
    # The first rank says it for all.
    assert not caplog.records
