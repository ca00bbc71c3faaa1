from __future__ import annotations

from typing import Any

import pytest
import torch

from krul_sglang.engine.kv_pool import DevicePool
from krul_sglang.engine.unsupported import RULES, UnsupportedSetupError, check_flags, check_model, flags_of

REFUSED: dict[str, Any] = {
    "enable_hierarchical_cache": True,
    "hicache_storage_backend": "file",
    "enable_lmcache": True,
    "enable_flexkv": True,
    "disable_radix_cache": True,
    "pp_size": 2,
    "enable_dp_attention": True,
    "attn_dp_size": 2,
    "attn_cp_size": 2,
    "dcp_size": 2,
    "speculative_algorithm": "EAGLE",
    "disaggregation_mode": "prefill",
    "kv_cache_dtype": "fp8_e5m2",
    "enable_kv_cache_sharding": True,
    "enable_unified_memory": True,
    "enable_hisparse": True,
}


def default_flags() -> dict[str, Any]:
    from sglang.srt.server_args import ServerArgs

    return flags_of(ServerArgs(model_path="dummy"))


def test_an_ordinary_server_is_accepted() -> None:
    check_flags(default_flags())


def test_every_rule_speaks_of_a_real_server_argument() -> None:
    assert set(default_flags()) == {rule.field for rule in RULES} == set(REFUSED)


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_supported_is_refused_by_flag(field: str) -> None:
    with pytest.raises(UnsupportedSetupError) as error:
        check_flags({**default_flags(), field: REFUSED[field]})
    flag = "--" + field.replace("_", "-")
    assert flag in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["is_hybrid_swa", "is_hybrid_ssm", "is_embedding"])
def test_other_kinds_of_model_are_refused(kind: str) -> None:
    kinds = dict.fromkeys(("is_hybrid_swa", "is_hybrid_ssm", "is_embedding"), False)
    check_model(**kinds)
    with pytest.raises(UnsupportedSetupError):
        check_model(**{**kinds, kind: True})


def test_a_foreign_pool_is_refused() -> None:
    class OtherPool:
        device = torch.device("cpu")

    with pytest.raises(UnsupportedSetupError, match="OtherPool"):
        DevicePool(OtherPool())
