"""A router as a process of its own, over the scripted workers of a test."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from tests import leaks
from tests.services.router.conftest import PATIENCE_S, World


@dataclass
class RouterProcess:
    """http, grpc: where it serves. key: an operator's, if it has keys."""

    process: asyncio.subprocess.Process
    http: str
    grpc: str
    key: str = ""

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def metrics(self) -> dict[str, float]:
        """Every sample, by its name and labels as they are written."""
        shown = {"authorization": f"Bearer {self.key}"} if self.key else {}
        async with httpx.AsyncClient(timeout=120, trust_env=False, headers=shown) as client:
            text = (await client.get(f"http://{self.http}/metrics")).text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    async def until(self, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """The first metrics that fulfil it."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(told := await self.metrics()):  # noqa: ASYNC110 (a process)
                await asyncio.sleep(0.02)
        return told


@asynccontextmanager
async def router_process(world: World, *flags: str, key: str = "") -> AsyncIterator[RouterProcess]:
    """Starts the test's workers and a router that has met them all; holds nothing at its end,
    unless it was killed."""
    await world.serve()
    async with router_beside(world, *flags, key=key) as router:
        yield router


@asynccontextmanager
async def router_beside(world: World, *flags: str, key: str = "") -> AsyncIterator[RouterProcess]:
    """The same over workers that have started, maybe beside other routers."""
    known = [f"--{role}s={','.join(found)}" for role, found in world.addresses.items() if found]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "batonlm.router", "--local-prefill-tokens=0", *known, *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            said = json.loads(await process.stdout.readline())
        router = RouterProcess(process, said["http"], said["grpc"], key)
        everybody = sum(map(len, world.addresses.values()))
        await router.until(lambda told: _serving(told) == everybody)
        yield router
        if process.returncode is None:
            url = f"http://{router.http}/metrics"
            await asyncio.to_thread(leaks.check, leaks.RunningWorker(process.pid, url, key))
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _serving(told: dict[str, float]) -> float:
    return sum(
        number
        for name, number in told.items()
        if name.startswith("baton_workers{") and 'state="serving"' in name
    )
