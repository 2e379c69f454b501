"""A stream whose router or last worker is gone is a failure for whoever reads it, never an end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable, Coroutine

import httpx
import openai
import pytest

from baton_loadtest.drive import HttpLoadClient
from batonlm.cli.access import Access
from batonlm.cli.http_client import ConnectionLost, HttpClient
from batonlm.client import AsyncClient, Client, Delta
from batonlm.client.client import Retries
from batonlm.core.errors import Unavailable
from tests.services.router.conftest import World
from tests.services.router.router_process import RouterProcess, router_process
from tests.services.router_http.scripted import openai_client

PROMPT = "the cat sat on the mat"
BODY = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True}
BETWEEN_S = 0.05
"""Between two tokens: no answer ends before a test has done what it does to it."""
RETRIES = Retries(first_s=0.1, most_resumes=2)
"""Of clients that try to go on: nobody will answer."""

Reader = Callable[[RouterProcess, Callable[[], None]], Coroutine[None, None, None]]
"""Reads a stream that is going to break, calls the function at its first token, and asserts that
the client says so at the end."""


async def raw(router: RouterProcess, begun: Callable[[], None]) -> None:
    with pytest.raises(httpx.HTTPError):
        async with (
            httpx.AsyncClient(trust_env=False, timeout=120) as client,
            client.stream("POST", f"http://{router.http}/v1/completions", json=BODY) as answer,
        ):
            async for line in answer.aiter_lines():
                assert "[DONE]" not in line
                begun()


async def of_openai(router: RouterProcess, begun: Callable[[], None]) -> None:
    async with openai_client(router.http) as client:
        with pytest.raises((httpx.HTTPError, openai.APIError)):
            async for _ in await client.completions.create(
                model="",
                prompt=PROMPT,
                max_tokens=1000,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                begun()


async def of_the_load_test(router: RouterProcess, begun: Callable[[], None]) -> None:
    client = HttpLoadClient(Access(router.http), "")
    request = client.prepare(tuple(PROMPT.encode()), 1000)
    assert await client.ask(request, lambda ids, number: begun()) == "connection lost"
    await client.close()


async def of_the_commands(router: RouterProcess, begun: Callable[[], None]) -> None:
    client = HttpClient(Access(router.http))
    asking = asyncio.create_task(client.post("/v1/completions", json.dumps(BODY).encode(), 60.0))
    await asyncio.sleep(0)
    begun()
    with pytest.raises(ConnectionLost):
        await asking
    await client.close()


async def over_grpc(router: RouterProcess, begun: Callable[[], None]) -> None:
    async with AsyncClient(router.grpc, retries=RETRIES) as client:
        with pytest.raises(Unavailable):
            async for event in client.generate(PROMPT, max_tokens=1000, ignore_eos=True):
                if isinstance(event, Delta):
                    begun()


async def over_blocking_grpc(router: RouterProcess, begun: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()

    def read() -> None:
        with Client(router.grpc, retries=RETRIES) as client, pytest.raises(Unavailable):
            for event in client.generate(PROMPT, max_tokens=1000, ignore_eos=True):
                if isinstance(event, Delta):
                    loop.call_soon_threadsafe(begun)

    await asyncio.to_thread(read)


@pytest.mark.deep
async def test_every_client_takes_a_router_that_was_killed_for_a_failure(world: World) -> None:
    readers: list[Reader] = [
        *(raw, of_openai, of_the_load_test, of_the_commands, over_grpc, over_blocking_grpc)
    ]
    world.add()
    world.decodes[0].step_s = BETWEEN_S
    async with router_process(world) as router:
        begun = [asyncio.Event() for _ in readers]
        reading = [
            asyncio.create_task(read(router, event.set))
            for read, event in zip(readers, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        await router.until(lambda told: told["baton_requests_open"] == len(readers))
        router.signal(signal.SIGKILL)
        await router.process.wait()
        async with asyncio.timeout(120):
            await asyncio.gather(*reading)


@pytest.mark.deep
async def test_a_stream_without_a_worker_to_go_on_says_to_try_again(world: World) -> None:
    world.add()
    world.decodes[0].step_s = BETWEEN_S
    async with (
        router_process(world, "--wait-timeout-s=1") as router,
        httpx.AsyncClient(trust_env=False, timeout=120) as client,
        client.stream("POST", f"http://{router.http}/v1/completions", json=BODY) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        await world.decodes[0].kill()
        data = [line.removeprefix("data: ") async for line in lines if line]
        error = json.loads(data[-1])["error"]
        assert (error["code"], error["retryable"]) == ("unavailable", True)


@pytest.mark.deep
async def test_a_router_that_is_told_twice_to_stop_says_to_try_again(world: World) -> None:
    """The second signal ends it at once, whatever still runs."""
    world.add()
    world.decodes[0].step_s = BETWEEN_S
    async with (
        router_process(world) as router,
        httpx.AsyncClient(trust_env=False, timeout=120) as client,
        client.stream("POST", f"http://{router.http}/v1/completions", json=BODY) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        router.signal(signal.SIGTERM)
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(trust_env=False, timeout=120) as other:
                health = f"http://{router.http}/health"
                while (await other.get(health)).status_code != 503:  # noqa: ASYNC110 (a process)
                    await asyncio.sleep(0.01)
        router.signal(signal.SIGTERM)
        data = [line.removeprefix("data: ") async for line in lines if line]
        error = json.loads(data[-1])["error"]
        assert (error["code"], error["retryable"]) == ("unavailable", True)
        assert await router.process.wait() == 128 + signal.SIGTERM
