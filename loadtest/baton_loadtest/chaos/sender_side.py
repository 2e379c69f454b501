"""The giving side of an experiment: puts KV on offer as a prefill worker does.

A pattern stands for what an engine computes, everything else is what a worker runs.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import grpc

from baton.core.request.attempt import ChoiceTokens, SequenceKey
from baton.core.request.model import WorkerIdentity
from baton.rpc.interceptors import ErrorInterceptor
from baton.rpc.options import INTERNAL_SERVER
from baton.rpc.transport import bind
from baton.transfer.grpc import HandoverServicer
from baton.transfer.sender import KvSender, PendingTransfer
from baton.v1.handover_pb2_grpc import add_HandoverServicer_to_server
from baton_loadtest.chaos.pattern import kv_of
from baton_loadtest.chaos.side import Do, Said, Side

TOKENS = (ChoiceTokens(SequenceKey("request", 0, 1), 0, (17,)),)
MAX_OFFERS = 64


class GivingSide(Side):
    """Also: offer, outcome."""

    async def open(self) -> None:
        await super().open()
        self.server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=INTERNAL_SERVER)
        address = f"127.0.0.1:{bind(self.server, '127.0.0.1:0')}"
        self.me = WorkerIdentity(self.me.role, self.me.instance_id, address)
        self.sender = KvSender(
            self.me, self.layout, self.staging, liveness=self.liveness, stats=self.stats
        )
        add_HandoverServicer_to_server(HandoverServicer(self.sender), self.server)
        await self.server.start()
        self._offers: OrderedDict[str, PendingTransfer] = OrderedDict()
        self._computing: set[asyncio.Task[None]] = set()

    def commands(self) -> dict[str, Do]:
        return {"offer": self.offer, "outcome": self.outcome}

    def is_idle(self) -> bool:
        return self.sender.num_offers == self.sender.num_early_streams == 0 and not self._computing

    async def offer(self, command: Said) -> Said:
        if "faults" in command:
            await self.arm(command)
        handover_id, size = bytes.fromhex(command["id"]), self.layout.bytes_per_position

        async def pack(first_position: int, count: int, out: memoryview) -> None:
            out[:] = b"".join(kv_of(handover_id, first_position + i, size) for i in range(count))

        offer = self.sender.offer(
            handover_id,
            command["receiver"],
            command["positions"],
            pack,
            deadline_s=command["deadline_s"],
        )
        self._offers[command["id"]] = offer
        while len(self._offers) > MAX_OFFERS:
            self._offers.popitem(last=False)
        task = asyncio.create_task(self._compute(offer))
        self._computing.add(task)
        task.add_done_callback(self._computing.discard)
        return {"injected": self.faults.injected.total()}

    async def outcome(self, command: Said) -> Said:
        """Answered when the hand-over has ended."""
        ended = await self._offers.pop(command["id"]).wait()
        return {
            "outcome": ended.label,
            "error": type(ended.error).__name__ if ended.error else "",
        }

    async def _compute(self, offer: PendingTransfer) -> None:
        offer.announce()
        for finished in range(0, offer.num_positions, self.settings.chunk):
            offer.advance(min(finished + self.settings.chunk, offer.num_positions))
            await asyncio.sleep(0)
        offer.tokens(TOKENS)
