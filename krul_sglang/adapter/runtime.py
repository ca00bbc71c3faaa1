"""Holds all that krul keeps of one rank's server, in the one object it attaches to SGLang's objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from krul_sglang.adapter.hook_targets import IncompatibleEngineError
from krul_sglang.engine.common.transfer_gate import TransferGate

if TYPE_CHECKING:
    # Hooks are registered in every process of SGLang, where these modules need not be imported.
    from krul_backend.codec.rotary import RotaryTable
    from krul_sglang.adapter.linker import KrulLinker
    from krul_sglang.adapter.radix_cache import KrulRadixCache
    from krul_sglang.config import KrulConfig
    from krul_sglang.engine.budget.provenance import KvProvenance
    from krul_sglang.engine.budget.served_bases import ServedBases
    from krul_sglang.engine.capture.query_capture import QueryCapture
    from krul_sglang.engine.common.agreement import RankAgreement
    from krul_sglang.engine.common.draft_kv import DraftKV
    from krul_sglang.engine.common.kv_pool import DevicePool
    from krul_sglang.engine.common.served_model import ServedModel
    from krul_sglang.engine.common.store_connection import StoreConnection
    from krul_sglang.engine.restore.restore_forward import RestoreForward

_ATTRIBUTE = "krul"


@dataclass(eq=False)
class KrulRuntime:
    """Holds all that krul keeps for one rank. Hooks find it at the SGLang object that they are given.

    The scheduler, its model runner and the parameters of its cache carry the same object. The start fills
    the fields in this order; a field that is read before it is set raises AttributeError.

    ``connection`` is this rank's way to the daemon; the linker closes it. ``capture`` is None if no attention
    is recorded, ``rotary`` if keys are stored with their rotary embedding, ``bases`` and ``provenance``
    unless turns are stored within an error budget. ``agreement`` joins the threads of all ranks that store
    turns, ``restore_agreement`` their scheduler threads.
    ``draft_runners`` are SGLang's runners of a draft model, whose KV ``draft`` is; none without one.
    ``num_ranks_here`` share the host memory of this host.
    ``restore_forward`` is None until forwards may restore. ``gate`` knows when forwards and restores run.
    """

    # Before the scheduler is made.
    config: KrulConfig
    gate: TransferGate = field(default_factory=TransferGate, init=False)
    # When the model is loaded, before CUDA graphs are captured.
    model_runner: Any = field(init=False)
    draft_runners: tuple[Any, ...] = ()
    capture: QueryCapture | None = None
    # By the factory of the cache.
    model: ServedModel = field(init=False)
    pool: DevicePool = field(init=False)
    connection: StoreConnection = field(init=False)
    num_ranks_here: int = 1
    draft: DraftKV | None = None
    rotary: RotaryTable | None = None
    bases: ServedBases | None = None
    agreement: RankAgreement = field(init=False)
    restore_agreement: RankAgreement = field(init=False)
    # By the linker, which SGLang makes together with the cache.
    linker: KrulLinker = field(init=False)
    provenance: KvProvenance | None = None
    # When the cache is there.
    cache: KrulRadixCache = field(init=False)
    restore_forward: RestoreForward | None = None

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
