"""Bad input gets a clear error that names the field, and nothing else happens."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from batonlm.cli.ports import free_ports
from batonlm.v1 import inference_pb2, tokenizer_pb2, types_pb2
from tests.e2e.relay import Relay, options
from tests.engine.tiny_models import save_tiny_model

CHAT = {"messages": [{"role": "user", "content": "hi"}]}

BAD_BODIES: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": []}, 400, "messages"),
    ({**CHAT, "model": "another"}, 404, "model"),
    ({**CHAT, "temperature": -1}, 400, "temperature"),
    ({**CHAT, "n": 10_000}, 400, "n"),
    ({**CHAT, "max_tokens": -5}, 400, "max_tokens"),
    ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "messages"),
]


@pytest.mark.parametrize(("body", "status", "field"), BAD_BODIES)
def test_http(relay: Relay, body: dict[str, Any], status: int, field: str) -> None:
    answer = relay.client.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, field), error
    assert error["message"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"messages": [', 400),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400),
        (b'{"temperature": NaN, "messages": [{"role": "user", "content": "hi"}]}', 400),
        (b'{"messages": [{"role": "user", "content": "' + b"x" * 2_000_000 + b'"}]}', 413),
    ],
    ids=["malformed JSON", "invalid UTF-8", "NaN", "2 MB"],
)
def test_http_bodies(relay: Relay, content: bytes, status: int) -> None:
    answer = relay.client.post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def violation(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """The status code and the field that the rich error names."""
    status = rpc_status.from_call(error)
    assert status is not None
    for detail in status.details:
        found = error_details_pb2.BadRequest()
        if detail.Unpack(found):
            return error.code(), found.field_violations[0].field
    return error.code(), ""


def chat(**changes: Any) -> inference_pb2.ChatRequest:
    request = inference_pb2.ChatRequest(
        messages=[tokenizer_pb2.ChatMessage(role="user", content="hi")],
        options=options(max_tokens=4),
    )
    for name, value in changes.items():
        part, _, field = name.partition("__")
        target = getattr(request.options, part) if part in ("sampling", "stop") else request.options
        setattr(target, field or part, value)
    return request


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sampling__temperature": -1.0}, "temperature"),
        ({"sampling__temperature": math.nan}, "temperature"),
        ({"n": 10_000}, "n"),
        ({"stop__max_tokens": 0}, "max_tokens"),
    ],
)
def test_grpc(relay: Relay, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(relay.stub.Chat(chat(**changes), timeout=120))
    code, named = violation(caught.value)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert named.split(".")[-1] == field


def test_grpc_empty_messages_and_unknown_model(relay: Relay) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(relay.stub.Chat(inference_pb2.ChatRequest(), timeout=120))
    assert violation(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "messages")
    with pytest.raises(grpc.RpcError) as caught:
        list(relay.stub.Chat(inference_pb2.ChatRequest(model="another"), timeout=120))
    assert caught.value.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)


def test_an_unknown_enum_value_is_refused_inside(relay: Relay) -> None:
    """No public request has an enum; between processes an unknown value is refused by name."""
    from batonlm.core.errors import InvalidArgument
    from batonlm.rpc.convert import choice_tokens_from_proto

    unknown = types_pb2.ChoiceTokens(request_id="r", token_ids=b"\0\0\0\0")
    unknown.finish_reason = 99  # type: ignore[assignment]
    with pytest.raises(InvalidArgument) as caught:
        choice_tokens_from_proto(unknown)
    assert "finish_reason" in caught.value.field


def up(folder: Path, *flags: str) -> tuple[int, str]:
    """`baton up --detach` that must fail; its exit code and what it said."""
    done = Relay.baton(
        _Nowhere(folder),
        "up",
        "--detach",
        "--http-port",
        str(free_ports(1)[0]),
        *flags,
        timeout=120,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


class _Nowhere(Relay):
    """A Relay that was never started, for its environment."""

    def __init__(self, folder: Path) -> None:
        import os

        self.environment = {**os.environ, "XDG_STATE_HOME": str(folder), "NO_COLOR": "1"}


@pytest.mark.deep
def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        _, said = up(tmp_path, "--runner", "fake", "--grpc-port", port)
    assert port in said
    assert "in use" in said


def test_a_model_path_that_does_not_exist(tmp_path: Path) -> None:
    _, said = up(tmp_path, "--model", str(tmp_path / "nothing"))
    assert "nothing" in said
    assert "model" in said


@pytest.mark.deep
def test_a_corrupt_safetensors_file(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "llama")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    _, said = up(tmp_path, "--model", str(model), "--prefill", "0")
    assert "model.safetensors" in said
