"""Every error this project raises on purpose.

One base class, `ScoringError`, so that a caller can catch them all; one subclass per thing a caller can do
about it. Each class carries the HTTP status it becomes, each instance the index of the read it speaks of and
the field. All of them survive pickling (Ray carries them over several hops) and a round trip through a plain
dict (`to_dict`, `from_dict`), which is how HTTP carries them.
"""

from __future__ import annotations

from typing import Any


class ScoringError(Exception):
    """Base of all errors of this project.

    Args:
        message: what was given, what is allowed, and which setting changes it.
        read: index of the read in the caller's batch, when the error is one read's own.
        field: the field of the read the error is about, with an element index where it helps.
        details: further plain values (numbers, strings) worth having in code, such as `retry_after_s`.
    """

    status = 500

    def __init__(self, message: str, *, read: int | None = None, field: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.read = read
        self.field = field
        self.details = details

    def __str__(self) -> str:
        where = "" if self.read is None else f"read {self.read}"
        if self.field:
            where = f"{where}, {self.field}" if where else self.field
        return f"{where}: {self.message}" if where else self.message

    def __reduce__(self):
        return _rebuild, (type(self), self.message, self.read, self.field, self.details)

    def at(self, read: int | None) -> ScoringError:
        """The same error, said of read number `read` of the caller's batch; None where it was a read alone."""
        return _rebuild(type(self), self.message, read, self.field, self.details)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form; `from_dict` is its inverse."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "read": self.read,
            "field": self.field,
            "details": self.details,
        }


def _rebuild(cls: type[ScoringError], message: str, read: int | None, field: str | None, details: dict):
    return cls(message, read=read, field=field, **details)


def from_dict(error: dict[str, Any]) -> ScoringError:
    """The inverse of `ScoringError.to_dict`. An unknown type becomes a plain `ScoringError`."""
    cls = _BY_NAME.get(error.get("type", ""), ScoringError)
    return _rebuild(cls, error.get("message", ""), error.get("read"), error.get("field"), error.get("details") or {})


class Unauthorized(ScoringError):
    """The service asks for a token, and the request brought none that it knows."""

    status = 401


class InvalidRead(ScoringError, ValueError):
    """The read cannot be answered as it was written; sending it again changes nothing."""

    status = 422


class BatchTooLarge(InvalidRead):
    """The batch is more than one call may hold; `details` has the limits. Sent in pieces it is answered."""


class UnknownTeacher(InvalidRead):
    """No teacher of that name is served."""


class InvalidAdapter(ScoringError, ValueError):
    """The adapter cannot be served: it is none, or the engine could not apply it exactly."""

    status = 422


class NoTokenizer(ScoringError, ValueError):
    """Text was given, and there is no tokenizer here for it, or none with a chat template. Ids are answered."""

    status = 422


class InvalidCheckpoint(ScoringError, ValueError):
    """The weights cannot take the place of those that are loaded; `details["differences"]` says why, where they were
    compared."""

    status = 422


class VersionMismatch(ScoringError):
    """The read expects a weight version that the teacher does not have."""

    status = 409


class Overloaded(ScoringError):
    """Every replica refused for now. `details["retry_after_s"]` says when to try again."""

    status = 429


class TeacherUnavailable(ScoringError):
    """No living replica of the teacher could answer: none has started, or those there were have died."""

    status = 503


class EngineDead(TeacherUnavailable):
    """The engine behind a replica has died; the replica will be replaced."""


class DeadlineExceeded(ScoringError, TimeoutError):
    """The deadline passed before the answer was there. The work has been aborted."""

    status = 504


class WrongEngineAnswer(ScoringError):
    """The engine answered with something that is not the answer to the read: never passed on, never padded."""


class SelfTestFailed(WrongEngineAnswer):
    """The engine contradicts itself over reads that must agree: it does not begin to serve."""


class RefusedSettings(ScoringError, ValueError):
    """A configuration this project refuses to start with, because scores under it would be wrong or lost."""


class InvalidLoss(ScoringError, ValueError):
    """A divergence that cannot be computed from what it was given, or would not train what it seems to."""

    status = 422


_BY_NAME = {
    cls.__name__: cls
    for cls in (
        ScoringError,
        Unauthorized,
        InvalidRead,
        BatchTooLarge,
        UnknownTeacher,
        InvalidAdapter,
        NoTokenizer,
        InvalidCheckpoint,
        VersionMismatch,
        Overloaded,
        TeacherUnavailable,
        EngineDead,
        DeadlineExceeded,
        WrongEngineAnswer,
        SelfTestFailed,
        RefusedSettings,
        InvalidLoss,
    )
}

OF_THE_SERVICE = (Overloaded, TeacherUnavailable, DeadlineExceeded)
"""These speak of the service, not of the read: at another time the same read may be answered."""
