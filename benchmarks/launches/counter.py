"""Counts what a GPU would be told to do, on any machine: launches, waits of the host, copies and memory.

Tensors of the device are ``DeviceTensor``: their numbers lie in host memory, and torch refuses to mix them
with tensors of the host as it does on a GPU. A dispatch mode sees every operation on them, computes it on the
host and counts it. So the product's own Python runs as it would beside a GPU.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from krul_backend.codec.rotary import RotaryTable
from krul_backend.device import Device

DEVICE = torch.device("meta", 0)
"""The name of the device in torch: a kind that needs no driver."""

NO_KERNEL = frozenset(
    {
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
        "_reshape_alias", "lift_fresh", "resize_", "set_", "record_stream", "is_same_size",
    }
)  # fmt: skip
"""Operations that launch nothing: they only make or rename a tensor. So do all that torch itself marks as
views. Everything else on a device tensor counts as one launch, copies included, even if torch's own
implementation takes several kernels (``sort``, ``cumsum``)."""

WAITING = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"})
"""Operations for which the host waits until the device has the result. It also waits for copies between host
and device that are not ``non_blocking``, for indexing with a mask, and for streams and events."""


MIXING = frozenset({"copy_", "_foreach_copy_", "_to_copy", "index", "index_put", "index_put_"})
"""Operations that take tensors of the host and of the device together."""


class DeviceTensor(torch.Tensor):
    """A tensor of the counted device; ``held`` has its numbers."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} runs in a thread that nobody counts")


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts all threads' work on ``DEVICE`` while ``counting`` is held.

    ``launches`` and ``syncs`` are counts by place: the function of krul that asked. ``bytes_copied`` went
    between host and device. ``peak_bytes`` were taken on the device at a time, beside what was there before.
    ``device_s``: seconds in which operations of the device were computed here, and counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()
        self._num_users: Counter[int] = Counter()
        self._threads = threading.local()
        self.live_bytes = 0
        self.is_capturing = self.is_busy = False
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.launches: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.bytes_copied = 0
        self.device_s = 0.0
        self._base_bytes = self._peak_bytes = self.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes - self._base_bytes

    def launch(self, num_launches: int = 1) -> None:
        with self._lock:
            self.launches[_place()] += num_launches
            self.is_busy = True

    def wait(self) -> None:
        with self._lock:
            self.syncs[_place()] += 1
            self.is_busy = False

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside the block streams say that they record a graph."""
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def flash_attention(self, *arguments: Any, **options: Any) -> Any:
        """Stands for FlashInfer's wrapper class: each ``run`` is one launch, ``plan`` counts nothing."""

        def run(q: torch.Tensor, *buffers: Any, **scales: Any) -> torch.Tensor:
            self.launch()
            return torch.empty_like(q)

        return SimpleNamespace(plan=lambda *given, **kinds: None, run=run)

    def count_thread(self) -> None:
        """Count the calling thread, too, from here on."""
        if not getattr(self._threads, "is_counted", False):
            self._threads.is_counted = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def on_device(self, held: torch.Tensor) -> DeviceTensor:
        """A tensor of the device with these numbers."""
        made, storage = DeviceTensor(held), held.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        with self._lock:
            self._num_users[key] += 1
            if self._num_users[key] == 1:
                self.live_bytes += num_bytes
                self._peak_bytes = max(self._peak_bytes, self.live_bytes)
        weakref.finalize(made, self._dropped, key, num_bytes).atexit = False
        return made

    def _dropped(self, key: int, num_bytes: int) -> None:
        with self._lock:
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key]
                self.live_bytes -= num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        began_s = time.perf_counter()
        kwargs.pop("pin_memory", None)
        flat, how = tree_flatten((args, kwargs))
        given = [each for each in flat if isinstance(each, DeviceTensor)]
        name = func._schema.name.removeprefix("aten::")
        makes_on_device = kwargs.get("device") == DEVICE
        comes_to_host = name == "_to_copy" and kwargs.get("device", DEVICE).type == "cpu"
        if not given and not makes_on_device:
            return func(*args, **kwargs)
        is_foreign = any(isinstance(x, torch.Tensor) and x.is_cpu and x.ndim for x in flat)
        if is_foreign and name not in MIXING:
            raise RuntimeError(f"{func} of tensors of the device and of the host")
        self._count(func, name, args, kwargs, given)
        held = [each.held if isinstance(each, DeviceTensor) else each for each in flat]
        of_held = {id(each.held): each for each in given}
        args, kwargs = tree_unflatten(held, how)
        if makes_on_device:
            kwargs["device"] = torch.device("cpu")
        found = func(*args, **kwargs)
        goes_to_host = comes_to_host or (name == "copy_" and not isinstance(flat[0], DeviceTensor))
        if not goes_to_host:
            found = tree_map_only(
                torch.Tensor,
                lambda each: of_held[id(each)] if id(each) in of_held else self.on_device(each),
                found,
            )
        with self._lock:
            self.device_s += time.perf_counter() - began_s
        return found

    def _count(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Any]
    ) -> None:
        if name == "_foreach_copy_":
            for pair in zip(*args[:2], strict=True):
                self._count(func, "copy_", (*pair, *args[2:]), kwargs, given)
            return
        with self._lock:
            if not func.is_view and name not in NO_KERNEL:
                self.launch()
            if name in ("copy_", "_to_copy"):
                source = args[1] if name == "copy_" else args[0]
                target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
                if torch.device(target) != source.device:
                    self.bytes_copied += source.nbytes
                    if not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])):
                        self.wait()
            indices = args[1] if name in ("index", "index_put", "index_put_") else ()
            has_mask = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)
            if name in WAITING or has_mask or any(x is not None and x.is_cpu for x in indices):
                self.wait()


