"""What may happen to the processes of a schedule, drawn from its seed; checks nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

from tests.sim.hosts import Host
from tests.sim.kv import KvNetwork
from tests.sim.network import DOWN, UP
from tests.sim.traces import Traces
from tests.sim.workers import START, Worker

LONG_S = 1.0
"""A silence that may count as a death, with what a message takes."""


@dataclass
class Machine:
    """A host and what runs on it now."""

    role: str
    host: Host
    kv: KvNetwork
    step_s: float
    traces: Traces | None = None
    worker: Worker | None = None
    cut_off: bool = False
    """It may have missed what it was told."""

    def start(self) -> None:
        self.host.boot()
        if self.traces is not None:
            self.host.tracer = self.traces.start(self.host.address, self.role)
        self.worker = self.host.run(lambda: START[self.role](self.host, self.kv, self.step_s))

    def restore(self) -> None:
        """Whatever happened, it runs and can be reached."""
        self.host.release(reset=False)
        if self.host.frozen:
            self.host.thaw()
        if not self.host.alive:
            self.start()


class Disturbances:
    """losses: how many of them may cost a request an attempt."""

    def __init__(self, draw: Random, machines: list[Machine], *, losses: int) -> None:
        self.losses = losses
        self._draw, self._machines = draw, machines

    async def some(self) -> None:
        """A few, one after the other or on top of each other."""
        count = self._draw.choice((0, 1, 1, 2, 2, 3, 5))
        await asyncio.gather(*(self._one() for _ in range(count)))

    async def _one(self) -> None:
        draw = self._draw
        machine = draw.choice(self._machines)
        kind = draw.choice(("kill", "kill", "freeze", "hold", "reset", "drain"))
        await asyncio.sleep(draw.uniform(0.0, 1.5))
        if not machine.host.alive or machine.host.frozen or any(machine.host.held):
            return
        machine.cut_off |= kind in ("freeze", "hold", "reset")
        await getattr(self, f"_{kind}")(machine)

    async def _kill(self, machine: Machine) -> None:
        self.losses += 1
        machine.host.kill()
        await asyncio.sleep(self._draw.uniform(0.05, 1.5))
        machine.restore()

    async def _freeze(self, machine: Machine) -> None:
        seconds = self._draw.choice((0.3, 0.9, 2.4))
        self.losses += seconds > LONG_S
        machine.host.freeze()
        await asyncio.sleep(seconds)
        if machine.host.alive:
            machine.restore()

    async def _hold(self, machine: Machine) -> None:
        seconds = self._draw.choice((0.2, 0.9, 2.4))
        reset = self._draw.random() < 0.3
        self.losses += seconds > LONG_S or reset
        machine.host.hold(self._draw.choice(((UP,), (DOWN,), (UP, DOWN))))
        await asyncio.sleep(seconds)
        machine.host.release(reset=reset)

    async def _reset(self, machine: Machine) -> None:
        calls = list(machine.host.calls)
        if calls:
            self.losses += 1
            self._draw.choice(calls).reset()

    async def _drain(self, machine: Machine) -> None:
        self.losses += 1
        assert machine.worker is not None
        leaving = machine.host.spawn(machine.worker.drain())
        await asyncio.wait([leaving], timeout=self._draw.uniform(0.5, 3.0))
        if machine.host.alive:
            machine.host.kill()
            await asyncio.sleep(self._draw.uniform(0.05, 0.5))
            machine.restore()
