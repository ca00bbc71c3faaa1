"""Hints: what an application tells about the future of a conversation."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct, structs

from krul_backend.errors import HintError

MAX_HINT_S = 24 * 3600.0
"""The longest time that a hint counts for: no hint holds memory for ever."""

USUAL_PRIORITY, MAX_PRIORITY = 50.0, 100.0

MAX_SESSION_LENGTH = 256
"""Characters of the name of a conversation."""

_STRONGEST = 16.0


class SessionName(Struct, frozen=True, forbid_unknown_fields=True):
    """The name that an application gave to a conversation. Tenants do not see each other's names.

    Raises:
        HintError: the name is empty, or it or the tenant has more than ``MAX_SESSION_LENGTH`` characters.
    """

    tenant: str
    name: str

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_SESSION_LENGTH:
            raise HintError(
                f"session: got a name of {len(self.name)} characters, accepted are 1 to {MAX_SESSION_LENGTH}"
            )
        if len(self.tenant) > MAX_SESSION_LENGTH:
            raise HintError(
                f"tenant: got one of {len(self.tenant)} characters, accepted are up to {MAX_SESSION_LENGTH}"
            )


class Hint(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Advice about one conversation. Fields that are None or False leave what was said before.

    ``ttl_s``: it stays in host memory at least that long; 0 ends that. ``next_use_s``: it is expected back in
    so many seconds; 0 takes that back. ``priority``, 0 to 100: how much it is worth against others, see
    ``weight``. ``demote``: it leaves host memory before others. ``prefetch``: what lies in lower tiers comes
    to host memory now. ``drop``: every tier forgets it; no other field may be given with it.

    Raises:
        HintError: a value is out of its range, or fields contradict each other.
    """

    ttl_s: float | None = None
    next_use_s: float | None = None
    priority: float | None = None
    demote: bool = False
    prefetch: bool = False
    drop: bool = False

    def __post_init__(self) -> None:
        for name in ("ttl_s", "next_use_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds <= MAX_HINT_S:
                raise HintError(f"{name}: got {seconds:g}, accepted are 0 to {MAX_HINT_S:g} seconds")
        if self.priority is not None and not 0 <= self.priority <= MAX_PRIORITY:
            raise HintError(f"priority: got {self.priority:g}, accepted are 0 to {MAX_PRIORITY:g}")
        others = (self.ttl_s, self.next_use_s, self.priority, self.demote or None, self.prefetch or None)
        if self.drop and others != (None,) * len(others):
            raise HintError("drop: got it together with other fields, accepted is drop alone")
        if self.demote and self.prefetch:
            raise HintError("demote: got it together with prefetch, accepted is one of them")

    @property
    def weight(self) -> float | None:
        """What ``priority`` multiplies the worth of a segment by: 1 for 50, 16 for 100, 1/16 for 0."""
        if self.priority is None:
            return None
        return float(_STRONGEST ** (self.priority / USUAL_PRIORITY - 1.0))

    def updated(self, later: Hint) -> Hint:
        """This hint with the fields that a later one of the same sender names in place of its own.

        Raises:
            HintError: fields contradict each other.
        """
        named = structs.asdict(later).items()
        return structs.replace(
            self, **{name: value for name, value in named if value is not None and value is not False}
        )


NO_HINT = Hint()

_SECONDS = ("ttl_s", "next_use_s")
_SWITCHES = ("demote", "prefetch", "drop")
FIELDS = Hint.__struct_fields__


def parse_hint(given: object) -> Hint:
    """The hint that a JSON object of its fields states. Longer times than ``MAX_HINT_S`` count as that.

    Raises:
        HintError: with one sentence that names the field, what was given, and what is accepted.
    """
    if not isinstance(given, Mapping):
        raise HintError(f"a hint: got {_shown(given)}, accepted is an object of {', '.join(FIELDS)}")
    values: dict[str, float | bool] = {}
    for name, value in given.items():
        if name not in FIELDS:
            raise HintError(f"{_shown(name)} is no field of a hint, accepted are {', '.join(FIELDS)}")
        if value is None:
            continue
        if name in _SWITCHES:
            if not isinstance(value, bool):
                raise HintError(f"{name}: got {_shown(value)}, accepted are true and false")
            values[name] = value
        else:
            values[name] = _number(name, value)
    hint = Hint(**values)  # type: ignore[arg-type]
    if hint == NO_HINT:
        raise HintError(f"a hint: got one that says nothing, accepted is one or more of {', '.join(FIELDS)}")
    return hint


def _number(name: str, value: object) -> float:
    most, unit = (MAX_HINT_S, " seconds") if name in _SECONDS else (MAX_PRIORITY, "")
    # Compared before the conversion: an integer may be too large for one.
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        if value <= most:
            return float(value)
        if name in _SECONDS:
            return MAX_HINT_S
    raise HintError(f"{name}: got {_shown(value)}, accepted are 0 to {most:g}{unit}")


def _shown(value: object) -> str:
    """What was given, as an error shows it: on one line, and short."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # An integer of thousands of digits is one.
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
