"""The one table from Baton's failures to gRPC codes, HTTP statuses and OpenAI errors, and back.

What leaves a process is `BatonError.message`, `field` and `retry_after_s`, never the text of
another exception.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from baton.core.errors import BatonError, Reason, WorkerLost, from_reason

DOMAIN = "baton"
DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata that carries a serialized google.rpc.Status."""

_PASSING = (Reason.OVERLOADED, Reason.UNAVAILABLE)
_DEFAULT_RETRY_S = 1.0

_MAX_TEXT = 1024
"""Characters of a message or field that go on the wire: trailers have room for about 8 KiB."""

_Code = grpc.StatusCode


class Outcome(NamedTuple):
    """What a client sees of a failure. openai_code is "" where OpenAI's API has none."""

    grpc: grpc.StatusCode
    http: int
    openai_type: str
    openai_code: str


TABLE: dict[Reason, Outcome] = {
    Reason.INVALID_ARGUMENT: Outcome(_Code.INVALID_ARGUMENT, 400, "invalid_request_error", ""),
    Reason.CONTEXT_LENGTH_EXCEEDED: Outcome(
        _Code.INVALID_ARGUMENT, 400, "invalid_request_error", "context_length_exceeded"
    ),
    Reason.MODEL_NOT_FOUND: Outcome(
        _Code.NOT_FOUND, 404, "invalid_request_error", "model_not_found"
    ),
    Reason.NOT_FOUND: Outcome(_Code.NOT_FOUND, 404, "not_found", "not_found"),
    Reason.UNAUTHENTICATED: Outcome(
        _Code.UNAUTHENTICATED, 401, "authentication_error", "invalid_api_key"
    ),
    Reason.UNIMPLEMENTED: Outcome(
        _Code.UNIMPLEMENTED, 501, "invalid_request_error", "not_implemented"
    ),
    Reason.OVERLOADED: Outcome(_Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "overloaded"),
    Reason.UNAVAILABLE: Outcome(_Code.UNAVAILABLE, 503, "server_error", "unavailable"),
    Reason.HANDOVER_FAILED: Outcome(_Code.ABORTED, 503, "server_error", "handover_failed"),
    # Two workers that do not fit are the operator's doing, so HTTP says 500 and not 400.
    Reason.INCOMPATIBLE: Outcome(_Code.FAILED_PRECONDITION, 500, "server_error", "incompatible"),
    Reason.DEADLINE_EXCEEDED: Outcome(
        _Code.DEADLINE_EXCEEDED, 504, "server_error", "deadline_exceeded"
    ),
    # 499: what proxies log for a client that left.
    Reason.CANCELLED: Outcome(_Code.CANCELLED, 499, "server_error", "cancelled"),
    # The client's to look into, and nobody's to send again.
    Reason.QUARANTINED: Outcome(
        _Code.FAILED_PRECONDITION, 422, "invalid_request_error", "quarantined"
    ),
    Reason.INTERNAL: Outcome(_Code.INTERNAL, 500, "server_error", "internal_error"),
}

# A status without Baton's details was made by gRPC itself, or by something in between.
_FOREIGN: dict[grpc.StatusCode, tuple[Reason, str]] = {
    _Code.CANCELLED: (Reason.CANCELLED, "the call was cancelled"),
    _Code.DEADLINE_EXCEEDED: (Reason.DEADLINE_EXCEEDED, "the peer did not answer in time"),
    _Code.UNIMPLEMENTED: (Reason.UNIMPLEMENTED, "the peer does not offer this call"),
    _Code.UNAUTHENTICATED: (Reason.UNAUTHENTICATED, "the peer does not accept these credentials"),
    _Code.PERMISSION_DENIED: (Reason.UNAUTHENTICATED, "the peer does not permit this call"),
    _Code.NOT_FOUND: (Reason.NOT_FOUND, "the peer does not know what was named"),
    _Code.INVALID_ARGUMENT: (Reason.INVALID_ARGUMENT, "the peer refused the request"),
    # gRPC's own: a message over the size limit. Trying again would end the same way.
    _Code.RESOURCE_EXHAUSTED: (Reason.INTERNAL, "a message was larger than the peer accepts"),
}


def grpc_code(error: BatonError) -> grpc.StatusCode:
    return TABLE[error.reason].grpc


def http_status(error: BatonError) -> int:
    return TABLE[error.reason].http


def with_hint(error: BatonError) -> BatonError:
    """The same failure for a client: overload and absence pass, so it is told when to try again
    even if nobody knows."""
    if error.retry_after_s is not None or error.reason not in _PASSING:
        return error
    return from_reason(
        error.reason, error.message, field=error.field, retry_after_s=_DEFAULT_RETRY_S
    )


def openai_error(error: BatonError) -> dict[str, Any]:
    """The JSON body of an OpenAI error, and whether the same request may do better."""
    outcome = TABLE[error.reason]
    return {
        "error": {
            "message": error.message,
            "type": outcome.openai_type,
            "param": error.field or None,
            "code": outcome.openai_code or None,
            "retryable": error.retryable,
        }
    }


def retry_after_headers(error: BatonError) -> dict[str, str]:
    """`retry-after` (whole seconds, rounded up) and `retry-after-ms`, or nothing."""
    if error.retry_after_s is None:
        return {}
    return {
        "retry-after": str(math.ceil(error.retry_after_s)),
        "retry-after-ms": str(math.ceil(error.retry_after_s * 1000)),
    }


def forget_frames(error: BaseException) -> None:
    """Of a failure that was answered, and of what caused it: which calls it came through. A frame
    may refer to what refers to the failure, a task or a time-out; then all that the request held
    would be held until the garbage collector comes."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.__traceback__ = None
        one = one.__cause__ or one.__context__


def to_status(error: BatonError, request_id: str = "") -> status_pb2.Status:
    """A Status with ErrorInfo always, BadRequest and RetryInfo where they help."""
    code: int = grpc_code(error).value[0]
    message = error.message[:_MAX_TEXT]
    status = status_pb2.Status(code=code, message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason.name, domain=DOMAIN)
    if request_id:
        info.metadata["request_id"] = request_id
    status.details.add().Pack(info)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field[:_MAX_TEXT], description=message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_status(status: status_pb2.Status) -> BatonError | None:
    """The error that `to_status` was given; None when the status was not made by Baton."""
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        for known in (info, bad, retry):
            if detail.Is(known.DESCRIPTOR):
                detail.Unpack(known)
    if info.domain != DOMAIN:
        return None
    reason = Reason.__members__.get(info.reason, Reason.INTERNAL)
    field = bad.field_violations[0].field if bad.field_violations else ""
    after = retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None
    return from_reason(reason, status.message, field=field, retry_after_s=after)


def from_rpc_error(error: grpc.aio.AioRpcError) -> BatonError:
    """What a failed call means. The texts of gRPC (addresses, ports) are not taken over."""
    for key, value in error.trailing_metadata() or ():
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            rich = from_status(status_pb2.Status.FromString(value))
        except (DecodeError, ValueError):
            rich = None
        if rich is not None:
            return rich
    if error.code() is _Code.UNAVAILABLE:
        return WorkerLost("the peer is not reachable")
    reason, message = _FOREIGN.get(error.code(), (Reason.INTERNAL, "the call failed"))
    return from_reason(reason, message)
