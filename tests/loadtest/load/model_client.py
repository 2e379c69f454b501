"""A client without a server, for a clock that jumps: what it answers and when is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton_loadtest.drive import ANSWERED, Clock, LoadLimits, OpenLoop, Run, TokenIds, Workload
from baton_loadtest.load.scenario import Arrivals, Drawn, Kind, fixed
from tests.sim.virtual_loop import VirtualLoop

Asked = tuple[tuple[int, ...], int]
IDS = TokenIds(0, 64, 1899)


@dataclass
class ModelClient:
    """first_s, between_s: of the request with that number, counted from 0. before: called with its
    number when it is asked. end: of each."""

    first_s: Callable[[int], float] = lambda number: 0.1
    between_s: float = 0.01
    before: Callable[[int], None] = lambda number: None
    end: Callable[[int], str] = lambda number: ANSWERED
    asked: list[Asked] = field(default_factory=list)

    def prepare(self, ids: Sequence[int], output_tokens: int) -> Asked:
        return tuple(ids), output_tokens

    async def ask(self, request: Asked, hear: Callable[[Sequence[int], int], None]) -> str:
        number = len(self.asked)
        self.asked.append(request)
        self.before(number)
        await asyncio.sleep(self.first_s(number))
        for place in range(request[1]):
            if place:
                await asyncio.sleep(self.between_s)
            hear((10_000 + place,), 1)
        return self.end(number)


def even(rate: float, seconds: float, prompt: int = 4, output: int = 3) -> Workload:
    """Requests evenly apart."""
    return Drawn(Arrivals(Kind.CONSTANT, rate, seconds), fixed(prompt, output)).workload(0)


def virtually(
    client: ModelClient,
    workload: Workload,
    limits: LoadLimits | None = None,
    stop_s: float = 0.0,
    loop: VirtualLoop | None = None,
) -> Run:
    """A run on a clock that jumps. stop_s: it is stopped then."""
    loop = loop or VirtualLoop()

    async def main() -> Run:
        runner = OpenLoop(client, IDS, limits or LoadLimits(), Clock(loop.time, spin_s=0.0))
        if stop_s:
            loop.call_later(stop_s, runner.stop)
        return await runner.run(workload)

    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()
