"""Every failure Baton speaks of, as exceptions.

    BatonError
    ├── InvalidArgument          a field has a value it cannot have
    │   └── ContextLengthExceeded    prompt and output do not fit the model
    ├── ModelNotFound            no such model here
    ├── Unauthenticated          the key is missing or wrong
    ├── Unimplemented            not offered by this server
    ├── NotFound                 the thing named is not known (any more)
    ├── Overloaded               queue or memory is full             retryable
    ├── Unavailable              leaving, or a peer is gone          retryable
    │   └── WorkerLost               it died, hangs or cannot be reached
    ├── HandoverFailed           prefill again elsewhere             retryable
    ├── Incompatible             two workers whose KV does not fit
    ├── DeadlineExceeded         out of time
    ├── Cancelled                cancelled by whoever asked
    ├── Quarantined              the request ended the workers it ran on
    └── Internal                 a fault of Baton's own

`message` is written for the client and never carries internals (no addresses of memory, no paths,
no text of other exceptions). `batonlm.rpc.errors` holds the one table to gRPC codes and HTTP
statuses.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from difflib import get_close_matches
from enum import Enum

MOST_NAMED = 20
"""Longer lists of names end with "…" in a message."""
MOST_LETTERS = 200
"""Of a client's own words that a message repeats."""
MOST_COMPARED = 64
"""Names of a longer list that are compared with an unknown one: its neighbours by alphabet."""


class Reason(Enum):
    """The kind of failure; names equal `ErrorReason` of the protos without its prefix."""

    INVALID_ARGUMENT = 1
    CONTEXT_LENGTH_EXCEEDED = 2
    MODEL_NOT_FOUND = 3
    OVERLOADED = 4
    UNAVAILABLE = 5
    HANDOVER_FAILED = 6
    INCOMPATIBLE = 7
    DEADLINE_EXCEEDED = 8
    CANCELLED = 9
    INTERNAL = 10
    NOT_FOUND = 11
    UNAUTHENTICATED = 12
    UNIMPLEMENTED = 13
    QUARANTINED = 14


def install(extra: str) -> str:
    """Returns the command that installs an optional part of Baton. extra: a name of
    `[project.optional-dependencies]` in pyproject.toml."""
    return f"pip install 'batonlm[{extra}]'"


class BatonError(Exception):
    """Base of all failures that may reach a client.

    message: a sentence for a person. field: the request field at fault, or "". retry_after_s: when
    trying again may help, in seconds, or None.
    """

    reason = Reason.INTERNAL
    retryable = False

    def __init__(self, message: str, *, field: str = "", retry_after_s: float | None = None):
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.request_id = ""
        """Of the request that it ended, where that has one."""


class InvalidArgument(BatonError):
    reason = Reason.INVALID_ARGUMENT


class ContextLengthExceeded(InvalidArgument):
    reason = Reason.CONTEXT_LENGTH_EXCEEDED


class ModelNotFound(BatonError):
    reason = Reason.MODEL_NOT_FOUND


def model_not_found(model: str, served: Iterable[str]) -> ModelNotFound:
    """Returns the error for a model that is not among the served ones; it names the nearest."""
    names, model = sorted(served), model[:MOST_LETTERS]
    known = ", ".join(map(repr, names[:MOST_NAMED])) + ", …" * (len(names) > MOST_NAMED)
    there = f"it serves {known}" if names else "it serves none now"
    start = max(0, bisect(names, model) - MOST_COMPARED // 2)
    near = get_close_matches(model, names[start : start + MOST_COMPARED], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ModelNotFound(f"This server has no model {model!r}: {there}.{hint}", field="model")


class Unauthenticated(BatonError):
    reason = Reason.UNAUTHENTICATED


class Unimplemented(BatonError):
    reason = Reason.UNIMPLEMENTED


class NotFound(BatonError):
    reason = Reason.NOT_FOUND


class Overloaded(BatonError):
    reason = Reason.OVERLOADED
    retryable = True


class Unavailable(BatonError):
    reason = Reason.UNAVAILABLE
    retryable = True


class WorkerLost(Unavailable):
    """Nobody told: the worker's silence or its broken connection did. It travels as its base."""


class HandoverFailed(BatonError):
    reason = Reason.HANDOVER_FAILED
    retryable = True


class Incompatible(BatonError):
    reason = Reason.INCOMPATIBLE


class DeadlineExceeded(BatonError):
    reason = Reason.DEADLINE_EXCEEDED


class Cancelled(BatonError):
    reason = Reason.CANCELLED


class Quarantined(BatonError):
    reason = Reason.QUARANTINED


class Internal(BatonError):
    reason = Reason.INTERNAL


def from_reason(
    reason: Reason, message: str, *, field: str = "", retry_after_s: float | None = None
) -> BatonError:
    """The exception class for a reason that came over the wire."""
    return _CLASSES[reason](message, field=field, retry_after_s=retry_after_s)


_CLASSES: dict[Reason, type[BatonError]] = {
    cls.reason: cls
    for cls in (
        InvalidArgument,
        ContextLengthExceeded,
        ModelNotFound,
        Unauthenticated,
        Unimplemented,
        NotFound,
        Overloaded,
        Unavailable,
        HandoverFailed,
        Incompatible,
        DeadlineExceeded,
        Cancelled,
        Quarantined,
        Internal,
    )
}
