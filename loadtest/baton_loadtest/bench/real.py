"""A Baton on this machine that foretold figures are compared with: started, asked how fast it is by
its own measurements, and sent drawn requests; foretells nothing.

One engine has a core of its own, and everything else the other. Two share both with the rest: on
one core they would take turns, which nothing that is foretold knows of.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from baton.cli.access import Access
from baton.cli.layout import Layout, UpOptions
from baton.cli.ports import free_ports
from baton_loadtest.bench.arrivals import ENGINE_CORE, OTHER_CORE
from baton_loadtest.bench.fleet import fleet
from baton_loadtest.drive import GrpcLoadClient, LoadLimits, OpenLoop, TokenIds, Workload
from baton_loadtest.load.summary import Objectives, Summary
from baton_loadtest.planner.measured import MeasuredSpeed, ask

TOKENS = (64, 1899)
"""Ids that prompts are drawn from: ordinary ones in every shape's vocabulary."""

KV_MIB = 2048
"""Of each engine: enough for all that runs at a time, whatever else the machine holds."""


class Real:
    def __init__(self, layout: Layout, client: GrpcLoadClient) -> None:
        self._layout, self._client = layout, client

    async def told(self) -> list[MeasuredSpeed]:
        """By each engine. Raises BatonError."""
        engines = [s.grpc for s in self._layout.processes if s.role in ("prefill", "decode")]
        return await ask(engines, None)

    async def run(self, workload: Workload, seed: int) -> Summary:
        """seed: of the tokens; what one run leaves in caches is not there for another."""
        runner = OpenLoop(self._client, TokenIds(seed, *TOKENS), LoadLimits())
        return Summary(await runner.run(workload), Objectives())


@asynccontextmanager
async def started(asked: UpOptions) -> AsyncIterator[Real]:
    """asked: what to run, without where. Raises StartFailed."""
    http_port, grpc_port = free_ports(2)
    alone = asked.prefill + asked.decode == 1
    both = {int(ENGINE_CORE), int(OTHER_CORE)}
    os.sched_setaffinity(0, {int(OTHER_CORE)} if alone else both)
    options = replace(
        asked,
        threads=1,
        kv_memory_mib=KV_MIB,
        http_port=http_port,
        grpc_port=grpc_port,
        engine_cpus=ENGINE_CORE if alone else f"{ENGINE_CORE},{OTHER_CORE}",
        other_cpus=OTHER_CORE if alone else f"{ENGINE_CORE},{OTHER_CORE}",
    )
    async with fleet(options) as (layout, _):
        client = GrpcLoadClient(Access(layout.grpc), "")
        try:
            yield Real(layout, client)
        finally:
            await client.close()
