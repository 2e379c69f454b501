"""What a router must not say on its session: it ends the attempt, or the stream, and no more."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.decode import servicer as servicer_module
from batonlm.decode.sessions import RouterSession
from batonlm.rpc.convert import identity_to_proto
from batonlm.rpc.errors import from_rpc_error
from batonlm.v1 import decode_pb2 as pb
from batonlm.v1.types_pb2 import WorkerIdentity
from tests.services.worker.pair import (
    Pair,
    attempt,
    pair,
    reference,
    until,
)
from tests.services.worker.router_end import RouterEnd, router

MALFORMED: dict[str, dict[str, Any]] = {
    "empty": {},
    "no tokens": {"attempt": {"request_id": "bad", "choices": [0]}},
    "broken ids": {"attempt": {"request_id": "bad", "choices": [0], "token_ids": b"123"}},
    "negative ids": {"attempt": {"request_id": "bad", "choices": [0], "token_ids": b"\xff" * 8}},
    "no choices": {"attempt": {"request_id": "bad", "token_ids": b"\1\0\0\0"}},
    "too large ids": {
        "attempt": {
            "request_id": "bad",
            "choices": [0],
            "token_ids": b"\xff\xff\xff\x7f",
            "num_prompt_tokens": 1,
            "stop": {"max_tokens": 5},
        }
    },
    "too many choices": {
        "attempt": {
            "request_id": "bad",
            "choices": list(range(500)),
            "token_ids": b"\1\0\0\0",
            "num_prompt_tokens": 1,
            "stop": {"max_tokens": 5},
        }
    },
    "a short hand-over id": {
        "attempt": {
            "request_id": "bad",
            "choices": [0],
            "token_ids": b"\1\0\0\0",
            "num_prompt_tokens": 1,
            "stop": {"max_tokens": 5},
        },
        "source": {"handover_id": b"short"},
    },
    "a sender nobody can reach": {
        "attempt": {
            "request_id": "bad",
            "choices": [0],
            "token_ids": b"\1\0\0\0",
            "num_prompt_tokens": 1,
            "stop": {"max_tokens": 5},
        },
        "source": {"handover_id": b"x" * 16, "sender": {"address": "%%%", "instance_id": "i"}},
    },
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_start_ends_nothing_but_itself(name: str) -> None:
    one = attempt(max_tokens=30)
    async with pair() as world, router(world) as end:
        await end.start(one)
        await end.say(start=pb.StartSequence(**MALFORMED[name]))
        await until(lambda: bool(end.failures))
        (key, _, _), *others = end.failures
        assert key != one.key and not others
        end.failures.clear()
        assert await end.ended(one) == reference(one)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_start_holds_the_stream_stays(data: st.DataObject) -> None:
    ids = st.one_of(st.binary(max_size=12), st.just(b"\5\0\0\0\6\0\0\0"))
    start = pb.StartSequence(
        attempt={  # type: ignore[arg-type]
            "request_id": data.draw(st.text(max_size=4)),
            "attempt": data.draw(st.integers(0, 2**32 - 1)),
            "choices": data.draw(st.lists(st.integers(0, 2**32 - 1), max_size=4)),
            "token_ids": data.draw(ids),
            "num_prompt_tokens": data.draw(st.integers(0, 3)),
            "stop": {"max_tokens": data.draw(st.integers(0, 3))},
            "sampling": {"temperature": data.draw(st.floats(width=32))},
            "remaining_ms": data.draw(st.integers(0, 2**32 - 1)),
        },
        max_unconfirmed=data.draw(st.integers(0, 2**32 - 1)),
    )
    told = _Told()
    servicer = servicer_module.DecodeServicer(told, None, None)  # type: ignore[arg-type]
    session = RouterSession("router")
    servicer.start_sequence(session, start)
    assert told.started or session.has_news


class _Told:
    started = False

    def start(self, *_: object, **__: object) -> None:
        self.started = True


async def test_a_message_of_a_kind_that_is_not_known_is_passed_over() -> None:
    one = attempt(max_tokens=30)
    async with pair() as world, router(world) as end:
        await end.start(one)
        await end.call.write(pb.SessionRequest())
        assert await end.ended(one) == reference(one)


async def first_answer(world: Pair, *messages: pb.SessionRequest) -> grpc.aio.AioRpcError:
    call = world.decode_stub.Session()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        for message in messages:
            await call.write(message)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    return refused.value


async def test_a_stream_begins_with_a_hello_that_fits() -> None:
    async with pair() as world:
        for message in (pb.SessionRequest(), pb.SessionRequest(start=pb.StartSequence())):
            error = from_rpc_error(await first_answer(world, message))
            assert isinstance(error, InvalidArgument)
        stale = pb.SessionHello(
            router=WorkerIdentity(instance_id="r"), decode_instance_id="an older one"
        )
        error = from_rpc_error(await first_answer(world, pb.SessionRequest(hello=stale)))
        assert isinstance(error, Unavailable)
        nameless = pb.SessionRequest(hello=pb.SessionHello())
        assert isinstance(from_rpc_error(await first_answer(world, nameless)), InvalidArgument)
        assert len(world.decoding.sessions) == 0
        hello = pb.SessionHello(router=identity_to_proto(RouterEnd.of(world).identity))
        twice = [pb.SessionRequest(hello=hello)] * 2
        assert isinstance(from_rpc_error(await first_answer(world, *twice)), InvalidArgument)


async def test_silence_instead_of_a_hello_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servicer_module, "HELLO_S", 0.1)
    async with pair() as world:
        call = world.decode_stub.Session()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
