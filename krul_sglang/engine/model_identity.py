"""Which model's KV this is: the identity that stored KV must match to be used again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from krul_backend.codec.interface import LayerShape
from krul_backend.segment import ModelIdentity

_WEIGHT_SAMPLE_BYTES = 1 << 20


def build_model_identity(
    model_config: Any, shape: LayerShape, *, num_layers: int, page_size: int, tp_rank: int, tp_size: int
) -> ModelIdentity:
    """Identity of the KV that one rank's pool holds.

    ``model_config`` is SGLang's; its Hugging Face configuration (with any overrides applied), revision,
    quantization and a sample of local weight files enter the digest.
    """
    digest = hashlib.sha256()
    digest.update(model_config.hf_config.to_json_string(use_diff=False).encode())
    digest.update(repr((model_config.revision, model_config.quantization)).encode())
    _digest_weights(digest, Path(model_config.model_path))
    return ModelIdentity(
        name=str(model_config.model_path),
        config_digest=digest.hexdigest(),
        dtype=str(shape.dtype).removeprefix("torch."),
        num_layers=num_layers,
        num_kv_heads=shape.num_kv_heads,
        k_head_dim=shape.k_head_dim,
        v_head_dim=shape.v_head_dim,
        page_size=page_size,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


def _digest_weights(digest: Any, model_path: Path) -> None:
    """Sizes, beginnings and ends of local weight files: cheap, and two fine-tunes differ in them.

    A hub name is identified by its name and revision instead.
    """
    if not model_path.is_dir():
        return
    for path in sorted((*model_path.glob("*.safetensors"), *model_path.glob("*.bin"))):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_WEIGHT_SAMPLE_BYTES))
            file.seek(max(0, size - _WEIGHT_SAMPLE_BYTES))
            digest.update(file.read(_WEIGHT_SAMPLE_BYTES))
