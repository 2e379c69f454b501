"""Keeps the threads of a process that has one core from interrupting each other there."""

from __future__ import annotations

import os
from contextlib import suppress


def settle() -> None:
    """To be called before there are threads: they inherit it.

    A thread of gRPC is woken for every message that is written. On the writer's own core the kernel
    lets it run at once, which costs two switches a message; under SCHED_BATCH it waits until the
    writer has nothing left to do, and then handles all. With more cores than one it runs beside.
    """
    if hasattr(os, "SCHED_BATCH") and len(os.sched_getaffinity(0)) == 1:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
