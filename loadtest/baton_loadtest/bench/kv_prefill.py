"""The prefill worker of `baton bench kv`: a real engine, service and sender, without a router.

First line: {"model", "threads", "positions", "chunk", "transport", "num_buffers", "buffer_bytes"},
answered with the worker's identity. Then {"run": token ids, "name": of the request, "handover": id
or "", "receiver": instance id} computes a prompt, from its prefix cache as far as it can, offers
its KV under the id, and answers at token 0 when the last chunk was computed, on the machine's
monotonic clock.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from baton.core.kvcache.block_pool import BlockPool
from baton.core.scheduler.loop import EngineLoop
from baton.core.scheduler.plan import StepPlan
from baton.core.scheduler.policy import PREFILL
from baton.core.scheduler.scheduler import Scheduler
from baton.engine.thread import EngineThread
from baton.grammar.book import GrammarBook
from baton.prefill.service import PrefillService
from baton.rpc.lifecycle import run
from baton.rpc.server import Service
from baton.transfer.grpc import HandoverServicer
from baton.transfer.sender import KvSender
from baton.transfer.transports import Staging
from baton.v1 import handover_pb2_grpc
from baton_loadtest.bench.beside import answer
from baton_loadtest.bench.kv_ends import free_address, identity, serve
from baton_loadtest.bench.serving import EVERYTHING, attempt, open_runner

OUTPUT_TOKENS = 3
HANDOVER_S = 120.0


class _Prefill:
    """Everything behind the commands. `open` is the first one."""

    def __init__(self, ends: AsyncExitStack) -> None:
        self._ends = ends
        self._service: PrefillService | None = None
        self._last_step_at = 0.0

    async def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._service is None:
            return await self._begin(**command)
        first = await self._service.run(
            attempt(command["name"], command["run"], OUTPUT_TOKENS),
            bytes.fromhex(command["handover"]),
            command["receiver"],
        )
        return {
            "computed_at": self._last_step_at,
            "cached": first.cached_tokens,
            "token": first.tokens[0].token_ids[0],
        }

    async def _begin(
        self,
        model: str,
        threads: int,
        positions: int,
        chunk: int,
        transport: str,
        num_buffers: int,
        buffer_bytes: int,
    ) -> dict[str, Any]:
        ends = self._ends
        policy = replace(PREFILL, token_budget=chunk, batch_window_s=0.0, limit=EVERYTHING)

        def make_loop() -> EngineLoop:
            runner = open_runner(model, threads, positions, exact=True)
            pool = BlockPool(runner.num_blocks, runner.block_size)
            made.append(EngineLoop(runner, Scheduler(pool, policy, runner.model)))
            return made[0]

        made: list[EngineLoop] = []
        engine: EngineThread = EngineThread(
            make_loop, lambda events: service.deliver(events), on_step=self._note_step
        )
        await engine.start()
        ends.push_async_callback(engine.stop)
        address = free_address()
        me = identity("prefill", address)
        staging = await Staging.open(
            me.instance_id, transport=transport, num_buffers=num_buffers, buffer_bytes=buffer_bytes
        )
        ends.push_async_callback(staging.close)
        sender = KvSender(me, made[0].runner.layout, staging)
        service = self._service = PrefillService(
            engine, sender, GrammarBook(None), handover_timeout_s=HANDOVER_S
        )
        ends.push_async_callback(service.close)
        add = partial(handover_pb2_grpc.add_HandoverServicer_to_server, HandoverServicer(sender))
        server = await serve(address, Service("baton.v1.Handover", add))
        ends.push_async_callback(server.stop, 0.2)
        return asdict(me)

    def _note_step(self, _plan: StepPlan, _seconds: float) -> None:
        self._last_step_at = time.monotonic()


async def main() -> int:
    async with AsyncExitStack() as ends:
        await answer(_Prefill(ends).handle)
    return 0


if __name__ == "__main__":
    run(main())
