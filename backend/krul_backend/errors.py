"""What a user or a peer can cause, as typed exceptions."""

from __future__ import annotations


class KrulError(Exception):
    """Base of every error that krul raises on purpose."""


class ConfigError(KrulError):
    """A configuration value that cannot be used: says which key, what was given, what is accepted."""


class ManifestError(KrulError):
    """A segment manifest that contradicts itself or the model it claims to belong to."""


class CodecError(KrulError):
    """A codec that is unknown, or a block that does not have the size its codec says."""


class StoreClosedError(KrulError):
    """The store was closed; nothing can be stored or restored any more."""


class SensitivityError(KrulError):
    """A file of learned sensitivities that is damaged, of another format or of another model."""


class StrategyError(KrulError):
    """A compression strategy that a model of this many layers cannot follow, or an unknown name."""


class RestoreError(KrulError):
    """Head ends that a restore does not allow, an unknown planner, or costs that cannot be fitted or read."""


class TierReadError(KrulError):
    """A segment of a lower tier cannot be had: no room for it, an error, a wrong checksum, or too slow."""


class DaemonError(KrulError):
    """A daemon that cannot be started, reached, trusted or understood: says where, and what to do."""


class DaemonUnreachableError(DaemonError):
    """Nobody answers: the daemon is not there, gone, or hangs."""


class ProtocolError(DaemonError):
    """A message that is no message of this protocol: what was expected, and what came."""
