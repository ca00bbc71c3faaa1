"""Loads the bases that the served model's KV is compressed in, for the strategy ``subspace``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from krul_backend.codec.coefficients.coders import FixedWidthCoder, RansCoder
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.errors import CodecError, ConfigError
from krul_backend.segment import ModelIdentity
from krul_sglang.config import KrulConfig
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.unsupported import FOREIGN_ROTARY
from krul_sglang.models.checkpoint import UnknownWeightsError, bases_path


def load_subspace(
    config: KrulConfig, model: ModelIdentity, pool: DevicePool, rotary: RotaryTable | None
) -> SubspaceCodec:
    """The codec of the served model on one rank, with the bases that were learned from its weights.

    Raises:
        ConfigError: there are none, or they cannot be read.
        UnsupportedSetupError: a model whose keys keep their rotary embedding.
    """
    if rotary is None:
        raise FOREIGN_ROTARY.error(model.name)
    command = f"krul-sglang learn --model-path {model.name}"
    command += f" --tp-size {model.tp_size}" if model.tp_size > 1 else ""
    cache_dir = Path(config.cache_dir).expanduser()
    try:
        path = bases_path(model.name, cache_dir, model.tp_rank, model.tp_size)
        bases = ModelBases.load(path) if path.exists() else None
    except (CodecError, UnknownWeightsError, OSError) as error:
        raise ConfigError(f'strategy = "subspace": {error}; learn bases with `{command}`') from error
    if bases is None:
        raise ConfigError(
            f'strategy = "subspace" needs bases that were learned from these weights, and there are none at '
            f"{path}: run `{command}` once"
        )
    learned = replace(bases.shape, dtype=pool.shape.dtype)
    if learned != pool.shape or bases.num_layers != pool.num_layers:
        raise ConfigError(
            f"the bases in {path} are for {bases.num_layers} layers of {bases.shape}, the model has "
            f"{pool.num_layers} of {pool.shape}"
        )
    of_pool = ModelBases(pool.shape, bases.groups, bases.damage_factor)
    return SubspaceCodec(of_pool.to(pool.device), rotary, (RansCoder(), FixedWidthCoder()))
