"""What requests say of their conversation: the tenant, and how long it is to be kept."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from krul_sglang.engine.save.turn import KEEP_PARAMETER, TurnOwner, owner_of, tenant_of


def request(custom_params: Any = None, extra_key: str | None = None, cache_salt: str | None = None) -> Any:
    """What ``owner_of`` looks at of SGLang's request."""
    return SimpleNamespace(
        rid="r",
        kv=SimpleNamespace(req_pool_idx=5),
        extra_key=extra_key,
        cache_salt=cache_salt,
        sampling_params=SimpleNamespace(custom_params=custom_params),
    )


def keep_s(value: object) -> float | None:
    return owner_of(request({KEEP_PARAMETER: value})).keep_s


@pytest.mark.parametrize("custom_params", [None, {}, {"other": 3}, {KEEP_PARAMETER: None}])
def test_requests_that_say_nothing(custom_params: Any) -> None:
    assert owner_of(request(custom_params)) == TurnOwner("r", 5, tenant="", keep_s=None)


def test_a_request_keeps_its_conversation_for_some_seconds() -> None:
    assert keep_s(600) == 600.0
    assert keep_s(0.5) == 0.5
    # A day at most.
    assert keep_s(1e9) == 86400.0


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), True, "600", [600]])
def test_what_is_no_number_of_seconds_is_ignored_and_said(
    value: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert keep_s(value) is None
    (record,) = caplog.records
    assert KEEP_PARAMETER in record.getMessage()
    assert repr(value) in record.getMessage()


def test_parameters_of_another_shape_are_not_looked_at() -> None:
    assert owner_of(request([KEEP_PARAMETER])).keep_s is None


def test_a_tenant_is_its_namespace_and_shows_no_secret() -> None:
    tenant = owner_of(request(extra_key="team", cache_salt="secret")).tenant
    assert tenant == tenant_of("team", "secret")
    assert len(tenant) == 16
    assert "secret" not in tenant
    assert tenant_of(None, None) == tenant_of("", None) == tenant_of(None, "") == ""


def test_tenants_differ_by_key_and_by_salt() -> None:
    names = [("a", None), (None, "a"), ("a", "b"), ("ab", None), (None, "ab"), ("b", "a"), ("", "ab")]
    # An empty key is none.
    assert len({tenant_of(*name) for name in names}) == len(names) - 1