class _Stream:
    def __init__(self, counter: LaunchCounter) -> None:
        self._counter = counter

    def wait_event(self, event: object) -> None: ...

    def query(self) -> bool:
        return not self._counter.is_busy

    def synchronize(self) -> None:
        self._counter.wait()


class _Event(_Stream):
    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: object) -> float:
        return 0.0


class _Module:
    """Stands for ``torch.cuda``: the part that ``Device`` uses. Work has ended when it is queued."""

    def __init__(self, counter: LaunchCounter) -> None:
        self._counter = counter
        self._stream = _Stream(counter)

    def is_current_stream_capturing(self) -> bool:
        return self._counter.is_capturing

    def Stream(self, device: torch.device) -> _Stream:  # noqa: N802
        return _Stream(self._counter)

    def Event(self, enable_timing: bool = False) -> _Event:  # noqa: N802
        return _Event(self._counter)

    def current_stream(self, device: torch.device) -> _Stream:
        return self._stream

    def stream(self, stream: _Stream) -> Any:
        return nullcontext()

    def device(self, device: torch.device) -> Any:
        return nullcontext()

    def set_device(self, device: torch.device) -> None:
        self._counter.count_thread()

    def synchronize(self, device: torch.device) -> None:
        self._counter.wait()


def _place() -> str:
    """The innermost function of krul that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("krul_") and module != Device.__module__:
            return f"{module.rpartition('.')[2]}.{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "-"


class _Kernel:
    """Stands for a Triton kernel: ``kernel[grid](...)`` is one launch, and ``compute`` what it does."""

    def __init__(self, counter: LaunchCounter, compute: Callable[[Mapping[str, Any]], None]) -> None:
        self._counter, self._compute = counter, compute

    def __getitem__(self, grid: object) -> Any:
        def launch(**arguments: Any) -> None:
            self._counter.launch()
            began_s = time.perf_counter()
            self._compute(tree_map_only(DeviceTensor, lambda each: each.held, arguments))
            self._counter.device_s += time.perf_counter() - began_s

        return launch


def _copy_rows(given: Mapping[str, Any]) -> None:
    """What the kernel ``copy_rows`` does."""
    slots, number = given["slots"], torch.int64 if given["is_wide"] else given["k_buffer"].dtype
    block = given["block"].view(number)
    for starts, part in zip(given["starts"] * given["unit"], "kv", strict=True):
        rows = given[f"{part}_buffer"].flatten(1).view(number)
        numbers = starts[:, None] + torch.arange(rows.shape[1])
        if given["to_pool"]:
            rows[slots] = block[numbers]
        else:
            block[numbers] = rows[slots]


def _put_vectors(given: Mapping[str, Any]) -> None:
    """What the kernel ``put_group_vectors`` does."""
    rows, out, mean = given["index"], given["out"], given["mean"]
    sizes = given["k_size"], given["v_size"]
    rotary = RotaryTable(given["cos_table"], given["sin_table"], is_neox=given["is_neox"])
    for layer, block in enumerate(given["blocks"]):
        group, place = divmod(layer, given["num_layers"])
        starts = given["starts"][:, rows, None] * given["unit"]
        k, v = (block[at + torch.arange(size)] for at, size in zip(starts, sizes, strict=True))
        k = rotary.unrotate(k.view(len(rows), -1, given["k_dim"]), given["start_token"] + rows).flatten(1)
        columns = slice(place * sum(sizes), (place + 1) * sum(sizes))
        out[group, :, columns] = torch.cat([k, v.float()], 1) - mean[group, columns]
    out[:, rows < given["num_first"]] = 0
    given["lowered"].copy_(out)


@contextmanager
def counting() -> Iterator[LaunchCounter]:
    """Inside the block krul finds a GPU, on which kernels of its own are counted, and compute nothing."""
    from krul_backend import triton_rows
    from krul_backend.codec.subspace import triton_group_restore, triton_vectors

    counter = LaunchCounter()
    module = _Module(counter)
    # They find no damage.
    decoder = _Kernel(counter, lambda given: given["damaged"].zero_())
    writer = _Kernel(counter, lambda given: None)
    with ExitStack() as stack:
        for patched in (
            patch.object(torch, "get_device_module", lambda device: module),
            patch.object(Device, "runs_triton", PropertyMock(return_value=True)),
            patch.object(triton_group_restore, "decode_rans", decoder),
            patch.object(triton_group_restore, "restore_group_layer", writer),
            patch.object(triton_rows, "copy_rows", _Kernel(counter, _copy_rows)),
            patch.object(triton_vectors, "put_group_vectors", _Kernel(counter, _put_vectors)),
        ):
            stack.enter_context(patched)
        stack.enter_context(counter)
        yield counter
