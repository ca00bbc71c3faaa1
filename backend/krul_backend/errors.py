"""The exceptions for errors that a user or a peer can cause."""

from __future__ import annotations

from typing import Literal

Refusal = Literal["no room", "over quota", "too much at once"]
"""Why a segment of a lower tier is not let into DRAM: all that it could take is in use; it is more than its
tenant may have there, or than there is; enough is being prefetched, and no load has asked for it."""


class KrulError(Exception):
    """Base of every error that krul raises on purpose."""


class ConfigError(KrulError):
    """A configuration value cannot be used; the message names the key, what was given, what is accepted."""


class HintError(KrulError, ValueError):
    """A hint cannot be used; the message names the field, what was given, what is accepted."""


class ManifestError(KrulError):
    """A segment manifest contradicts itself, or the model that it names."""


class CodecError(KrulError):
    """A codec is unknown, or a block does not have the size that its codec says."""


class StoreClosedError(KrulError):
    """The store was closed: nothing can be stored or restored any more."""


class StrategyError(KrulError):
    """A compression strategy is unknown, or does not fit a model of this many layers."""


class RestoreError(KrulError):
    """Head ends are not allowed in a restore, a planner is unknown, or costs cannot be fitted or read."""


class TierReadError(KrulError):
    """A segment of a lower tier cannot be read: no room in DRAM, an error, a wrong checksum, or too slow."""


class NotAdmittedError(TierReadError):
    """A segment of a lower tier is not let into DRAM; ``refusal`` says why."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal: Refusal = refusal


class RecordError(KrulError):
    """Bytes are not a record, or a damaged one, or one of another format."""


class DaemonError(KrulError):
    """A daemon cannot be started, reached, trusted or understood; the message says where, and what to do."""


class DaemonUnreachableError(DaemonError):
    """The daemon does not answer: it was not started, has ended, or hangs."""


class ProtocolError(DaemonError):
    """A message does not follow the protocol; says what was expected, and what came."""
