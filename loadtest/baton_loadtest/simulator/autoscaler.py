"""Scales a simulated fleet by a rule.

A new worker serves after its start-up time and is paid for from the beginning. To shrink a pool,
workers that are still starting are cancelled first; then the least loaded ones are drained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from baton_loadtest.simulator.queue import IDLE
from baton_loadtest.simulator.settings import FleetFacts
from baton_loadtest.simulator.simulation import Simulation
from batonlm.core.routing.scaling import Bounds, DecodeSignals, PrefillSignals, ScalingRule

LOOK_S = 1.0
"""Interval between checks of how busy workers are."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The current state of a pool."""

    workers: int
    """That serve or start."""
    busy: float
    """Share of the workers' time in the last period in which a step ran."""


class Choice(Protocol):
    """A rule, evaluated for both pools every period."""

    def prefill(self, now: float, seen: Seen, signals: PrefillSignals) -> int: ...

    def decode(self, now: float, seen: Seen, signals: DecodeSignals) -> int: ...


class Leading:
    """Core's rule."""

    def __init__(self, rule: ScalingRule) -> None:
        self._rule = rule

    def prefill(self, now: float, seen: Seen, signals: PrefillSignals) -> int:
        return self._rule.prefill(now, signals)

    def decode(self, now: float, seen: Seen, signals: DecodeSignals) -> int:
        return self._rule.decode(now, signals)


class Reactive:
    """Scales by how busy workers were, as Kubernetes' HPA does by CPU: to the number that would be
    `busy`, unless that is close; shrinks to the maximum of the last hold_s."""

    TOLERANCE = 0.1

    def __init__(self, prefill: Bounds, decode: Bounds, busy: float, hold_s: float) -> None:
        self._bounds = {"prefill": prefill, "decode": decode}
        self._busy, self._hold_s = busy, hold_s
        self._past: dict[str, deque[tuple[float, int]]] = {"prefill": deque(), "decode": deque()}

    def prefill(self, now: float, seen: Seen, signals: PrefillSignals) -> int:
        return self._target("prefill", now, seen)

    def decode(self, now: float, seen: Seen, signals: DecodeSignals) -> int:
        return self._target("decode", now, seen)

    def _target(self, role: str, now: float, seen: Seen) -> int:
        ratio, wanted = seen.busy / self._busy, seen.workers
        if abs(ratio - 1.0) > self.TOLERANCE:
            wanted = ceil(seen.workers * ratio)
        wanted = self._bounds[role].within(wanted)
        past = self._past[role]
        past.append((now, wanted))
        while past[0][0] < now - self._hold_s:
            past.popleft()
        return max(target for _, target in past)


class _Pool:
    """starting: one token per worker that is starting and can be cancelled."""

    def __init__(self, workers: int) -> None:
        self.serving = set(range(workers))
        self.leaving = 0
        self.starting: list[object] = []
        self.busy: list[float] = []

    @property
    def paid(self) -> int:
        return len(self.serving) + self.leaving + len(self.starting)


class Autoscaler:
    """on_check: called at every check with the time and the number of paid workers of each pool."""

    def __init__(
        self,
        simulation: Simulation,
        facts: FleetFacts,
        choice: Choice,
        *,
        startup_s: float,
        period_s: float = 15.0,
        on_check: Callable[[float, int, int], None] = lambda now, prefills, decodes: None,
    ) -> None:
        self.worker_s = 0.0
        self._simulation, self._facts, self._choice, self._on_check = (
            simulation,
            facts,
            choice,
            on_check,
        )
        self._startup_s, self._period_s = startup_s, period_s
        self._pools = {"prefill": _Pool(facts.prefills), "decode": _Pool(facts.decodes)}
        self._decided = 0.0
        simulation.queue.at(LOOK_S, self._look, order=IDLE)

    def _look(self) -> None:
        simulation = self._simulation
        now = simulation.queue.now
        prefill, decode = self._pools["prefill"], self._pools["decode"]
        for pool, ends in ((prefill, simulation.senders), (decode, simulation.receivers)):
            busy = sum(ends[number].worker.is_busy for number in pool.serving)
            pool.busy.append(busy / max(1, len(pool.serving)))
            self.worker_s += LOOK_S * pool.paid
        self._on_check(now, prefill.paid, decode.paid)
        if now - self._decided >= self._period_s:
            self._decided = now
            self._size("prefill", self._choice.prefill(now, _seen(prefill), self._prefill()))
            self._size("decode", self._choice.decode(now, _seen(decode), self._decode()))
        if not simulation.is_over:
            simulation.queue.at(now + LOOK_S, self._look, order=IDLE)

    def _prefill(self) -> PrefillSignals:
        router, senders = self._simulation.router, self._simulation.senders
        loads = [senders[number].worker.scheduler.load for number in self._pools["prefill"].serving]
        tokens = sum(load.waiting_tokens for load in loads)
        prompts = sum(load.waiting_sequences for load in loads)
        if not self._decode().is_full:
            tokens, prompts = tokens + router.waiting_tokens, prompts + router.num_waiting
        queued_s = self._facts.prefill.reported.queue_s(tokens, prompts)
        return PrefillSignals(self._simulation.arrived_s, queued_s)

    def _decode(self) -> DecodeSignals:
        facts = self._facts.decode
        ends = self._simulation.receivers
        loads = [ends[number].worker.load()[0] for number in self._pools["decode"].serving]
        return DecodeSignals(
            sum(load.running_sequences + load.waiting_sequences for load in loads),
            facts.block_size * sum(facts.num_blocks - load.free_blocks for load in loads),
            facts.reported,
            facts.num_blocks * facts.block_size,
            facts.max_running,
            max(1, len(loads)),
            self._simulation.router.placed,
            self._simulation.router.refused,
            self._simulation.router.num_waiting,
            len(self._pools["prefill"].serving),
        )

    def _size(self, role: str, target: int) -> None:
        pool = self._pools[role]
        pool.busy.clear()
        more = target - len(pool.serving) - len(pool.starting)
        for _ in range(more):
            token = object()
            pool.starting.append(token)
            self._simulation.queue.at(
                self._simulation.queue.now + self._startup_s, self._starts, role, token, order=IDLE
            )
        for _ in range(-more):
            if pool.starting:
                pool.starting.pop()
            else:
                self._leave(role, pool)

    def _starts(self, role: str, token: object) -> None:
        pool = self._pools[role]
        if token in pool.starting:
            pool.starting.remove(token)
            pool.serving.add(self._simulation.join(role))

    def _leave(self, role: str, pool: _Pool) -> None:
        ends = self._simulation.senders if role == "prefill" else self._simulation.receivers

        def work(number: int) -> int:
            load = ends[number].worker.scheduler.load
            return load.running_sequences + load.waiting_sequences

        number = min(pool.serving, key=work)
        pool.serving.remove(number)
        pool.leaving += 1

        def left() -> None:
            pool.leaving -= 1

        self._simulation.leave(role, number, left)


def _seen(pool: _Pool) -> Seen:
    busy = sum(pool.busy) / max(1, len(pool.busy))
    return Seen(len(pool.serving) + len(pool.starting), busy)
