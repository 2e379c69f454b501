"""`batonlm.client` against the router's gRPC service over a real socket, answers scripted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from batonlm.client import (
    Accepted,
    AsyncClient,
    Cancelled,
    Client,
    ContextLengthExceeded,
    Delta,
    Finished,
    FinishReason,
    InvalidArgument,
    Message,
    Overloaded,
    Retries,
    Unavailable,
)
from batonlm.core.request.request import Request
from tests.nobody import nobody
from tests.services.router_http.scripted import ADAPTER, MODEL, Scripted, whole_answer
from tests.services.router_http.test_timings import TIMES

ANSWER = whole_answer("<user>hello", 0)


async def test_events_are_typed_and_in_order(address: str, frontend: Scripted) -> None:
    frontend.stages = TIMES
    async with AsyncClient(address) as client, client.chat("hello", seed=5) as stream:
        events = [event async for event in stream]
        assert isinstance(events[0], Accepted) and events[0].seed == 5
        assert isinstance(events[-1], Finished)
        deltas = [event for event in events if isinstance(event, Delta)]
        assert len(events) == len(deltas) + 2
        assert "".join(delta.text for delta in deltas) == ANSWER
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert stream.finished == events[-1] and stream.accepted == events[0]
        stages = events[-1].stages
        assert stages is not None and stages.spent() == TIMES.spent()
        assert [worker.address for worker in stages.workers] == [w.address for w in TIMES.workers]


async def test_the_blocking_client_says_the_same(address: str) -> None:
    def ask() -> tuple[str, list[Any], list[str], tuple[str, ...]]:
        with Client(address) as client:
            with client.chat([Message("user", "hello")]) as stream:
                events = list(stream)
            four = client.generate("hello", n=2).read()
            return (
                client.chat([{"role": "user", "content": "hello"}]).text,
                events,
                [model.name for model in client.models()],
                tuple(choice.text for choice in four.choices),
            )

    text, events, models, choices = await asyncio.to_thread(ask)
    assert text == ANSWER
    assert "".join(event.text for event in events if isinstance(event, Delta)) == ANSWER
    assert models == [MODEL.name, ADAPTER.name]
    assert choices == (whole_answer("hello", 0), whole_answer("hello", 1))


async def test_what_is_asked_arrives(address: str, frontend: Scripted) -> None:
    async with AsyncClient(address) as client:
        answer = await client.generate(
            list(b"hello"),
            max_tokens=30,
            temperature=0.0,
            top_k=3,
            stop="zz",
            stop_token_ids=[7],
            logit_bias={5: 1.5},
            top_logprobs=2,
            return_token_ids=True,
            priority=4,
            cache_salt="mine",
            ignore_eos=True,
            no_speculation=True,
        ).read()
        assert await client.generate("x", model=MODEL.name).text() == whole_answer("x", 0)
    request, plain = frontend.seen
    assert (request.max_tokens, request.stop_strings, request.stop_token_ids) == (30, ("zz",), (7,))
    assert (request.sampling.temperature, request.sampling.top_k) == (0.0, 3)
    assert request.sampling.logit_bias == ((5, 1.5),)
    assert (request.priority, request.ignore_eos) == (4, True)
    assert request.cache_salt == b"mine"
    assert request.no_speculation and not plain.no_speculation
    assert (plain.max_tokens, plain.sampling.temperature, plain.seed) == (None, 1.0, None)
    (choice,) = answer.choices
    assert bytes(choice.token_ids).decode(errors="ignore")[:5] == answer.text[:5]
    assert len(choice.logprobs) == len(choice.token_ids)
    assert len(choice.logprobs[0].top) == 2
    assert answer.accepted.prompt_token_ids == tuple(b"hello")


@pytest.mark.parametrize("options", [{"max_tokens": -1}, {"seed": 2**70}, {"stop": 3}])
async def test_what_cannot_be_sent_is_named(address: str, options: Any) -> None:
    async with AsyncClient(address) as client:
        with pytest.raises(InvalidArgument) as caught:
            client.chat("hello", **options)
        assert caught.value.field == next(iter(options))
        with pytest.raises(TypeError, match="no option 'tmperature'"):
            client.chat("hello", tmperature=1.0)  # type: ignore[call-arg]


async def test_failures_keep_their_field_and_their_hint(address: str, frontend: Scripted) -> None:
    async with AsyncClient(address, retries=Retries(most=0)) as client:
        with pytest.raises(InvalidArgument) as bad:
            await client.chat("hello", temperature=9.0).read()
        assert bad.value.field == "options.sampling.temperature"
        with pytest.raises(ContextLengthExceeded):
            await client.chat("x" * 5000).read()
        frontend.refusal = Overloaded("full", retry_after_s=7.5)
        with pytest.raises(Overloaded) as full:
            await client.chat("hello").read()
        assert (full.value.message, full.value.retry_after_s) == ("full", 7.5)
        frontend.refusal = Unavailable("nobody is there")
        with pytest.raises(Unavailable) as gone:
            await client.chat("hello").read()
        assert gone.value.retry_after_s == 1.0, "a hint even if nobody knows"


async def test_it_tries_again_while_nothing_came(address: str, frontend: Scripted) -> None:
    frontend.refusal = Overloaded("full", retry_after_s=0.01)
    async with AsyncClient(address, retries=Retries(most=3)) as client:
        with pytest.raises(Overloaded):
            await client.chat("hello").read()
        assert len(frontend.seen) == 4
        frontend.refusal = Overloaded("full", retry_after_s=60.0)
        with pytest.raises(Overloaded):
            await client.chat("hello", timeout_s=30.0).read()
        assert len(frontend.seen) == 5, "it would not end in time"
        frontend.refusal, frontend.failure = None, Unavailable("lost", retry_after_s=0.01)
        with pytest.raises(Unavailable):
            await client.chat("hello", event_ids=False).read()
        assert len(frontend.seen) == 6, "something of it came"

    def ask() -> None:
        with Client(address, retries=Retries(most=1)) as client:
            client.chat("hello").read()

    frontend.failure, frontend.refusal = None, Overloaded("full", retry_after_s=0.01)
    with pytest.raises(Overloaded):
        await asyncio.to_thread(ask)
    assert len(frontend.seen) == 8


async def test_a_stream_with_ids_goes_on_where_it_was(
    address: str, frontend: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = frontend.open

    async def open_again(request: Request, holding: Any = None) -> Any:
        if request.resumes is not None:
            # Another router, which cuts the same text into other pieces.
            frontend.failure, frontend.together = None, 3
        return await begin(request, holding)

    monkeypatch.setattr(frontend, "open", open_again)
    frontend.failure = Unavailable("lost", retry_after_s=0.01)
    async with AsyncClient(address) as client:
        stream = client.chat("hello", n=2, event_ids=True, return_token_ids=True)
        events = [event async for event in stream]
        answer = await stream.read()
        expected = await client.chat("hello", n=2, return_token_ids=True).read()
    assert sum(isinstance(event, Accepted) for event in events) == 1
    assert answer.choices == expected.choices and len(frontend.seen) == 3

    def ask() -> str:
        with Client(address) as client:
            return client.chat("hello", event_ids=True).text

    frontend.failure, frontend.together = Unavailable("lost", retry_after_s=0.01), 1
    assert await asyncio.to_thread(ask) == ANSWER


async def test_it_is_asked_for_ids_unless_the_caller_says_otherwise(
    address: str, frontend: Scripted
) -> None:
    async with AsyncClient(address) as client, AsyncClient(address, resume=False) as other:
        for asking in (client, other):
            await asking.chat("hello").read()
            await asking.chat("hello", event_ids=True).read()
            await asking.chat("hello", event_ids=False).read()
    told = [request.resumable for request in frontend.seen]
    assert told == [True, True, False, False, True, False]


async def test_a_name_for_two_models_is_asked_without_ids(
    address: str, frontend: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = frontend.open

    async def open_without(request: Request, holding: Any = None) -> Any:
        if request.resumable:
            raise InvalidArgument("either of two may have answered", field="resumable")
        return await begin(request, holding)

    monkeypatch.setattr(frontend, "open", open_without)
    async with AsyncClient(address) as client:
        assert await client.chat("hello").text() == ANSWER
        with pytest.raises(InvalidArgument):
            await client.chat("hello", event_ids=True).read()

    def ask() -> str:
        with Client(address) as client:
            return client.chat("hello").text

    assert await asyncio.to_thread(ask) == ANSWER


async def test_the_next_router_is_asked_when_one_is_away(address: str, frontend: Scripted) -> None:
    """Though `most` is 0: that counts rounds over all of them."""
    none = Retries(most=0)
    with nobody() as one, nobody() as other:
        async with AsyncClient([one, other, address], retries=none) as client:
            assert await client.chat("hello").text() == ANSWER
            assert [model.name for model in await client.models()] == [MODEL.name, ADAPTER.name]
        with pytest.raises(Unavailable):
            async with AsyncClient([one, other], retries=none) as client:
                await client.chat("hello").text()

        def ask() -> str:
            with Client([one, other, address], retries=none) as client:
                return client.chat("hello").text

        assert await asyncio.to_thread(ask) == ANSWER
    with pytest.raises(InvalidArgument) as caught:
        Client([])
    assert caught.value.field == "address"


async def test_going_on_is_bounded(address: str, frontend: Scripted) -> None:
    """In rounds without anything new, and in time."""
    frontend.failure = Unavailable("lost", retry_after_s=0.01)
    few = Retries(most=0, most_resumes=3)
    async with AsyncClient(address, retries=few) as client:
        with pytest.raises(Unavailable):
            await client.chat("hello").read()
        assert len(frontend.seen) == 4, "three more that brought nothing"
    async with AsyncClient(address, retries=Retries(resume_s=0.0)) as client:
        with pytest.raises(Unavailable):
            await client.chat("hello").read()
        assert len(frontend.seen) == 5
    frontend.failure = Unavailable("lost", retry_after_s=60.0)
    async with AsyncClient(address) as client:
        with pytest.raises(Unavailable):
            await client.chat("hello", timeout_s=30.0).read()
    assert len(frontend.seen) == 6


async def test_a_key_is_sent_along(address: str, frontend: Scripted) -> None:
    async with AsyncClient(address) as client:
        await client.chat("hello", idempotency_key="k").read()
        await client.generate("hello", idempotency_key="k").read()
        await client.generate("hello").read()
    keys = [request.keyed_stream_id for request in frontend.seen]
    assert keys[0] and keys[0] == keys[1] and not keys[2]


@pytest.mark.parametrize("blocking", [False, True])
async def test_closing_ends_a_stream_that_could_go_on(
    address: str, frontend: Scripted, *, blocking: bool
) -> None:
    """At once, though the router would have kept it."""
    frontend.keep(kept_s=3600.0)
    frontend.hold = True

    def leave() -> None:
        with Client(address) as client, client.chat("hello") as stream:
            assert any(isinstance(event, Delta) for event in stream)

    async def leave_too() -> None:
        async with AsyncClient(address) as client, client.chat("hello") as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    break

    await (asyncio.to_thread(leave) if blocking else leave_too())
    async with asyncio.timeout(120):
        await frontend.closed.wait()
        # What runs it has closed it, and ends.
        await asyncio.gather(*frontend.tasks, return_exceptions=True)
    assert not frontend.tasks


async def test_closing_a_stream_ends_its_request(address: str, frontend: Scripted) -> None:
    frontend.hold = True
    async with AsyncClient(address) as client:
        async with client.chat("hello") as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    break
        async with asyncio.timeout(120):
            await frontend.closed.wait()

        def leave() -> None:
            with Client(address) as blocking, blocking.chat("hello") as stream:
                assert any(isinstance(event, Delta) for event in stream)

        frontend.closed.clear()
        await asyncio.to_thread(leave)
        async with asyncio.timeout(120):
            await frontend.closed.wait()


async def test_a_closed_client_does_not_try_again(address: str, frontend: Scripted) -> None:
    frontend.hold = True

    def leave() -> None:
        client = Client(address)
        with client.chat("hello") as stream:
            assert any(isinstance(event, Delta) for event in stream)
            client.close()
            with pytest.raises(Cancelled):
                stream.read()

    await asyncio.to_thread(leave)
    async with asyncio.timeout(120):
        await frontend.closed.wait()


def test_a_key_is_not_shown_to_another_machine_in_plain_text() -> None:
    with pytest.raises(InvalidArgument) as caught:
        Client("10.0.0.1:50051", api_key="baton-k")
    assert caught.value.field == "api_key"
    with pytest.raises(InvalidArgument) as nowhere:
        Client("nowhere")
    assert nowhere.value.field == "address"
    Client("10.0.0.1:50051", api_key="baton-k", tls=True).close()
