from __future__ import annotations

import pytest

from krul_sglang.adapter import hook_targets
from krul_sglang.adapter.hook_targets import (
    TARGETS,
    IncompatibleEngineError,
    Target,
    check_hooks_installed,
    check_signatures,
)


def test_the_installed_release_is_supported() -> None:
    hook_targets.check_version()


@pytest.mark.parametrize("target", TARGETS, ids=[target.path for target in TARGETS])
def test_the_installed_release_has(target: Target) -> None:
    """``make check-sglang`` runs this with another release."""
    check_signatures((target,))


def test_another_release_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.__version__", "9.9.9")
    with pytest.raises(IncompatibleEngineError, match=r"9\.9\.9.*0\.5\.23"):
        hook_targets.check_version()


def test_a_renamed_target_is_named() -> None:
    gone = Target("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.no_such_method", ("self",))
    with pytest.raises(IncompatibleEngineError, match=r"no_such_method does not exist"):
        check_signatures((gone,))


def test_changed_parameters_are_named() -> None:
    path = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree"
    with pytest.raises(
        IncompatibleEngineError, match=r"takes \(self, req, up_to, kwargs\), expected \(self, token\)"
    ):
        check_signatures((Target(path, ("self", "token")),))


def test_a_hook_that_was_not_applied_is_noticed() -> None:
    path = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.pretty_print"
    with pytest.raises(IncompatibleEngineError, match=r"pretty_print is not hooked"):
        check_hooks_installed((Target(path, ("self",), hooked=True),))
