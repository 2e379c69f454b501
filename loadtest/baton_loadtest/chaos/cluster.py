"""Router and workers as real processes for one experiment, with the fake runner.

Its tokens are hashes of all KV before them, so any wrong byte of KV changes the tokens.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from baton_loadtest.chaos.world import Broken
from baton_loadtest.launch import environment
from batonlm.cli.http_client import scrape, total
from batonlm.cli.layout import Layout, ProcessSpec, UpOptions, plan
from batonlm.cli.ports import free_ports
from batonlm.cli.supervisor import ChildProcess, LogFile
from batonlm.v1 import inference_pb2, inference_pb2_grpc, types_pb2

START_S = 180.0


class Cluster:
    """The running processes, in the order of the layout."""

    def __init__(self, layout: Layout, children: Sequence[ChildProcess]) -> None:
        self.layout, self.children = layout, children

    @property
    def grpc(self) -> str:
        return self.layout.grpc

    def metrics(self, spec: ProcessSpec) -> dict[str, float]:
        """Blocks the calling thread. Raises OSError."""
        return scrape(self.layout.metrics_url(spec))

    def children_of(self, *roles: str) -> list[ChildProcess]:
        return [child for child in self.children if child.spec.role in roles]

    def child(self, name: str) -> ChildProcess:
        return next(child for child in self.children if child.spec.name == name)


@asynccontextmanager
async def cluster(
    options: UpOptions,
    *,
    faults: str = "",
    routed: Mapping[int, int] | None = None,
    flags: Mapping[str, Sequence[str]] | None = None,
) -> AsyncIterator[Cluster]:
    """Starts all processes, waits until the routers are connected, and kills all at the end.

    faults: of all engine processes. routed: for a router's index, that of its only decode worker;
    other routers have all workers. flags: additional ones, by process name.
    """
    http, grpc = free_ports(2)
    options = replace(options, runner="fake", http_port=http, grpc_port=grpc)
    layout = _routed(plan(options), routed or {}, flags or {})
    variables = {"BATON_KV_FAULTS": faults} if faults else {}
    children: list[ChildProcess] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(LogFile(Path(folder, "log"))) as log,
        environment(**variables),
    ):
        try:
            for spec in layout.processes:
                children.append(await ChildProcess.start(spec, log, 1, lambda *_: None))
            started = Cluster(layout, children)
            await _ready(started, bool(routed))
            yield started
        finally:
            for child in children:
                child.kill()
            for child in children:
                await child.wait()


def _routed(
    layout: Layout, routed: Mapping[int, int], flags: Mapping[str, Sequence[str]]
) -> Layout:
    processes = []
    for spec in layout.processes:
        command = [*spec.command, *flags.get(spec.name, ())]
        if spec.role == "router" and spec.index in routed:
            decodes = command.index("--decodes") + 1
            command[decodes] = command[decodes].split(",")[routed[spec.index]]
        processes.append(replace(spec, command=tuple(command)))
    return replace(layout, processes=tuple(processes))


async def _ready(started: Cluster, routed: bool) -> None:
    workers = len(started.children) - len(started.children_of("router"))
    least = workers - len(started.children_of("decode")) + 1 if routed else workers

    def met(router: ProcessSpec) -> bool:
        try:
            return total(started.metrics(router), "baton_workers", 'state="serving"') >= least
        except OSError:
            return False

    try:
        async with asyncio.timeout(START_S):
            for child in started.children:
                await child.serving.wait()
            for router in started.children_of("router"):
                while not await asyncio.to_thread(met, router.spec):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
    except TimeoutError:
        raise Broken(f"router and workers were not ready after {START_S:.0f} s") from None


TIMEOUT_S = 120


def call(
    stub: inference_pb2_grpc.InferenceStub, draw: random.Random, prompt: int, output: int
) -> Any:
    """Starts a Generate stream. Prompts are random, so that nothing is cached."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[draw.randrange(64, 1900) for _ in range(prompt)]),
        options=inference_pb2.GenerationOptions(
            sampling=types_pb2.SamplingParams(temperature=0.0),
            stop=types_pb2.StopParams(max_tokens=output, ignore_eos=True),
            return_token_ids=True,
        ),
    )
    return stub.Generate(request, timeout=TIMEOUT_S)


async def read(stream: Any) -> bool:
    """Reads to the end. Returns False if it failed or was cancelled with `stream.cancel()`.

    Cancelling the task that reads also cancels the stream.
    """
    try:
        async for _ in stream:
            pass
    except grpc.aio.AioRpcError:
        return False
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            stream.cancel()
            raise
        return False
    return True
