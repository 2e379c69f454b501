"""Tells when another process of this machine ends."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable


def on_death(pids: Iterable[int], died: Callable[[], None]) -> None:
    """Calls `died` once, on a thread of its own, when the first of the processes has ended.

    The thread is a daemon and sleeps until then. A process that is gone already counts.
    """
    waiting = select.poll()
    fds: list[int] = []
    gone = False
    for pid in pids:
        try:
            fds.append(os.pidfd_open(pid))
            waiting.register(fds[-1], select.POLLIN)
        except ProcessLookupError:
            gone = True

    def watch() -> None:
        if not gone:
            waiting.poll()
        for fd in fds:
            os.close(fd)
        died()

    threading.Thread(target=watch, name="deaths", daemon=True).start()
