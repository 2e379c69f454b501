"""What everybody who supervises processes does alike: pauses before restarts, and the end of all.

Used by `baton up` for its processes and by a router for those that it consists of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
HEALTHY_AFTER_S = 10.0
KILL_S = 3.0
"""Time for the kernel to end killed processes. A process that hangs in the kernel may never end."""


class Backoff:
    """The pauses before the restarts of one process: they double while it does not live long."""

    def __init__(self, longest_s: float = LONGEST_BACKOFF_S) -> None:
        self._longest_s = longest_s
        self._pause_s = FIRST_BACKOFF_S

    def after(self, lived_s: float) -> float:
        """Returns the next pause, in seconds. lived_s: how long the process ran."""
        self._pause_s = (
            FIRST_BACKOFF_S
            if lived_s > HEALTHY_AFTER_S
            else min(self._pause_s * 2, self._longest_s)
        )
        return self._pause_s


class Child(Protocol):
    """A process that was started."""

    async def wait(self) -> int:
        """Returns the exit code."""

    def terminate(self) -> None:
        """Asks it to end; without effect when it has ended, as `kill`."""

    def kill(self) -> None: ...


async def end_all(children: Sequence[Child], timeout_s: float, hurry: asyncio.Event) -> bool:
    """Terminates the processes, and kills those that still run after timeout_s or once `hurry` is
    set. Returns whether all ended unkilled, KILL_S later at most."""
    for child in children:
        child.terminate()
    all_ended = asyncio.gather(*(child.wait() for child in children))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait((all_ended, hurried), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    unkilled = all_ended.done()
    if not unkilled:
        for child in children:
            child.kill()
        await asyncio.wait((all_ended,), timeout=KILL_S)
    if not all_ended.done():
        all_ended.cancel()
    await asyncio.gather(all_ended, hurried, return_exceptions=True)
    return unkilled
