"""`batonlm.client` against router processes that are killed in mid-stream."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from batonlm.client import (
    Accepted,
    AsyncClient,
    Client,
    Delta,
    Event,
    Finished,
    Retries,
    Unavailable,
)
from batonlm.testing import language
from tests.services.router.conftest import PATIENCE_S, World
from tests.services.router.router_process import RouterProcess, router_beside

PROMPT = "the cat sat on the mat"
SEED, TOKENS = 7, 60
BROKEN_AFTER = 8
"""Tokens that have come when a router is killed for the first time, and between two times."""
ASKED: Any = {
    "seed": SEED,
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "return_token_ids": True,
}
EXPECTED, _ = language.answer(tuple(PROMPT.encode()), SEED, 0, TOKENS, ignore_eos=True)
PATIENT = Retries(most_resumes=1000, longest_s=1.0, resume_s=PATIENCE_S)


@asynccontextmanager
async def two_routers(world: World) -> AsyncIterator[list[RouterProcess]]:
    world.add()
    await world.serve()
    async with router_beside(world) as one, router_beside(world) as other:
        yield [one, other]


async def kill(router: RouterProcess) -> None:
    router.signal(signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        await router.process.wait()


def tokens_of(events: list[Event]) -> tuple[int, ...]:
    return tuple(i for event in events if isinstance(event, Delta) for i in event.token_ids)


def check(events: list[Event]) -> None:
    """Every part came, once, and in order."""
    others = [type(event) for event in events if not isinstance(event, Delta)]
    assert others == [Accepted, Finished]
    assert isinstance(events[0], Accepted) and isinstance(events[-1], Finished)
    assert tokens_of(events) == EXPECTED
    text = "".join(event.text for event in events if isinstance(event, Delta))
    assert text == language.text_of(EXPECTED)


class Breaks:
    """What happens in the middle of a stream, each time some more tokens have come. Until the last
    one has happened, decode does not get much further than its client."""

    def __init__(self, world: World, *happenings: Callable[[], Awaitable[None]]) -> None:
        (self._decode,) = world.decodes
        self._left = [*happenings]
        self._from(0)

    def _from(self, position: int) -> None:
        self._at = position + BROKEN_AFTER
        self._decode.last_position = self._at + BROKEN_AFTER if self._left else None

    async def after(self, events: list[Event]) -> None:
        if self._left and len(tokens_of(events)) >= self._at:
            await self._left.pop(0)()
            self._from(len(tokens_of(events)))


async def test_a_stream_goes_on_at_another_router(world: World) -> None:
    async with two_routers(world) as routers:
        breaks = Breaks(world, lambda: kill(routers[0]))
        events: list[Event] = []
        async with AsyncClient([router.grpc for router in routers], retries=PATIENT) as client:
            async for event in client.generate(PROMPT, **ASKED):
                events.append(event)
                await breaks.after(events)
            check(events)
            # The other one is asked from now on.
            assert (await client.generate(PROMPT, **ASKED).read()).choices[0].token_ids == EXPECTED


@pytest.mark.deep
async def test_the_blocking_client_does_the_same(world: World) -> None:
    loop = asyncio.get_running_loop()
    async with two_routers(world) as routers:
        breaks = Breaks(world, lambda: kill(routers[0]))

        def ask() -> list[Event]:
            events: list[Event] = []
            addresses = [router.grpc for router in routers]
            with Client(addresses, retries=PATIENT) as client:
                for event in client.generate(PROMPT, **ASKED):
                    events.append(event)
                    asyncio.run_coroutine_threadsafe(breaks.after(events), loop).result(PATIENCE_S)
            return events

        check(await asyncio.to_thread(ask))


@pytest.mark.deep
async def test_it_goes_on_as_often_as_a_router_is_lost(world: World) -> None:
    """Also where one has started again, and while none is there."""
    async with two_routers(world) as routers, AsyncExitStack() as started:
        addresses = [router.grpc for router in routers]
        starting: list[asyncio.Task[RouterProcess]] = []

        async def start_again() -> RouterProcess:
            listen = f"--grpc-listen={addresses[0]}"
            return await started.enter_async_context(router_beside(world, listen))

        async def kill_the_last() -> None:
            await kill(routers[1])
            starting.append(asyncio.create_task(start_again()))

        breaks = Breaks(world, lambda: kill(routers[0]), kill_the_last)
        events: list[Event] = []
        async with AsyncClient(addresses, retries=PATIENT) as client:
            async for event in client.generate(PROMPT, **ASKED):
                events.append(event)
                await breaks.after(events)
        check(events)
        assert starting, "both were lost"
        await starting[0]


@pytest.mark.deep
async def test_where_no_router_is_left_it_ends(world: World) -> None:
    async with two_routers(world) as routers:

        async def kill_both() -> None:
            for router in routers:
                await kill(router)

        breaks = Breaks(world, kill_both)
        events: list[Event] = []
        addresses = [router.grpc for router in routers]
        async with AsyncClient(addresses, retries=Retries(resume_s=1.0)) as client:
            with pytest.raises(Unavailable):
                async for event in client.generate(PROMPT, **ASKED):
                    events.append(event)
                    await breaks.after(events)
        assert 0 < len(tokens_of(events)) < TOKENS
