"""The error table is complete, and an error survives the wire with all it says."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.errors import Overloaded, Reason, from_reason
from batonlm.rpc.errors import (
    DETAILS_KEY,
    DOMAIN,
    TABLE,
    from_rpc_error,
    from_status,
    grpc_code,
    http_status,
    openai_error,
    retry_after_headers,
    to_status,
)

OPENAI_TYPES = {
    "invalid_request_error",
    "authentication_error",
    "not_found",
    "rate_limit_error",
    "server_error",
}


def test_every_reason_has_an_outcome() -> None:
    assert set(TABLE) == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_codes_agree_with_each_other(reason: Reason) -> None:
    outcome = TABLE[reason]
    assert outcome.openai_type in OPENAI_TYPES
    assert outcome.grpc is not grpc.StatusCode.OK
    error = from_reason(reason, "it failed")
    assert openai_error(error)["error"]["retryable"] is error.retryable
    ours = outcome.openai_type == "server_error"
    assert ours == (outcome.http >= 499) or reason is Reason.UNIMPLEMENTED


def test_what_clients_know_by_name() -> None:
    assert TABLE[Reason.MODEL_NOT_FOUND].openai_code == "model_not_found"
    assert TABLE[Reason.CONTEXT_LENGTH_EXCEEDED].openai_code == "context_length_exceeded"
    error = Overloaded("the queue is full", retry_after_s=1.2)
    assert (grpc_code(error), http_status(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 429)
    assert openai_error(error) == {
        "error": {
            "message": "the queue is full",
            "type": "rate_limit_error",
            "param": None,
            "code": "overloaded",
            "retryable": True,
        }
    }
    assert retry_after_headers(error) == {"retry-after": "2", "retry-after-ms": "1200"}
    assert retry_after_headers(Overloaded("full")) == {}


@given(
    st.sampled_from(Reason),
    st.text(max_size=50),
    st.text(max_size=20),
    st.none() | st.integers(0, 10**9).map(lambda ms: ms / 1000),
)
def test_an_error_survives_the_wire(
    reason: Reason, message: str, field: str, retry_after_s: float | None
) -> None:
    sent = from_reason(reason, message, field=field, retry_after_s=retry_after_s)
    status = to_status(sent)
    got = from_rpc_error(_failed(grpc_code(sent), status.SerializeToString()))
    assert type(got) is type(sent)
    assert (got.message, got.field, got.retry_after_s) == (message, field, retry_after_s)


def test_error_info_is_always_there() -> None:
    status = to_status(Overloaded("full"), request_id="r1")
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == (
        "OVERLOADED",
        DOMAIN,
        {"request_id": "r1"},
    )


def test_a_long_message_fits_into_trailers() -> None:
    status = to_status(from_reason(Reason.INVALID_ARGUMENT, "é" * 10**6, field="f" * 10**6))
    assert status.ByteSize() < 8192


def test_a_status_of_others_is_not_taken_for_ours() -> None:
    status = to_status(Overloaded("full"))
    status.details[0].Pack(error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="other.org"))
    assert from_status(status) is None


@pytest.mark.parametrize("code", list(grpc.StatusCode))
@pytest.mark.parametrize("details", [None, b"\xff\xff broken"])
def test_a_status_without_details_keeps_its_text_to_itself(
    code: grpc.StatusCode, details: bytes | None
) -> None:
    error = from_rpc_error(_failed(code, details))
    assert "10.0.0.7" not in error.message
    assert error.message
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        assert error.reason is Reason.UNAVAILABLE
        assert error.retryable


def _failed(code: grpc.StatusCode, details: bytes | None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*([(DETAILS_KEY, details)] if details is not None else []))
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), trailing, details="failed to connect to 10.0.0.7:5"
    )
