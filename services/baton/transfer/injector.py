"""Makes things go wrong at the points of a hand-over, by rules and a seed; see `fault_spec`.

Knows no more of hand-overs than the port `baton.transfer.faults.Faults` tells. A process that
freezes itself is thawed by somebody else (SIGCONT).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from baton.core.handover.messages import Failed, KvChunkReady, Tokens
from baton.transfer.damage import Damage
from baton.transfer.fault_spec import FaultSpec, Kind, Rule
from baton.transfer.faults import MESSAGES, Faults, In, Out
from baton.transfer.faulty_transport import FaultyTransport
from baton.transfer.transport import KvTransport

log = logging.getLogger(__name__)


class Injector(Faults):
    """See the port.

    injected: how often each rule, by its name, has really changed something. reached: how often
    each point was reached since `arm`.
    """

    def __init__(self, spec: FaultSpec) -> None:
        self.injected: Counter[str] = Counter()
        self._damage = Damage()
        self.arm(spec)

    def arm(self, spec: FaultSpec) -> None:
        """These rules from now on, with all counts of points reached at 0."""
        self._rules = [
            (rule, random.Random(f"{spec.seed} {i}")) for i, rule in enumerate(spec.rules)
        ]
        self.reached: Counter[str] = Counter()
        self._left = {rule: rule.times for rule in spec.rules}

    def due(self, point: str) -> list[tuple[Rule, random.Random]]:
        """A point was reached: what is to go wrong now."""
        self.reached[point] += 1
        return [
            (rule, draw)
            for rule, draw in self._rules
            if rule.point == point
            and rule.reaches(self.reached[point])
            and self._left[rule] != 0
            and (rule.rate == 1.0 or draw.random() < rule.rate)
        ]

    def happened(self, rule: Rule) -> None:
        left = self._left.get(rule)
        if left is not None:
            self._left[rule] = left - 1
        self.injected[rule.name] += 1
        log.debug("injected %s", rule.name)

    def stop_here(self, rule: Rule) -> None:
        """Freezes or kills this process, if that is what the rule says."""
        if rule.kind in (Kind.FREEZE, Kind.KILL):
            self.happened(rule)
            os.kill(os.getpid(), signal.SIGSTOP if rule.kind is Kind.FREEZE else signal.SIGKILL)

    async def at(self, point: str, kv_chunk: memoryview | None = None) -> None:
        for rule, draw in self.due(point):
            self.stop_here(rule)
            if rule.kind is Kind.DELAY:
                self.happened(rule)
                await asyncio.sleep(rule.seconds)
            elif kv_chunk is not None and self._damage.in_buffer(
                rule.kind, rule.part, kv_chunk, draw
            ):
                self.happened(rule)
        if kv_chunk is not None and point == "sender.sealed":
            self._damage.keep(kv_chunk)

    def hearing(self, side: str, incoming: AsyncIterator[In]) -> AsyncIterator[In]:
        async def heard() -> AsyncIterator[In]:
            async for message in incoming:
                for one in await self._changed(side, message, []):
                    yield one

        return heard()

    def saying(
        self, side: str, send: Callable[[Out], Awaitable[None]]
    ) -> Callable[[Out], Awaitable[None]]:
        held: list[KvChunkReady] = []

        async def say(message: Out) -> None:
            for one in await self._changed(side, message, held):
                await send(one)

        return say

    def transport(self, transport: KvTransport) -> KvTransport:
        return FaultyTransport(transport, self)

    async def _changed(self, side: str, message: Any, held: list[KvChunkReady]) -> list[Any]:
        """What becomes of a message. held: one of the same stream that waits to be swapped."""
        of = MESSAGES.get(type(message))
        for rule, draw in self.due(f"{side}.{of}") if of else ():
            self.stop_here(rule)
            match rule.kind:
                case Kind.DELAY:
                    self.happened(rule)
                    await asyncio.sleep(rule.seconds)
                case Kind.DROP:
                    self.happened(rule)
                    return []
                case Kind.SWAP if not held:
                    held.append(message)
                    self._swapping = rule
                    return []
                case Kind.STALE | Kind.LAYOUT | Kind.LENGTH | Kind.REPLAY:
                    damaged = self._damage.told(rule.kind, message, draw)
                    if damaged != message:
                        self.happened(rule)
                        return [damaged]
        if isinstance(message, KvChunkReady) and held:
            first = held.pop()
            self.happened(self._swapping)
            return [replace(first, buffer=message.buffer), replace(message, buffer=first.buffer)]
        if isinstance(message, KvChunkReady):
            self._damage.keep_told(message)
        elif held and isinstance(message, Tokens | Failed):
            # No second KV chunk came to swap it with.
            return [held.pop(), message]
        return [message]
