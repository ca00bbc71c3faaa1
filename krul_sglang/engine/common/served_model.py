"""Names the model whose KV this rank computes: the identity that stored KV must match to be used again."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from krul_backend.segment import ModelIdentity
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.models.checkpoint import Checkpoint, UnknownWeightsError

logger = logging.getLogger(__name__)


class ServedModel:
    """Owns the identity under which a rank stores KV and looks it up.

    After an update of the weights the identity is a new one, made of the old one and 16 random bytes: no
    other server and no later start has it. So it is after an update from disk, because nothing in the engine
    says that exactly one known checkpoint was loaded.

    From the beginning of a change until the device pool was empty once, KV of several weights may lie there
    side by side, and one path may hold KV of two. Nothing is stored then: ``is_settled`` is False.

    Changed on the scheduler's thread. A turn carries the identity that it was computed under, since it may be
    stored later.

    Args:
        identity: of the KV that is computed from the start on.
        is_lasting: whether another server, or a later start, may compute KV of the same identity.
    """

    def __init__(self, identity: ModelIdentity, *, is_lasting: bool = True) -> None:
        self.identity = identity
        self.is_lasting = is_lasting
        self._is_changing = False
        self._is_mixed = False

    @property
    def is_settled(self) -> bool:
        """Whether all KV in the device pool is of ``identity``."""
        return not self._is_changing and not self._is_mixed

    def begin_change(self) -> None:
        """Weights will be written from here on. May be called again before ``end_change``."""
        self._is_changing = True
        self._is_mixed = True

    def rename(self, epoch: bytes) -> None:
        """Take a new identity. Every rank passes the same 16 random bytes."""
        digest = hashlib.sha256(self.identity.config_digest.encode() + epoch).hexdigest()
        self.identity = replace(self.identity, config_digest=digest)
        self.is_lasting = False

    def end_change(self, *, is_pool_empty: bool) -> None:
        """The weights are complete: what is computed from here on is of ``identity``."""
        self._is_changing = False
        if is_pool_empty:
            self._is_mixed = False

    def empty_pool(self) -> None:
        """The device pool holds no KV now."""
        if not self._is_changing:
            self._is_mixed = False


_SETTINGS = (
    "dtype",
    "json_model_override_args",
    "load_format",
    "model_impl",
    "model_loader_extra_config",
    "modelopt_quant",
    "quantization",
    "quantize_and_serve",
    "revision",
    "rl_on_policy_target",
    "trust_remote_code",
)
"""Server arguments that change what is computed from the same files."""
_OTHER_SOURCES = (
    "kt_weight_path",
    "modelopt_checkpoint_restore_path",
    "quantization_param_path",
    "rl_quant_profile",
)
"""Server arguments that bring weights or scales from elsewhere than the model's folder."""
_FORMATS_OF_FILES = frozenset(
    {
        *("auto", "bitsandbytes", "fastsafetensors", "gguf", "instanttensor", "layered", "mistral"),
        *("npcache", "presharded", "pt", "runai_streamer", "safetensors", "sharded_state"),
    }
)
"""Load formats that read the files at the top of the model's folder, and nothing else."""


def identify_model(
    model_config: Any,
    settings: Mapping[str, Any],
    pool: DevicePool,
    of_server: RankAgreement,
    agreement: RankAgreement,
    *,
    cache_dir: Path,
    page_size: int,
    ranks_per_host: int,
) -> ServedModel:
    """Identify the model whose KV this rank's pool will hold. Every rank calls it at the same point.

    ``model_config`` is SGLang's, ``settings`` are the resolved server arguments. ``of_server`` joins all
    ranks: the first one of each host reads the weights, and a rank's KV depends on those of all.
    ``agreement`` joins those that share the KV heads; latent KV has the identity of a single rank's. If the
    weights cannot be identified, the identity is a random one: neither another server nor this one after a
    restart will find its KV.
    """
    mine, shape = b"", pool.shape
    if of_server.rank % ranks_per_host == 0:
        mine = (weights_digest(model_config, settings, cache_dir) or "unknown").encode()
    of_hosts = [digest for digest in of_server.gather_bytes(mine) if digest]
    is_known = b"unknown" not in of_hosts
    weights = b" ".join(of_hosts) if is_known else of_server.broadcast(os.urandom(16))
    config = model_config.hf_config.to_json_string(use_diff=False)
    named = repr([(name, str(settings[name])) for name in _SETTINGS])
    quantization = repr(model_config.quantization)
    digest = hashlib.sha256()
    for part in (config.encode(), named.encode(), quantization.encode(), weights):
        digest.update(len(part).to_bytes(8, "little") + part)
    identity = ModelIdentity(
        name=str(model_config.model_path),
        config_digest=digest.hexdigest(),
        dtype=pool.format,
        num_layers=pool.num_layers,
        num_kv_heads=shape.num_kv_heads,
        k_head_dim=shape.k_head_dim,
        v_head_dim=shape.v_head_dim,
        page_size=page_size,
        tp_rank=0 if pool.is_latent else agreement.rank,
        tp_size=1 if pool.is_latent else agreement.num_ranks,
    )
    return ServedModel(identity, is_lasting=is_known)


def weights_digest(model_config: Any, settings: Mapping[str, Any], cache_dir: Path) -> str | None:
    """A text that identifies these weights, and those of adapters that are there from the start; None, with a
    warning, if they cannot be identified.

    For a hub name it is the commit that the local hub cache has of it. For a local folder it is a hash of all
    bytes of its weights and settings: a sample would miss a fix of a few rows, and reading costs less than
    loading does. The hashes of files are kept in ``cache_dir``, so that unchanged files are read only once.
    """
    try:
        unknown = _why_unknown(model_config, settings)
        if unknown is None:
            # Adapters that are loaded later have ids that no other server has.
            adapters = (Checkpoint(adapter["lora_path"]) for adapter in settings["lora_paths"] or ())
            checkpoints = (checkpoint_of(model_config, settings), *adapters)
            return " ".join(checkpoint.weights_digest(cache_dir) for checkpoint in checkpoints)
    except (OSError, UnknownWeightsError) as error:
        unknown = str(error)
    logger.warning("krul: KV of this server will not be found after a restart, nor by others: %s", unknown)
    return None


def checkpoint_of(model_config: Any, settings: Mapping[str, Any]) -> Checkpoint:
    """The files that SGLang has loaded. Arguments as for ``identify_model``."""
    path, names = str(model_config.model_path), ("download_dir", "trust_remote_code")
    return Checkpoint(path, model_config.revision, *(settings[name] for name in names))


def _why_unknown(model_config: Any, settings: Mapping[str, Any]) -> str | None:
    load_format = getattr(settings["load_format"], "value", settings["load_format"])
    if load_format not in _FORMATS_OF_FILES:
        return f"with load format {load_format} the weights are not those of the model's files"
    if getattr(model_config, "model_weights", None):
        return f"the weights come from {model_config.model_weights}"
    for name in _OTHER_SOURCES:
        if settings[name]:
            return f"{name} brings weights from {settings[name]}"
    if "qlora_adapter" in str(settings["model_loader_extra_config"]):
        return "an adapter is merged into the weights"
    return None
