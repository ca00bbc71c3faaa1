"""``krul-sglang doctor``: says of a machine, and of a running server, what to change before it serves.

Each check is one row: ok, a warning (it works, but slower or with less), or a problem (it does not work).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from krul_backend.memory import format_bytes
from krul_sglang.cli.machine import DiskFacts, Facts

State = Literal["ok", "warning", "problem"]

_MIN_SHARED_BYTES = 1 << 30
"""NCCL and torch share tens of MB per rank there; containers have 64 MiB unless told otherwise."""
_MANY_BYTES = 32 << 30
"""From here on small pages are felt: pinning takes 8 million of them."""
_SLOW_DISK_BYTES_S = 0.5e9
_DISKS_ELSEWHERE = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "ceph", "lustre")
_DISKS_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Row:
    """One check. ``found`` says what there is, ``remedy`` what to change if that is not ok."""

    check: str
    state: State
    found: str
    remedy: str = ""


Outcome = tuple[State, str] | tuple[State, str, str]
"""A row without its name."""


def check_machine(facts: Facts, *, is_serving: bool = False) -> list[Row]:
    """Judge all facts. ``is_serving``: a server runs here, and has taken memory and ports already."""
    left_out = ("host memory", "ports") if is_serving else ()
    return [Row(name, *check(facts)) for name, check in CHECKS.items() if name not in left_out]


def _driver(facts: Facts) -> Outcome:
    gpu = facts.nvidia
    if not gpu.devices:
        return "ok", "no NVIDIA GPU, no driver needed"
    built = "without CUDA" if gpu.torch_cuda is None else f"for CUDA {gpu.torch_cuda[0]}.{gpu.torch_cuda[1]}"
    runs = "" if gpu.driver_cuda is None else f" runs CUDA {gpu.driver_cuda[0]}.{gpu.driver_cuda[1]}"
    found = f"driver {gpu.driver or 'of unknown version'}{runs}; torch {gpu.torch} was built {built}"
    reason = gpu.why_unusable()
    return ("ok", found) if reason is None else ("problem", f"{found}: {reason.why}", reason.remedy)


def _devices(facts: Facts) -> Outcome:
    gpu = facts.nvidia
    if not gpu.devices:
        return (
            "warning",
            "no GPU: SGLang computes on the CPU, which is for trying only",
            "use a machine with one",
        )
    found = f"{len(gpu.devices)} present ({gpu.devices[0]}), {gpu.num_usable} usable"
    if gpu.num_usable == 0:
        return "problem", found, "see driver; --device cpu serves without them"
    if gpu.num_usable < len(gpu.devices):
        return "warning", f"{found}; CUDA_VISIBLE_DEVICES={gpu.visible}", "unset CUDA_VISIBLE_DEVICES for all"
    return "ok", found


def _nvcc(facts: Facts) -> Outcome:
    compiler, torch_cuda = facts.compiler, facts.nvidia.torch_cuda
    if not facts.nvidia.devices:
        return "ok", "not needed without a GPU"
    if facts.has_compiled_kernels:
        return "ok", "not needed: flashinfer-jit-cache is installed"
    install = "pip install nvidia-cuda-nvcc, or install a CUDA toolkit and set CUDA_HOME"
    if compiler is None:
        return "problem", "there is none: FlashInfer's kernels cannot be compiled", install
    found = f"{compiler.folder / 'bin' / 'nvcc'} (by {compiler.source})"
    if compiler.version is None:
        return "problem", f"{found} does not run", f"correct or unset {compiler.source}; or {install}"
    if not compiler.links:
        return (
            "problem",
            f"{found}, but {compiler.folder} has no lib64/libcudart.so",
            "unset CUDA_HOME: krul makes a toolkit of a wheel's nvcc; or point it to a whole toolkit",
        )
    if facts.missing_tools:
        missing = " and ".join(facts.missing_tools)
        return "problem", f"{found}, but no {missing}", f"install {missing} (build-essential, ninja-build)"
    found += f", CUDA {compiler.version[0]}.{compiler.version[1]}"
    if compiler.headers is not None and compiler.headers != compiler.version:
        headers = f"{compiler.headers[0]}.{compiler.headers[1]}"
        return (
            "problem",
            f"{found}, but headers of {headers}, which FlashInfer's sources refuse",
            f"use nvcc of the headers' version: pip install 'nvidia-cuda-nvcc=={headers}.*' "
            f"'nvidia-cuda-crt=={headers}.*' 'nvidia-nvvm=={headers}.*' for a wheel's",
        )
    if torch_cuda is not None and compiler.version[0] != torch_cuda[0]:
        return "warning", f"{found}; torch is for CUDA {torch_cuda[0]}", f"use nvcc of CUDA {torch_cuda[0]}"
    return "ok", found


def _flashinfer(facts: Facts) -> Outcome:
    if not facts.nvidia.devices:
        return "ok", "not used on a CPU"
    if facts.flashinfer_error:
        found = f"cannot be imported: {facts.flashinfer_error}; heads are recomputed by torch, more slowly"
        return "warning", found, "pip install flashinfer-python, of the version that SGLang asks for"
    return "ok", facts.flashinfer


def _pinning(facts: Facts) -> Outcome:
    if not facts.nvidia.devices and not facts.uses_mooncake:
        return "ok", "nothing is pinned without a GPU"
    if facts.lock_limit is None:
        return "ok", "no limit"
    found = f"the limit on locked memory is {format_bytes(facts.lock_limit)}"
    if facts.lock_limit >= facts.host_memory:
        return "ok", found
    return (
        "warning",
        f"{found}, host_memory {format_bytes(facts.host_memory)}: a refusal makes copies slow, and RDMA fail",
        "ulimit -l unlimited; LimitMEMLOCK=infinity of a service; --ulimit memlock=-1 of a container",
    )


def _huge_pages(facts: Facts) -> Outcome:
    found = f"{facts.huge_pages or 'unknown'}, for shared memory {facts.shared_huge_pages or 'unknown'}"
    folder = "/sys/kernel/mm/transparent_hugepage"
    if facts.huge_pages == "never":
        return "warning", found, f"echo madvise > {folder}/enabled"
    is_large = facts.host_memory >= _MANY_BYTES and bool(facts.nvidia.devices)
    if is_large and facts.shared_huge_pages not in ("always", "within_size", "advise", "force"):
        slow = f"{found}: pinning {format_bytes(facts.host_memory)} of small pages takes long"
        return "warning", slow, f"echo advise > {folder}/shmem_enabled"
    return "ok", found


def _numa(facts: Facts) -> Outcome:
    if facts.num_nodes == 1:
        return "ok", "one node"
    found = f"{facts.num_nodes} nodes"
    if not facts.gpu_nodes:
        return "ok", f"{found}, no GPU at any of them"
    at = f"{found}, GPUs at " + ", ".join(map(str, facts.gpu_nodes))
    if not facts.spread_error:
        return "ok", f"{at}: stored KV is spread over these"
    far = f"{at}: stored KV may lie at another node than the GPU that reads it ({facts.spread_error})"
    if len(facts.gpu_nodes) == 1:
        (node,) = facts.gpu_nodes
        return "warning", far, f"start the server under numactl --cpunodebind={node} --membind={node}"
    return "warning", far, "in a container --cap-add SYS_NICE; else one server per node under numactl"


def _memory(facts: Facts) -> Outcome:
    found = f"{format_bytes(facts.available_bytes)} available, host_memory {format_bytes(facts.host_memory)}"
    if facts.host_memory_error:
        return "problem", facts.host_memory_error, "set a smaller host_memory"
    if facts.host_memory > facts.available_bytes:
        return "problem", found, "set a smaller host_memory, or end other programs"
    if facts.host_memory > 0.9 * facts.available_bytes:
        return "warning", f"{found}: next to nothing is left", "leave a tenth for the model's loading"
    return "ok", found


def _shared_memory(facts: Facts) -> Outcome:
    found = f"{format_bytes(facts.shared_bytes)} free; krul's own memory does not count there"
    if facts.shared_bytes < _MIN_SHARED_BYTES:
        return "warning", f"{found}, that of NCCL and torch does", "--shm-size 8g of a container"
    return "ok", found


def _ssd(facts: Facts) -> Outcome:
    outcomes = [_disk(disk) for disk in facts.disks]
    if not outcomes:
        return "ok", "no ssd_dir is set"
    found, free_bytes = "; ".join(each[1] for each in outcomes), sum(disk.free_bytes for disk in facts.disks)
    problem = next((each for each in outcomes if each[0] == "problem"), None)
    if problem is None and facts.ssd_capacity is not None and facts.ssd_capacity > free_bytes:
        capacity = format_bytes(facts.ssd_capacity)
        problem = "problem", f"{found}, ssd_capacity {capacity}", "set a smaller ssd_capacity, or make room"
    return problem or next((each for each in outcomes if each[0] == "warning"), ("ok", found))


def _disk(disk: DiskFacts) -> Outcome:
    if disk.error:
        return (
            "problem",
            f"{disk.path}: {disk.error}",
            "choose a folder on a local disk that this user may write",
        )
    found = (
        f"{disk.path} ({disk.file_system}): {format_bytes(disk.free_bytes)} free, reads "
        f"{disk.read_bytes_s / 1e9:.2f} GB/s, writes {disk.write_bytes_s / 1e9:.2f} GB/s"
    )
    if disk.file_system in _DISKS_IN_MEMORY:
        return "warning", f"{found}: this is memory", "choose a disk, or a larger host_memory"
    if disk.file_system.split(".")[0] in _DISKS_ELSEWHERE:
        return (
            "warning",
            f"{found}: not a local disk",
            "choose a local disk; mooncake or bucket for a network",
        )
    if disk.read_bytes_s < _SLOW_DISK_BYTES_S:
        return (
            "warning",
            f"{found}: slow for KV",
            "choose an NVMe disk; computing is often sooner than this one",
        )
    return "ok", found


def _ports(facts: Facts) -> Outcome:
    shown = ", ".join(map(str, facts.ports))
    if facts.taken_ports:
        taken = ", ".join(map(str, facts.taken_ports))
        return "problem", f"in use: {taken}", "choose others: --port, metrics_port, hints_port"
    return "ok", f"free: {shown}"


def _sglang(facts: Facts) -> Outcome:
    if facts.sglang_error:
        return "problem", facts.sglang_error, "install the release that krul-sglang asks for"
    return "ok", facts.sglang


def _hooks(facts: Facts) -> Outcome:
    if facts.hooks_error:
        return "problem", facts.hooks_error, "install SGLang again, unchanged"
    return "ok", "all are there"


CHECKS: Mapping[str, Callable[[Facts], Outcome]] = {
    "driver": _driver,
    "devices": _devices,
    "nvcc": _nvcc,
    "FlashInfer": _flashinfer,
    "pinning": _pinning,
    "huge pages": _huge_pages,
    "NUMA": _numa,
    "host memory": _memory,
    "/dev/shm": _shared_memory,
    "ssd_dir": _ssd,
    "ports": _ports,
    "SGLang": _sglang,
    "hook targets": _hooks,
}


def check_server(url: str, *, api_key: str | None = None, timeout_s: float = 30.0) -> list[Row]:
    """Ask a running server for krul's state, and judge that.

    Raises:
        CannotRunError: the server cannot be reached, or runs without krul or with another version of it.
    """
    from krul_sglang.cli.server_client import CannotRunError, open_client, request, states_with_krul

    with open_client(url, api_key=api_key, timeout_s=timeout_s) as client:
        info = request(client, "GET", "/server_info")
        states = states_with_krul(client, info)
    rows = []
    try:
        for rank, state in enumerate(states):
            before = "server" if len(states) == 1 else f"server, replica {rank}"
            for name, *outcome in _server_checks(state["krul"], str(info.get("device"))):
                rows.append(Row(f"{before}: {name}", *outcome))
    except (KeyError, TypeError, AttributeError) as error:
        raise CannotRunError(
            f"the server at {url} runs another version of krul-sglang: it tells of its state in another way "
            f"({error!r})"
        ) from None
    return rows


def _server_checks(krul: Mapping[str, Any], device: str) -> Iterator[tuple[Any, ...]]:
    restore, daemon, weights = krul["restore"], krul["daemon"], krul["weights"]
    mode, kernels = restore["mode"], restore["kernels"]
    shown = f"{mode['planner']}: {mode['why']}"
    if mode["why"] == "as configured":
        yield "planner", "ok", shown
    else:
        yield "planner", "warning", shown, "whole prefixes are loaded; the log has the reason in full"
    shown = ", ".join(f"{part} by {kernel}" for part, kernel in kernels.items())
    is_slow = kernels["heads"] == "torch" or kernels["coder"] == "torch"
    if is_slow and device != "cpu":
        yield "kernels", "warning", shown, "see FlashInfer and nvcc above, on the machine that serves"
    else:
        yield "kernels", "ok", shown
    if weights["is_settled"]:
        yield "weights", "ok", "settled"
    else:
        yield (
            "weights",
            "problem",
            "changed beside KV of the old ones: nothing is stored",
            "POST /flush_cache",
        )
    if daemon["is_connected"]:
        yield "daemon", "ok", f"connected, {daemon['endpoint']}"
    else:
        yield (
            "daemon",
            "problem",
            f"gone: {daemon['endpoint']}",
            "see its log; start krul-backend if it is yours",
        )
    rescued = restore["forward"]["rescued_requests"]
    if rescued:
        yield "loads", "warning", f"{rescued} failed and were computed", "the log has one line for each cause"
    else:
        yield "loads", "ok", "none failed"
    dropped = {cause: count for cause, count in krul["offload"]["dropped_turns"].items() if count}
    if dropped:
        shown = ", ".join(f"{count} {cause}" for cause, count in dropped.items())
        yield "turns", "warning", f"not stored: {shown}", "docs/serving.md says what each cause means"
    else:
        yield "turns", "ok", "none was dropped"


def has_problem(rows: Sequence[Row]) -> bool:
    return any(row.state == "problem" for row in rows)


def to_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Plain values for ``--json``."""
    return {"passed": not has_problem(rows), "rows": [asdict(row) for row in rows]}


def print_rows(rows: Sequence[Row], console: Any) -> None:
    """Print a table, and how many problems and warnings there are."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warning": "yellow", "problem": "red"}
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to change", overflow="fold")
    for row in rows:
        table.add_row(row.check, Text(row.state, style=colours[row.state]), Text(row.found), Text(row.remedy))
    console.print(table)
    counts = {state: sum(row.state == state for row in rows) for state in ("problem", "warning")}
    console.print(f"problems: {counts['problem']}, warnings: {counts['warning']}", highlight=False)
