"""A worker that stands by serves from the moment another is lost until it is back."""

from __future__ import annotations

from typing import Any

from batonlm.core.request.request import Request, TokenPrompt
from batonlm.core.routing.load import WorkerState
from batonlm.router.config import RouterConfig
from batonlm.router.workers.fleet import Pool
from tests.services.router.conftest import World, until

CONFIG = RouterConfig(local_prefill_tokens=4096)
EACH = 4


async def asked(world: World, number: int) -> None:
    """So many requests, one after the other, all answered."""
    for seed in range(number):
        prompt = TokenPrompt(tuple(b"hello"))
        answer = await world.ask(Request(prompt, seed=seed, max_tokens=4, ignore_eos=True))
        assert answer.reason() is not None


def standing_by(pool: Pool[Any]) -> str:
    return next(state for state, number in pool.standbys().items() if number)


async def started(world: World) -> Pool[Any]:
    world.decodes.append(world.new_decode())
    world.decodes[0].standby = True
    await world.start(CONFIG, prefills=0, decodes=1)
    assert world.fleet is not None
    return world.fleet.decodes


async def test_it_serves_while_another_is_gone(world: World) -> None:
    pool = await started(world)
    standby, other = world.decodes
    await asked(world, EACH)
    assert (len(standby.starts), len(other.starts)) == (0, EACH)
    assert standing_by(pool) == "waiting"
    await other.kill()
    await asked(world, EACH)
    assert len(standby.starts) >= EACH
    await until(lambda: standing_by(pool) == "used")
    back = world.new_decode()
    world.decodes.append(back)
    await back.start(world.addresses["decode"][1])
    await until(lambda: standing_by(pool) == "waiting")
    before = len(standby.starts)
    await asked(world, EACH)
    assert (len(standby.starts), len(back.starts)) == (before, EACH)


async def test_it_serves_while_another_drains(world: World) -> None:
    pool = await started(world)
    standby, other = world.decodes
    other.state = WorkerState.DRAINING
    await until(lambda: standing_by(pool) == "used")
    await asked(world, EACH)
    assert (len(standby.starts), len(other.starts)) == (EACH, 0)
    other.state = WorkerState.SERVING
    await until(lambda: standing_by(pool) == "waiting")
    await asked(world, EACH)
    assert (len(standby.starts), len(other.starts)) == (EACH, EACH)
