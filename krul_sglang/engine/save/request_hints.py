"""Reads what a request says about the future of its conversation."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from krul_backend.errors import HintError
from krul_backend.tiers.common.hint import FIELDS, NO_HINT, Hint, SessionName, parse_hint

logger = logging.getLogger(__name__)

HINTS_PARAMETER = "krul_hints"
"""Key of a request's ``custom_params``: an object of the fields of a hint."""

KEEP_PARAMETER = "krul_keep_s"
"""An older key: the ``ttl_s`` of a hint."""

OWN_ACTION = "krul.hint"

MAX_ACTIONS = 16


def _pin(payload: Mapping[str, Any]) -> Hint:
    """The hint of a ``kv.pin`` or ``kv.retain`` about the whole conversation."""
    names = {"ttl_s": "ttl_s", "ttl_seconds": "ttl_s", "priority": "priority"}
    for name in payload:
        if name not in names:
            raise HintError(f"payload: got {name!r:.80}, accepted are {', '.join(names)}")
    return parse_hint({names[name]: value for name, value in payload.items()})


def _switch(field: str) -> Callable[[Mapping[str, Any]], Hint]:
    def hint_of(payload: Mapping[str, Any]) -> Hint:
        if payload:
            raise HintError(f"payload: got {', '.join(payload)!r:.80}, accepted is none")
        return parse_hint({field: True})

    return hint_of


_ACTIONS: dict[str, Callable[[Mapping[str, Any]], Hint]] = {
    OWN_ACTION: parse_hint,
    "kv.pin": _pin,
    "kv.retain": _pin,
    "kv.demote": _switch("demote"),
    "kv.deref": _switch("demote"),
    "kv.prefetch": _switch("prefetch"),
}
"""By the type of an action in SGLang's envelope. Other actions are for others."""


class RequestHints:
    """Reads the hints of requests, and counts them. For the scheduler's thread.

    What cannot be used is ignored, counted by where it was given, and logged once per cause.
    """

    def __init__(self) -> None:
        self._num_taken = 0
        self._ignored: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()

    def as_dict(self) -> dict[str, Any]:
        """``taken``: requests with a hint that can be used. ``ignored``: other hints, by their source."""
        return {"taken": self._num_taken, "ignored": dict(self._ignored)}

    def hint_of(self, req: Any) -> Hint:
        """What SGLang's request ``req`` says: its ``custom_params``, then the actions of its envelope.

        Of two that name a field the later one counts.
        """
        hint = NO_HINT
        for source, read in _sources(req):
            try:
                hint = hint.updated(read())
            except HintError as error:
                self._ignore(source, error)
        self._num_taken += hint != NO_HINT
        return hint

    def session_of(self, req: Any, tenant: str) -> SessionName | None:
        """The name of the request's conversation; None if it has none, or one that cannot be used."""
        name = req.session_id
        if name is None and req.session is not None:
            name = req.session.session_id
        if name is None:
            return None
        try:
            return SessionName(tenant, name)
        except HintError as error:
            self._ignore("session_id", error)
            return None

    def _ignore(self, source: str, error: HintError) -> None:
        self._ignored[source] += 1
        field = str(error).partition(":")[0]
        cause = source, field if field in FIELDS else ""
        if cause not in self._logged:
            self._logged.add(cause)
            logger.warning("krul: a hint (%s) is ignored: %s; logged once per cause", source, error)


def _sources(req: Any) -> Iterator[tuple[str, Callable[[], Hint]]]:
    """Where a request may have hints, each with what reads it."""
    params = req.sampling_params.custom_params
    if isinstance(params, dict):
        if params.get(KEEP_PARAMETER) is not None:
            yield KEEP_PARAMETER, lambda: parse_hint({"ttl_s": params[KEEP_PARAMETER]})
        if params.get(HINTS_PARAMETER) is not None:
            yield HINTS_PARAMETER, lambda: parse_hint(params[HINTS_PARAMETER])
    envelope = req.kv_hints
    for action in () if envelope is None else envelope.actions[:MAX_ACTIONS]:
        if action.action_type in _ACTIONS:
            yield action.action_type, lambda action=action: _hint_of_action(action)  # type: ignore[misc]


def _hint_of_action(action: Any) -> Hint:
    if str(action.action_version).partition(".")[0] not in ("0", "1"):
        raise HintError(f"action_version: got {action.action_version!r:.80}, accepted are 0.x and 1.x")
    return _ACTIONS[action.action_type](action.payload)
