"""A plugin of SGLang for servers of the tests: a planner and faults that the product does not have.

``plugin_path`` holds the metadata by which SGLang finds it, on servers that are started with ``WITH_PLUGIN``.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from krul_backend.planner.planners import PLANNERS
from tests.support.random_heads import RandomPlanner

STALL_S = 6.0
"""Longer than any load is waited for in tests, unless the server has a ``load_timeout``."""

_SKIP_HEADS = "TESTS_SKIP_HEADS"
_SPOIL_HEADS_OF_RANK = "TESTS_SPOIL_HEADS_OF_RANK"
_SLOW_ANSWERS = "TESTS_SLOW_ANSWERS"
_FAULT = "TESTS_FAULT"
_ROUND_HEADS = "TESTS_ROUND_HEADS"
_LEAVE_OUT_DRAFTS = "TESTS_LEAVE_OUT_DRAFTS"
_LEAVE_OUT_STATES = "TESTS_LEAVE_OUT_STATES"
_SPOIL_STATES = "TESTS_SPOIL_STATES"
_SENDS = "TESTS_SENDS"
_SETTING_STATUS = threading.RLock()
_PATHS = (Path(__file__).parent / "plugin_path", Path(__file__).parents[2])

WITH_PLUGIN = {
    "PYTHONPATH": os.pathsep.join([*map(str, _PATHS), *filter(None, [os.environ.get("PYTHONPATH")])])
}
"""Environment of a server that has ``planner = "random"``."""

SKIPPED_HEADS = {**WITH_PLUGIN, _SKIP_HEADS: "1"}
"""Environment of a server that, besides, never recomputes heads, and so gives wrong answers."""

LEFT_OUT_DRAFTS = {**WITH_PLUGIN, _LEAVE_OUT_DRAFTS: "1"}
"""Environment of a server that never loads the draft model's KV."""

ROUNDED_HEADS = {**WITH_PLUGIN, _ROUND_HEADS: "1"}
"""Environment of a server whose heads are rounded differently from its prefills, as by another kernel."""

LEFT_OUT_STATES = {**WITH_PLUGIN, _LEAVE_OUT_STATES: "1"}
"""Environment of a server that never loads the states of recurrent layers, and so gives wrong answers."""

SENDING = {_SENDS: "1"}
"""Environment, beside another one, of a server that sends KV to another one, on a CPU."""

SPOILED_STATES = {**WITH_PLUGIN, _SPOIL_STATES: "1"}
"""Environment of a server whose stored states of recurrent layers have a wrong byte each."""


class FaultyLoads:
    """Lets every second load fail, or stop for longer than its deadline, at changing layers.

    Ranks take turns: what fails on one of them works on the others. ``fault``: ``load-error`` or
    ``load-stall``. ``patience_s``: of the loader.
    """

    def __init__(
        self, fault: str, rank: int, num_ranks: int, num_layers: int, patience_s: float | None = None
    ) -> None:
        assert fault in ("load-error", "load-stall"), fault
        self._fault = fault
        self._stall_s = STALL_S if patience_s is None else 3 * patience_s
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_layers = num_layers

    def before_layer(self, index: int, layer: int) -> None:
        """Raise or wait at one layer of batch ``index``; see the class."""
        number, is_spared = divmod(index, 2)
        if is_spared or number % self._num_ranks != self._rank or layer != number % self._num_layers:
            return
        if self._fault == "load-error":
            raise OSError(f"injected at layer {layer} of load {index}")
        time.sleep(self._stall_s)


def spoiled_heads(rank: int) -> dict[str, str]:
    """Environment of a server on whose rank heads are computed wrongly, so that their proof fails."""
    return {**WITH_PLUGIN, _SPOIL_HEADS_OF_RANK: str(rank)}


def slow_answers(path: Path) -> dict[str, str]:
    """Environment of a server whose daemon answers later by the seconds in the file ``path``, if there is
    one."""
    return {**WITH_PLUGIN, _SLOW_ANSWERS: str(path)}


def faulty_loads(fault: str) -> dict[str, str]:
    """Environment of a server whose loads fail or stop; see ``FaultyLoads``."""
    return {**WITH_PLUGIN, _FAULT: fault}


