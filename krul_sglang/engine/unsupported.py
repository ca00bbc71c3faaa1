"""Server settings that krul cannot serve yet: refused at start, with the flag's name.

Running half of such a server would store or restore wrong KV, so the list errs on the side of refusing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from krul_backend.errors import KrulError


class UnsupportedSetupError(KrulError):
    """The server was asked to run together with something that krul does not support."""


@dataclass(frozen=True)
class Rule:
    """``flag`` is refused when ``applies`` to the value of ``field`` in the server arguments."""

    flag: str
    field: str
    applies: Callable[[Any], bool]
    reason: str


def _is_set(value: Any) -> bool:
    return bool(value)


def _is_several(value: Any) -> bool:
    return value is not None and value > 1


_OTHER_TIER = "another KV tier cannot run beside krul"
_FOREIGN_POOL = "krul does not know this KV pool"

RULES = (
    Rule("--enable-hierarchical-cache", "enable_hierarchical_cache", _is_set, _OTHER_TIER),
    Rule("--hicache-storage-backend", "hicache_storage_backend", _is_set, _OTHER_TIER),
    Rule("--enable-lmcache", "enable_lmcache", _is_set, _OTHER_TIER),
    Rule("--enable-flexkv", "enable_flexkv", _is_set, _OTHER_TIER),
    Rule("--disable-radix-cache", "disable_radix_cache", _is_set, "krul extends the radix cache"),
    Rule("--pp-size", "pp_size", _is_several, "pipeline parallelism is not supported yet"),
    Rule("--enable-dp-attention", "enable_dp_attention", _is_set, "DP attention is not supported yet"),
    Rule("--attn-dp-size", "attn_dp_size", _is_several, "DP attention is not supported yet"),
    Rule("--attn-cp-size", "attn_cp_size", _is_several, "context parallelism is not supported yet"),
    Rule("--dcp-size", "dcp_size", _is_several, "decode context parallelism is not supported yet"),
    Rule(
        "--speculative-algorithm",
        "speculative_algorithm",
        _is_set,
        "speculative decoding is not supported yet",
    ),
    Rule(
        "--disaggregation-mode",
        "disaggregation_mode",
        lambda value: value not in (None, "null"),
        "prefill/decode disaggregation is not supported yet",
    ),
    Rule(
        "--kv-cache-dtype",
        "kv_cache_dtype",
        lambda value: value not in (None, "auto", "bf16", "bfloat16"),
        "quantized KV pools are not supported yet",
    ),
    Rule("--enable-kv-cache-sharding", "enable_kv_cache_sharding", _is_set, _FOREIGN_POOL),
    Rule("--enable-unified-memory", "enable_unified_memory", _is_set, _FOREIGN_POOL),
    Rule("--enable-hisparse", "enable_hisparse", _is_set, _FOREIGN_POOL),
)


def flags_of(server_args: Any) -> dict[str, Any]:
    """What ``check_flags`` looks at, of SGLang's ``ServerArgs``.

    Raises AttributeError if SGLang dropped one of these arguments: a rule that looks at nothing is no rule.
    """
    return {rule.field: getattr(server_args, rule.field) for rule in RULES}


def check_flags(values: Mapping[str, Any]) -> None:
    """``values``: server arguments by field name, as given (``flags_of``) or resolved.

    Raises:
        UnsupportedSetupError: one line that names the flag and why.
    """
    for rule in RULES:
        value = values[rule.field]
        if rule.applies(value):
            raise UnsupportedSetupError(
                f"--radix-cache-backend krul does not run with {rule.flag} (set to {value!r}): {rule.reason}"
            )


def check_model(*, is_hybrid_swa: bool, is_hybrid_ssm: bool, is_embedding: bool) -> None:
    """Raises UnsupportedSetupError for models whose KV is not one full-attention pool."""
    if is_hybrid_swa:
        raise UnsupportedSetupError("--radix-cache-backend krul: sliding-window models are not supported yet")
    if is_hybrid_ssm:
        raise UnsupportedSetupError(
            "--radix-cache-backend krul: Mamba and hybrid models are not supported yet"
        )
    if is_embedding:
        raise UnsupportedSetupError("--radix-cache-backend krul: embedding models have no turns to restore")


def check_estimator(name: str, *, runs_graphs: bool) -> None:
    """Raises UnsupportedSetupError for an estimator of every row where forwards are replayed as graphs."""
    if runs_graphs:
        raise UnsupportedSetupError(
            f'estimator = "{name}" does not run with CUDA graphs: it reduces attention between forwards, in '
            "Python, which is the cost of the paper's way; start the server with --disable-cuda-graph, or "
            'choose estimator = "sampled"'
        )
