"""The collecting side of an experiment: takes KV as a decode worker does, into a pool that tells.

A pool of bytes stands for an engine's blocks, everything else is what a worker runs.
"""

from __future__ import annotations

import asyncio

from baton.core.errors import BatonError
from baton.core.request.model import WorkerIdentity
from baton.rpc.channels import Channels
from baton.transfer.grpc import GrpcSenderConnection
from baton.transfer.receiver import KvReceiver, TransferRequest
from baton_loadtest.chaos.pattern import Pool, differing
from baton_loadtest.chaos.side import Do, Said, Side


class CollectingSide(Side):
    """Also: collect."""

    async def open(self) -> None:
        await super().open()
        self.channels = Channels()
        self.receiver = KvReceiver(
            self.me,
            self.layout,
            self.staging,
            lambda sender: GrpcSenderConnection(self.channels.get(sender.address)),
            liveness=self.liveness,
            stats=self.stats,
        )
        self.pool = Pool(self.settings.positions, self.layout.bytes_per_position)
        self._blocks = b""

    def commands(self) -> dict[str, Do]:
        return {"collect": self.collect}

    def is_idle(self) -> bool:
        return self.receiver.idle

    async def snapshot(self, command: Said) -> Said:
        self._blocks = self.pool.contents()
        return await super().snapshot(command)

    async def late(self, command: Said) -> Said:
        blocks = differing(self.pool.contents(), self._blocks)
        return {**await super().late(command), "blocks": blocks}

    async def collect(self, command: Said) -> Said:
        """full: there is no room. Raises nothing: how it ended is in the answer."""
        if "faults" in command:
            await self.arm(command)
        handover_id = bytes.fromhex(command["id"])
        sender = WorkerIdentity("prefill", command["instance_id"], command["address"])
        ticket = TransferRequest(handover_id, sender, command["positions"], command["deadline_s"])

        async def reserve() -> int | None:
            return None if command.get("full") else 0

        self.pool.clear()
        clock = asyncio.get_running_loop().time
        began, outcome, message = clock(), "completed", ""
        try:
            await self.receiver.collect(ticket, reserve, self.pool.unpack)
        except BatonError as error:
            outcome, message = type(error).__name__, error.message
        return {
            "outcome": outcome,
            "message": message,
            "seconds": clock() - began,
            "unpacked": self.pool.num_unpacked,
            "wrong": self.pool.num_wrong(handover_id),
            "changed": self.pool.num_changed(),
            "injected": self.faults.injected.total(),
            "mismatches": self.stats.mismatches.total(),
        }
