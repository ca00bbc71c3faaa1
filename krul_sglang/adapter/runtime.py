"""Holds all that krul keeps of one rank's server, in the one object it attaches to SGLang's objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from krul_sglang.adapter.hook_targets import IncompatibleEngineError
from krul_sglang.engine.common.transfer_gate import TransferGate

if TYPE_CHECKING:
    # Hooks are registered in every process of SGLang, where these modules need not be imported.
    from krul_sglang.adapter.device_share import DeviceShare
    from krul_sglang.adapter.linker import KrulLinker
    from krul_sglang.adapter.radix_cache import KrulRadixCache
    from krul_sglang.adapter.rank_engine import RankEngine
    from krul_sglang.config import KrulConfig
    from krul_sglang.engine.capture import QueryCapture

_ATTRIBUTE = "krul"


@dataclass(eq=False)
class KrulRuntime:
    """Holds all that krul keeps for one rank. Hooks find it at the SGLang object that they are given.

    The scheduler, its model runner and the parameters of its cache carry the same object. SGLang starts in
    steps, and makes the linker itself. So this is the one place where each step leaves what it has made, in
    this order, for the next one and for hooks; a field that is read before it is set raises AttributeError.

    ``gate`` knows when forwards and restores run. ``capture`` is None if no attention is recorded.
    ``draft_runners`` are SGLang's runners of a draft model; none without one.
    """

    # Before the scheduler is made.
    config: KrulConfig
    gate: TransferGate = field(default_factory=TransferGate, init=False)
    # When the model is loaded, before SGLang sizes its KV pool.
    share: DeviceShare = field(init=False)
    # Before CUDA graphs are captured.
    draft_runners: tuple[Any, ...] = ()
    capture: QueryCapture | None = None
    # By the factory of the cache: before the linker is made, and when both are there.
    engine: RankEngine = field(init=False)
    cache: KrulRadixCache = field(init=False)

    @property
    def linker(self) -> KrulLinker:
        return self.cache.linker.cache_linker

    def attach_to(self, sglang_object: Any) -> None:
        """Let hooks that are given this object find the runtime there."""
        setattr(sglang_object, _ATTRIBUTE, self)

    @staticmethod
    def find(sglang_object: Any) -> KrulRuntime | None:
        """The runtime at an object of SGLang's; None on a server that runs without krul."""
        runtime: KrulRuntime | None = getattr(sglang_object, _ATTRIBUTE, None)
        return runtime

    @staticmethod
    def of(sglang_object: Any) -> KrulRuntime:
        """As ``find``, where krul must be there.

        Raises:
            IncompatibleEngineError: nothing is attached, because a hook of the start did not run.
        """
        runtime = KrulRuntime.find(sglang_object)
        if runtime is None:
            raise IncompatibleEngineError(
                f"{type(sglang_object).__name__} has no KrulRuntime: a hook of krul's start did not run, "
                "and krul would never load or store anything"
            )
        return runtime
