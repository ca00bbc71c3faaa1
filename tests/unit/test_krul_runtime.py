"""The one object that hooks find at SGLang's objects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from krul_sglang.adapter.hook_targets import IncompatibleEngineError
from krul_sglang.adapter.runtime import KrulRuntime
from krul_sglang.config import KrulConfig


def test_all_objects_carry_the_same_runtime_under_one_name() -> None:
    scheduler, runner = SimpleNamespace(), SimpleNamespace()
    runtime = KrulRuntime(KrulConfig())
    for sglang_object in (scheduler, runner):
        runtime.attach_to(sglang_object)
        assert KrulRuntime.find(sglang_object) is KrulRuntime.of(sglang_object) is runtime
        assert vars(sglang_object) == {"krul": runtime}


def test_a_server_without_krul_has_none_and_a_hook_that_needs_it_says_so() -> None:
    assert KrulRuntime.find(SimpleNamespace()) is None
    with pytest.raises(IncompatibleEngineError, match="SimpleNamespace has no KrulRuntime: a hook"):
        KrulRuntime.of(SimpleNamespace())


def test_a_field_that_is_read_too_early_is_named() -> None:
    with pytest.raises(AttributeError, match="'KrulRuntime' object has no attribute 'engine'"):
        _ = KrulRuntime(KrulConfig()).engine
