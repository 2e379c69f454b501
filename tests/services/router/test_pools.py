"""Where workers are is discovery's word; whether they live and what they do is their own."""

from __future__ import annotations

import asyncio

from batonlm.core.request.request import Request, TextPrompt
from batonlm.core.routing.load import WorkerState
from batonlm.router.config import RouterConfig
from batonlm.router.workers.decode_session import DecodeSession
from batonlm.router.workers.fleet import Pool
from batonlm.testing.scripted import ScriptedWorker
from tests.services.router.conftest import World, until

REQUEST = Request(TextPrompt("once upon a time"), seed=7, max_tokens=40, ignore_eos=True)
LOCAL = RouterConfig(local_prefill_tokens=1000)


def decodes(world: World) -> Pool[DecodeSession]:
    assert world.fleet is not None
    return world.fleet.decodes


def in_state(world: World, **numbers: int) -> bool:
    """Whether these, and no others, are the states of the decode workers."""
    return {state: n for state, n in decodes(world).states().items() if n} == numbers


async def test_a_worker_that_is_listed_no_more_goes_on_until_it_is_gone(world: World) -> None:
    await world.start(LOCAL)
    decode = world.decodes[0]
    decode.stepping.clear()
    asking = asyncio.create_task(world.ask(REQUEST))
    await until(lambda: len(decode.starts) == 1)
    world.listed["decode"].set([])
    decode.state = WorkerState.DRAINING
    await until(lambda: in_state(world, draining=1))
    assert world.pipeline.ready() is False, "nobody takes new work"
    decode.stepping.set()
    assert len((await asking).token_ids[0]) == 40
    await decode.kill()
    await until(lambda: in_state(world))
    assert decodes(world).links == {}
    channels = world.channels
    assert channels is not None
    # The channel is given up with its worker.
    await until(lambda: len(channels) == 3)


async def test_what_discovery_forgets_for_a_moment_changes_nothing(world: World) -> None:
    await world.start(LOCAL)
    steps: list[tuple[str, ...]] = [(), world.addresses["decode"], ()]
    for addresses in steps:
        world.listed["decode"].set(addresses)
        await asyncio.sleep(0)
        assert len((await world.ask(REQUEST)).token_ids[0]) == 40
    assert len(world.decodes[0].hellos) == 1, "it is the same stream all the time"


async def test_an_address_that_comes_back_has_another_worker(world: World) -> None:
    await world.start(LOCAL)
    (address,) = world.addresses["decode"]
    await world.decodes[0].kill()
    await until(lambda: in_state(world, gone=1))
    assert world.listed["decode"].doubts > 0, "discovery is told that nobody answered"
    world.listed["decode"].set([])
    await until(lambda: decodes(world).links == {})
    replacement = world.new_decode()
    world.decodes.append(replacement)
    await replacement.start(address)
    world.listed["decode"].set([address])
    await until(lambda: in_state(world, serving=1))
    assert len((await world.ask(REQUEST)).token_ids[0]) == 40


async def test_a_stranger_at_an_address_that_is_listed_no_more_is_not_followed(
    world: World,
) -> None:
    await world.start(LOCAL)
    (address,) = world.addresses["decode"]
    world.listed["decode"].set([])
    stranger = world.new_decode()
    await world.decodes[0].kill()
    await stranger.start(address)
    world.decodes.append(stranger)
    await until(lambda: decodes(world).links == {})
    assert stranger.hellos == []


async def test_one_worker_at_two_addresses_is_one_worker(world: World) -> None:
    await world.start(LOCAL)
    (address,) = world.addresses["decode"]
    world.listed["decode"].set([address, address.replace("127.0.0.1", "localhost")])
    await until(lambda: any(link.elsewhere for link in decodes(world).links.values()))
    assert in_state(world, serving=1)
    assert len((await world.ask(REQUEST)).token_ids[0]) == 40
    assert len(world.decodes[0].hellos) == 1


async def test_every_state_is_the_workers_word(world: World) -> None:
    await world.start(LOCAL)
    for state in (WorkerState.STARTING, WorkerState.KV_ONLY, WorkerState.SERVING):
        world.decodes[0].state = state
        await until(lambda state=state: in_state(world, **{state.name.lower(): 1}))  # type: ignore[misc]
    nobody = "127.0.0.1:1"
    world.listed["decode"].set([*world.addresses["decode"], nobody])
    await until(lambda: in_state(world, serving=1, starting=1))


async def test_a_worker_of_another_role_gets_no_work(world: World) -> None:
    await world.start(LOCAL)
    wrong: ScriptedWorker = world.prefills[0]
    world.listed["decode"].set([*world.addresses["decode"], wrong.identity.address])
    await until(lambda: len(decodes(world).links) == 2)
    assert len((await world.ask(REQUEST)).token_ids[0]) == 40
    assert len(decodes(world).workers()) == 1


async def test_tokenizers_and_detokenizers_that_drain_get_nothing_new(world: World) -> None:
    await world.start(LOCAL, tokenizers=2, detokenizers=2)
    assert world.fleet is not None
    world.tokenizers[0].state = world.detokenizers[0].state = WorkerState.DRAINING
    pools = (world.fleet.tokenizers, world.fleet.detokenizers)
    await until(lambda: all(len(pool.serving()) == 1 for pool in pools))
    await asyncio.gather(*(world.ask(REQUEST) for _ in range(4)))
    assert len(world.detokenizers[1].openings) == 4
    assert world.detokenizers[0].openings == []
