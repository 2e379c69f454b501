"""Inputs that once did harm, each as small as it can be."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import pytest

from batonlm.v1 import prefill_pb2, types_pb2
from tests.e2e.relay import PATIENCE_S
from tests.fuzz.calls import check, send
from tests.fuzz.rpcs import all_rpcs
from tests.fuzz.target import Target

pytestmark = pytest.mark.deep

BANNED = prefill_pb2.RunRequest(
    attempt=types_pb2.Attempt(
        request_id="r",
        choices=[0],
        token_ids=bytes(4),
        num_prompt_tokens=1,
        stop=types_pb2.StopParams(max_tokens=2, min_tokens=1, stop_token_ids=[2**32 - 1]),
    )
).SerializeToString()


@pytest.mark.parametrize(
    ("path", "messages"),
    [
        # Were answered with UNKNOWN or INTERNAL, one with the text of the decoder's exception.
        ("/baton.v1.Tokenizer/Encode", [b"\xff"]),
        ("/baton.v1.Inference/Generate", [b"\xff"]),
        ("/baton.v1.Decode/Session", [b"\xff"]),
        ("/baton.v1.Detokenizer/Session", [b"\xff"]),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", [b"\xff"]),
        # Were never answered at all.
        ("/baton.v1.Inference/ListModels", []),
        ("/baton.v1.Inference/Chat", []),
        ("/grpc.health.v1.Health/Check", []),
        # Ended the worker's engine, or changed what its neighbours drew.
        ("/baton.v1.Prefill/Run", [BANNED]),
    ],
)
def test_it_is_refused(target: Target, path: str, messages: Sequence[bytes]) -> None:
    rpc = next(rpc for rpc in all_rpcs() if rpc.path == path)
    face = target.serving(rpc.service)[0]
    outcome = send(face.channel, rpc, messages, PATIENCE_S)
    check(rpc, outcome)
    assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
