"""Continuous load of real clients over gRPC and HTTP, each answer compared with its reference.

A stream fails when it ends in any error, before its first token too: clients here ask once, unless
a test lets them do what clients of a leaving router do.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from batonlm.core.errors import BatonError
from tests.k8s.asks import Ask
from tests.k8s.clients import STREAM_S, Clients, Refused, retryable

BEGIN_S = 180.0
PAUSE_S = 0.5
"""Of a client between two streams: pods that start beside them need CPU too, and so does the node's
kubelet to say that it is there."""


@dataclass
class Tally:
    """failed, wrong: a sentence for each. retryable: those of the failed that a client may well ask
    again. begun: those of them whose first token had come.
    """

    answered: int = 0
    failed: list[str] = field(default_factory=list)
    retryable: int = 0
    begun: int = 0
    wrong: list[str] = field(default_factory=list)

    def check(self, at_least: int = 1, *, may_fail: int = 0) -> None:
        """Raises AssertionError unless all were answered, with the tokens they should have.

        may_fail: so many may be told to try again.
        """
        told = "\n".join((self.failed + self.wrong)[:20])
        fine = self.retryable == len(self.failed) <= may_fail and not self.wrong
        assert fine, (
            f"{self.answered} answered, {len(self.failed)} failed, {len(self.wrong)} wrong:\n{told}"
        )
        assert self.answered >= at_least, f"only {self.answered} answered"


async def references(clients: Clients, wanted: Sequence[Ask]) -> list[list[int]]:
    """Their answers one at a time, while nothing else happens."""
    found = [await clients.tokens(ask) for ask in wanted]
    for ask, tokens in zip(wanted, found, strict=True):
        assert len(tokens) == ask.options["max_tokens"], (ask.number, len(tokens))
    return found


class Load:
    """The same requests over and over, so many at a time."""

    def __init__(
        self, clients: Clients, wanted: Sequence[Ask], expected: Sequence[list[int]], streams: int
    ) -> None:
        self.tally = Tally()
        self._clients, self._streams = clients, streams
        self._pairs = itertools.cycle(list(zip(wanted, expected, strict=True)))
        self._enough = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Tally]:
        """Streams run while the block does; those that run when it ends are followed to their end.

        The block begins when as many streams have ended as run at a time.
        """
        workers = [asyncio.create_task(self._work()) for _ in range(self._streams)]
        try:
            await self.more(self._streams, BEGIN_S)
            yield self.tally
        finally:
            self._enough = True
            await asyncio.gather(*workers)

    async def more(self, count: int, within_s: float = 180.0) -> None:
        """Returns when this many more streams have ended, well or badly."""
        until = time.monotonic() + within_s
        aim = self._ended + count
        while self._ended < aim:
            assert time.monotonic() < until, f"{aim - self._ended} of {count} streams did not end"
            await asyncio.sleep(0.05)

    @property
    def _ended(self) -> int:
        return self.tally.answered + len(self.tally.failed) + len(self.tally.wrong)

    async def _work(self) -> None:
        while not self._enough:
            ask, expected = next(self._pairs)
            got: list[int] = []
            try:
                async with asyncio.timeout(STREAM_S):
                    await self._clients.tokens(ask, got)
            except (BatonError, httpx.HTTPError, Refused, TimeoutError) as error:
                self.tally.retryable += retryable(error)
                self.tally.begun += bool(got)
                self.tally.failed.append(f"{ask.face} {ask.number}: {type(error).__name__} {error}")
                # A client that is refused at once does not ask in a circle.
                await asyncio.sleep(0.2)
                continue
            if got == expected:
                self.tally.answered += 1
            else:
                self.tally.wrong.append(f"{ask.face} {ask.number}: {_differs(got, expected)}")
            await asyncio.sleep(PAUSE_S)


def _differs(got: Sequence[int], expected: Sequence[int]) -> str:
    same = next(
        (i for i, pair in enumerate(zip(got, expected, strict=False)) if len(set(pair)) > 1),
        min(len(got), len(expected)),
    )
    return f"{len(got)} tokens of {len(expected)}, equal up to {same}"
