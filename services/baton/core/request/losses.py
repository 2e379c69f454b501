"""What a failed attempt means for its request, and for the worker that lost it; knows neither."""

from __future__ import annotations

from enum import Enum, auto

from baton.core.errors import BatonError, Reason, WorkerLost


class FailureAction(Enum):
    """What a phase's failure means for the request."""

    FATAL = auto()
    ELSEWHERE = auto()
    """Another attempt; counts, and against the retry budget if nothing was accepted yet."""
    LATER = auto()
    """Another attempt after a pause; does not count, the deadline bounds it."""


VERDICTS: dict[Reason, FailureAction] = {
    Reason.INVALID_ARGUMENT: FailureAction.FATAL,
    Reason.CONTEXT_LENGTH_EXCEEDED: FailureAction.FATAL,
    Reason.DEADLINE_EXCEEDED: FailureAction.FATAL,
    Reason.UNIMPLEMENTED: FailureAction.FATAL,
    Reason.QUARANTINED: FailureAction.FATAL,
    Reason.OVERLOADED: FailureAction.LATER,
    Reason.UNAVAILABLE: FailureAction.ELSEWHERE,
    Reason.HANDOVER_FAILED: FailureAction.ELSEWHERE,
    Reason.INCOMPATIBLE: FailureAction.ELSEWHERE,
    Reason.CANCELLED: FailureAction.ELSEWHERE,
    Reason.INTERNAL: FailureAction.ELSEWHERE,
    Reason.NOT_FOUND: FailureAction.ELSEWHERE,
    Reason.MODEL_NOT_FOUND: FailureAction.ELSEWHERE,
    Reason.UNAUTHENTICATED: FailureAction.ELSEWHERE,
}

_FAULTS = frozenset(
    {
        Reason.HANDOVER_FAILED,
        Reason.INTERNAL,
        Reason.NOT_FOUND,
        Reason.MODEL_NOT_FOUND,
        Reason.UNAUTHENTICATED,
    }
)


def is_fault(error: BatonError) -> bool:
    """Whether a failure speaks against the worker, rather than of the request, of others' load, or
    of a worker that leaves."""
    return isinstance(error, WorkerLost) or error.reason in _FAULTS


def leaves(error: BatonError | None) -> bool:
    """Whether a worker said that it takes nothing any more, rather than was lost."""
    return (
        error is not None
        and error.reason is Reason.UNAVAILABLE
        and not isinstance(error, WorkerLost)
    )
