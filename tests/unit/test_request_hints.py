"""What requests say of their conversation: the tenant, its name, and what is known of its future."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

from krul_backend.tiers.common.hint import NO_HINT, Hint, SessionName
from krul_sglang.engine.save.request_hints import HINTS_PARAMETER, KEEP_PARAMETER, MAX_ACTIONS, RequestHints
from krul_sglang.engine.save.turn import TurnOwner, owner_of
from krul_sglang.hints import tenant_of


def request(custom_params: Any = None, actions: list[dict[str, Any]] | None = None, **fields: Any) -> Any:
    """What ``owner_of`` looks at of SGLang's request."""
    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": actions or []}
    given = {
        "rid": "r",
        "kv": SimpleNamespace(req_pool_idx=5),
        "extra_key": None,
        "cache_salt": None,
        "session_id": None,
        "session": None,
        "sampling_params": SimpleNamespace(custom_params=custom_params),
        "kv_hints": None if actions is None else decode_kv_hints_envelope(envelope),
    }
    return SimpleNamespace(**{**given, **fields})


def action(kind: str, version: str = "1.0", **payload: Any) -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}


def hint_of(custom_params: Any = None, actions: list[dict[str, Any]] | None = None) -> Hint:
    return RequestHints().hint_of(request(custom_params, actions))


@pytest.mark.parametrize("custom_params", [None, {}, {"other": 3}, {KEEP_PARAMETER: None}, [KEEP_PARAMETER]])
def test_requests_that_say_nothing(custom_params: Any) -> None:
    hints = RequestHints()
    assert owner_of(request(custom_params, []), hints) == TurnOwner("r", 5)
    assert hints.as_dict() == {"taken": 0, "ignored": {}}


def test_custom_params_carry_a_hint() -> None:
    assert hint_of({HINTS_PARAMETER: {"next_use_s": 20, "priority": 75}}) == Hint(next_use_s=20, priority=75)
    assert hint_of({KEEP_PARAMETER: 600}) == Hint(ttl_s=600)
    # A day at most.
    assert hint_of({KEEP_PARAMETER: 1e9}) == Hint(ttl_s=86400)


@pytest.mark.parametrize(
    ("actions", "meant"),
    [
        ([action("krul.hint", ttl_s=5, next_use_s=20)], Hint(ttl_s=5, next_use_s=20)),
        ([action("krul.hint", "1", drop=True)], Hint(drop=True)),
        ([action("kv.pin", "0.1", ttl_seconds=300)], Hint(ttl_s=300)),
        ([action("kv.retain", ttl_s=300, priority=80)], Hint(ttl_s=300, priority=80)),
        ([action("kv.demote")], Hint(demote=True)),
        ([action("kv.deref")], Hint(demote=True)),
        ([action("kv.prefetch")], Hint(prefetch=True)),
        ([action("kv.pin", ttl_s=1), action("krul.hint", ttl_s=2, priority=0)], Hint(ttl_s=2, priority=0)),
    ],
)
def test_actions_of_the_envelope(actions: list[dict[str, Any]], meant: Hint) -> None:
    hints = RequestHints()
    assert hints.hint_of(request(None, actions)) == meant
    assert hints.as_dict() == {"taken": 1, "ignored": {}}


def test_actions_of_others_are_neither_read_nor_counted() -> None:
    hints = RequestHints()
    actions = [action("kv.fetch", block_hashes=[1]), action("kv.evict"), action("x", "9", ttl_s="?")]
    assert hints.hint_of(request(None, actions)) == NO_HINT
    assert hints.as_dict() == {"taken": 0, "ignored": {}}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (action("krul.hint", ttl_s="soon"), "ttl_s: got 'soon', accepted are 0 to 86400 seconds"),
        (action("krul.hint", ttl_s=-1), "ttl_s: got -1"),
        (action("krul.hint", next_use_s=float("nan")), "next_use_s: got nan"),
        (action("krul.hint", next_use_s=True), "next_use_s: got True"),
        (action("krul.hint", priority=101), "priority: got 101, accepted are 0 to 100"),
        (action("krul.hint", priority=10**5000), "priority: got a int"),
        (action("krul.hint", demote=1), "demote: got 1, accepted are true and false"),
        (action("krul.hint", drop=True, ttl_s=1), "drop: got it together"),
        (action("krul.hint", demote=True, prefetch=True), "demote: got it together with prefetch"),
        (action("krul.hint", ttl="1"), "'ttl' is no field of a hint, accepted are ttl_s, next_use_s"),
        (action("krul.hint"), "got one that says nothing"),
        (action("krul.hint", "2.0", ttl_s=1), "action_version: got '2.0', accepted are 0.x and 1.x"),
        (action("kv.retain", directives=[]), "payload: got 'directives'"),
        (action("kv.demote", start=0), "payload: got 'start', accepted is none"),
    ],
)
def test_nonsense_is_ignored_counted_and_said_once(
    bad: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    hints = RequestHints()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            # What is said beside it still counts.
            assert hints.hint_of(request(None, [bad, action("kv.pin", ttl_s=7)])) == Hint(ttl_s=7)
    assert hints.as_dict() == {"taken": 3, "ignored": {bad["action_type"]: 3}}
    (record,) = caplog.records
    assert said in record.getMessage()


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan"), True, "600", [600]])
def test_nonsense_in_custom_params_is_ignored_too(value: object) -> None:
    hints = RequestHints()
    assert hints.hint_of(request({KEEP_PARAMETER: value, HINTS_PARAMETER: value})) == NO_HINT
    assert hints.as_dict() == {"taken": 0, "ignored": {KEEP_PARAMETER: 1, HINTS_PARAMETER: 1}}


def test_many_causes_are_logged_few_times(caplog: pytest.LogCaptureFixture) -> None:
    hints = RequestHints()
    for number in range(100):
        hints.hint_of(request({HINTS_PARAMETER: {f"field-{number}": 1}}))
    assert hints.as_dict()["ignored"] == {HINTS_PARAMETER: 100}
    assert len(caplog.records) == 1


def test_of_an_envelope_only_the_first_actions_are_read() -> None:
    actions = [action("kv.pin", ttl_s=1)] * MAX_ACTIONS + [action("kv.pin", ttl_s=2)]
    assert hint_of(None, actions) == Hint(ttl_s=1)


def test_a_conversation_is_named_by_its_session() -> None:
    hints = RequestHints()
    own = request(session_id="agent", extra_key="team")
    assert owner_of(own, hints).session == SessionName(tenant_of("team", None), "agent")
    of_sglang = request(session=SimpleNamespace(session_id="s-1"))
    assert owner_of(of_sglang, hints).session == SessionName("", "s-1")
    assert owner_of(request(session_id="n" * 257), hints).session is None
    assert owner_of(request(session_id=""), hints).session is None
    assert hints.as_dict()["ignored"] == {"session_id": 2}


def test_a_tenant_is_its_namespace_and_shows_no_secret() -> None:
    tenant = owner_of(request(extra_key="team", cache_salt="secret"), RequestHints()).tenant
    assert tenant == tenant_of("team", "secret")
    assert len(tenant) == 16
    assert "secret" not in tenant
    assert tenant_of(None, None) == tenant_of("", None) == tenant_of(None, "") == ""


def test_tenants_differ_by_key_and_by_salt() -> None:
    names = [("a", None), (None, "a"), ("a", "b"), ("ab", None), (None, "ab"), ("b", "a"), ("", "ab")]
    # An empty key is none.
    assert len({tenant_of(*name) for name in names}) == len(names) - 1
