"""Tells a Pace how busy this process is."""

from __future__ import annotations

import asyncio
import time

from baton.core.observe.load_monitor import LoadMonitor

LOOK_S = 0.5


async def keep(pace: LoadMonitor) -> None:
    """Until cancelled."""
    spent, at = time.process_time(), time.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        now_spent, now = time.process_time(), time.monotonic()
        pace.observe((now_spent - spent) / (now - at))
        spent, at = now_spent, now
