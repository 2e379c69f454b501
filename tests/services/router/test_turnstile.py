"""Waiting, cancelling, freeing and closing in every order: no place and no token stays taken."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from batonlm.core.admission.concurrency_limiter import ConcurrencyLimiter
from batonlm.core.admission.fair_queue import DrainRate, Entry, FairQueue
from batonlm.core.errors import BatonError
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.routing.failures import Breaker
from batonlm.core.routing.load import WorkerDescription
from batonlm.core.routing.routing import Decision
from batonlm.router.request.dispatcher import (
    Blocked,
    Dispatcher,
    PendingAttempt,
    Placement,
    WorkerClass,
)
from batonlm.router.workers.discovery import Discovery
from batonlm.router.workers.fleet import Fleet, Worker
from batonlm.rpc.channels import Channels

TOKENS = 10
"""Of each input; the window has room for one."""

ROUTER = WorkerIdentity("router", "r" * 32, "")
KIND = WorkerClass("m", needs_decode=True, short=False)
GIVE_UP_S = 3600.0
"""Long enough that only a clock that is put forward reaches it."""
PATIENCE_S = 120.0


class SkippingLoop(asyncio.SelectorEventLoop):
    """skipped_s: by how much its clock was put forward."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


class Scene:
    """One dispatcher with a full window: `held` has the place that "a" and "b" wait for."""

    def __init__(self, loop: SkippingLoop) -> None:
        self.loop = loop
        self.troubles: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, trouble: self.troubles.append(trouble))
        self.dispatcher = Dispatcher(
            Fleet(Discovery({}), Channels(), ROUTER),
            FairQueue(max_tokens=1000, max_entries=100),
            DrainRate(),
            ConcurrencyLimiter(TOKENS, 1, 10 * TOKENS),
            max_queue_s=60.0,
            retry_after_s=lambda wait_s: wait_s,
        )
        nothing: Any = None
        about = WorkerDescription(WorkerIdentity("decode", "d" * 32, ""))
        self.worker = Worker(about, nothing, nothing, Breaker())
        self.absent = False
        self.over: set[str] = set()
        self.asked: dict[str, asyncio.Task[Placement | Blocked | None]] = {}
        self.closing: list[asyncio.Task[None]] = []
        self.held: Placement | None = None

    def find(self, full: frozenset[str]) -> Placement | Blocked:
        if self.absent:
            return Blocked.ABSENT
        decision = Decision(None, self.worker.identity, "the only one", ())
        return Placement(None, self.worker, decision)

    def ask(self, name: str) -> None:
        now = self.loop.time()
        pending_attempt = PendingAttempt(
            find=self.find,
            over=lambda: name in self.over,
            kind=KIND,
            input_tokens=TOKENS,
            choices=1,
            give_up=now + GIVE_UP_S,
            future=self.loop.create_future(),
        )
        entry = Entry(pending_attempt, "tenant", 1.0, 0, TOKENS, now)
        self.asked[name] = self.loop.create_task(self.dispatcher.wait(entry))

    async def begin(self) -> None:
        self.ask("first")
        found = await self.asked.pop("first")
        assert isinstance(found, Placement)
        self.held = found
        self.ask("a")
        self.ask("b")
        await turns(2)
        assert self.dispatcher.held["waiting"] == 2

    async def end(self) -> Sequence[object]:
        """What became of each, when all have ended and given back what they got."""
        await turns(6)
        for task in self.asked.values():
            task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            ends = await asyncio.gather(*self.asked.values(), return_exceptions=True)
        for place in (*ends, self.held):
            if isinstance(place, Placement):
                place.release()
        await turns(3)
        await self.dispatcher.close()
        await asyncio.gather(*self.closing)
        return ends

    def free(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            held.release()

    def end_a(self) -> None:
        self.over.add("a")
        self.dispatcher.turn_soon()

    def skip(self) -> None:
        """To where all have waited for too long."""
        self.loop.skipped_s += 2 * GIVE_UP_S

    def resize(self) -> None:
        """No worker is left for those who come next."""
        self.absent = not self.absent
        self.dispatcher.turn_soon()

    def close(self) -> None:
        self.closing.append(self.loop.create_task(self.dispatcher.close()))


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


ACTS: dict[str, Callable[[Scene], object]] = {
    "free": Scene.free,
    "cancel a": lambda scene: scene.asked["a"].cancel(),
    "cancel b": lambda scene: scene.asked["b"].cancel(),
    "a is over": Scene.end_a,
    "wait c": lambda scene: scene.ask("c"),
    "resize": Scene.resize,
    "deadline": Scene.skip,
    "close": Scene.close,
}


def orders() -> Iterator[tuple[str, ...]]:
    for number in range(1, 5):
        yield from itertools.permutations(ACTS, number)


@pytest.fixture
def loop() -> Iterator[SkippingLoop]:
    made = SkippingLoop()
    yield made
    made.close()


async def played(loop: SkippingLoop, acts: tuple[str, ...], *, apart: int | None = None) -> None:
    """Acts of one turn of the loop; with `apart` a turn passes before the act of that number."""
    scene = Scene(loop)
    await scene.begin()
    for number, act in enumerate(acts):
        if number == apart:
            await turns(1)
        ACTS[act](scene)
    ends = await scene.end()
    assert scene.troubles == [], acts
    for name, end in zip(scene.asked, ends, strict=True):
        well = end is None or isinstance(end, Placement | Blocked | BatonError)
        assert well or isinstance(end, asyncio.CancelledError), (acts, name, end)
    assert not any(scene.dispatcher.held.values()), (acts, scene.dispatcher.held)
    assert (scene.worker.placed_sequences, scene.worker.placed_tokens) == (0, 0), acts
    assert scene.dispatcher.window.tokens == 0, acts


def test_one_cancelled_in_the_turn_in_which_it_would_get_a_place(loop: SkippingLoop) -> None:
    """The turn runs before the cancelled task does; the next one gets the place instead."""

    async def play() -> None:
        scene = Scene(loop)
        await scene.begin()
        scene.free()
        scene.asked["a"].cancel()
        await turns(3)
        assert scene.troubles == []
        assert scene.asked["a"].cancelled()
        got = scene.asked["b"]
        assert got.done() and isinstance(got.result(), Placement)
        await scene.end()
        assert not any(scene.dispatcher.held.values())

    loop.run_until_complete(play())


def test_every_order_of_what_can_happen_in_one_turn(loop: SkippingLoop) -> None:
    async def play() -> None:
        for acts in orders():
            await played(loop, acts)

    loop.run_until_complete(play())


def test_every_order_with_a_turn_in_between(loop: SkippingLoop) -> None:
    async def play() -> None:
        for acts in itertools.permutations(ACTS, 3):
            for apart in (1, 2):
                await played(loop, acts, apart=apart)

    loop.run_until_complete(play())