def register() -> None:
    """Called by SGLang in every process of the server, before its arguments are read."""
    PLANNERS[RandomPlanner.name] = RandomPlanner()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get(_SENDS):
        from sglang.srt.disaggregation.mooncake.conn import KVPoll, MooncakeKVManager, MooncakeKVSender

        # It would copy slots to memory that CUDA locks.
        MooncakeKVSender.supports_host_tensor_indices = False
        # Its sending thread ends for good if a request that was sent is cleared between two looks at it.
        MooncakeKVManager.check_status = lambda self, room: self.request_status.get(room, KVPoll.Success)
    for variable, target, hook in _HOOKS:
        if os.environ.get(variable):
            HookRegistry.register(target, hook, HookType.AROUND)


def skip_heads(original: Any, *args: Any) -> None:
    """AROUND hook of ``RestoreForward._recompute``: leave the slots of heads as they are."""


def spoil_heads(original: Any, recompute: Any, heads: Any, *args: Any) -> None:
    """AROUND hook of ``HeadRecompute.run``: takes the last layer's keys away from what it has written."""
    from sglang.srt.runtime_context import get_parallel

    original(recompute, heads, *args)
    if get_parallel().tp_rank == int(os.environ[_SPOIL_HEADS_OF_RANK]):
        keys, _ = recompute._pool.buffers(recompute._pool.num_layers - 1)
        for head in heads:
            keys.index_fill_(0, head.slots[head.start : head.ends[-1]], 0)


def round_otherwise(original: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of ``HeadAttention.forward``: moves its output by up to a step of its type."""
    import torch

    output = original(*args, **kwargs)
    return output * (1 + torch.finfo(output.dtype).eps * (2 * torch.rand_like(output) - 1))


def spoil_states(original: Any, store: Any, reservation: Any, manifest: Any, checksums: Any) -> Any:
    """AROUND hook of ``DaemonStore.commit``: see ``SPOILED_STATES``. The checksums are those of before."""
    if manifest.model.dtype == "state":
        reservation.blocks[-1][0] ^= 1
    return original(store, reservation, manifest, checksums)


def answer_late(original: Any, channels: Any, request: Any, *args: Any) -> Any:
    """AROUND hook of ``RequestChannels.ask``: see ``slow_answers``."""
    answer = original(channels, request, *args)
    path = Path(os.environ[_SLOW_ANSWERS])
    if path.exists():
        time.sleep(float(path.read_text()))
    return answer


def inject_faults(original: Any, loader: Any, store: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND hook of ``LayerWiseLoader.__init__``: see ``faulty_loads``."""
    from sglang.srt.runtime_context import get_parallel

    ranks, patience_s = get_parallel(), kwargs["patience_s"]
    faults = FaultyLoads(os.environ[_FAULT], ranks.tp_rank, ranks.tp_size, pool.num_layers, patience_s)
    original(loader, store, pool, *args, before_layer=faults.before_layer, **kwargs)


def set_alone(original: Any, *args: Any) -> None:
    """AROUND hook of ``update_status``, which looks and then sets: what is set between would be lost."""
    with _SETTING_STATUS:
        original(*args)


_HOOKS: tuple[tuple[str, str, Any], ...] = (
    (_SKIP_HEADS, "krul_sglang.engine.restore.restore_forward.RestoreForward._recompute", skip_heads),
    (_LEAVE_OUT_DRAFTS, "krul_sglang.engine.restore.draft_loads.DraftLoads.lease", lambda *_: {}),
    (_LEAVE_OUT_STATES, "krul_sglang.engine.restore.loading.LayerWiseLoader._load_states", lambda *_: None),
    (_SPOIL_STATES, "krul_backend.daemon.client.daemon_store.DaemonStore.commit", spoil_states),
    (_SPOIL_HEADS_OF_RANK, "krul_sglang.adapter.head_recompute.HeadRecompute.run", spoil_heads),
    (_ROUND_HEADS, "krul_sglang.adapter.head_attention.HeadAttention.forward", round_otherwise),
    (_SLOW_ANSWERS, "krul_backend.daemon.client.request_channel.RequestChannels.ask", answer_late),
    (_FAULT, "krul_sglang.engine.restore.loading.LayerWiseLoader.__init__", inject_faults),
    (_SENDS, "sglang.srt.disaggregation.common.conn.CommonKVManager.update_status", set_alone),
)
"""Environment variable, what is hooked if it is set, and the hook around it."""
