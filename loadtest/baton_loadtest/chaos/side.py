"""What both sides' processes have: a guarded ring, a transport, faults, and counts of it all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from baton.core.request.model import WorkerIdentity
from baton.rpc.lifecycle import new_instance_id
from baton.testing.faults import FaultInjector, parse
from baton.transfer.loopback import LoopbackTransport
from baton.transfer.nixl import NixlTransport
from baton.transfer.staging import KvTransport
from baton.transfer.stats import HandoverStats
from baton.transfer.stream import Liveness
from baton.transfer.transports import Staging, TransferReader
from baton.transfer.ucx import KvNetwork, Ucx, choose, inherited
from baton_loadtest.chaos.guards import Guarded
from baton_loadtest.chaos.pattern import layout
from baton_loadtest.chaos.settings import Settings

Said = dict[str, Any]
Do = Callable[[Said], Awaitable[Said]]


class Side(ABC):
    """What both sides can do: arm, reset, state, snapshot, late."""

    def __init__(self, role: str, settings: Settings) -> None:
        self.settings, self.layout = settings, layout(settings.layers)
        self.faults = FaultInjector(parse(settings.faults))
        self.guarded = Guarded(settings.num_buffers, settings.buffer_bytes)
        self.ring = self.guarded.ring
        self.stats = HandoverStats()
        self.liveness = Liveness(settings.heartbeat_s, settings.missed)
        self.me = WorkerIdentity(role, new_instance_id(), "")

    async def open(self) -> None:
        # Both processes are ours, whatever they use to reach each other.
        tls = inherited()
        ucx = choose(KvNetwork.TRUSTED if tls else KvNetwork.LOCAL, inherited=tls)
        reader = TransferReader(lambda: self.faults.transport(self._transport(ucx)))
        await reader.start()
        self.staging = Staging(
            self.ring, {self.settings.transport: reader}, ucx, faults=self.faults
        )

    async def do(self, command: Said) -> Said:
        """Raises BatonError, KeyError for what it does not know."""
        known: dict[str, Do] = {
            "arm": self.arm,
            "reset": self.reset,
            "state": self.state,
            "snapshot": self.snapshot,
            "late": self.late,
            **self.commands(),
        }
        return await known[command["do"]](command)

    @abstractmethod
    def commands(self) -> dict[str, Do]:
        """What only this side can do."""

    @abstractmethod
    def is_idle(self) -> bool:
        """No hand-over is under way, and nothing is left of one."""

    async def arm(self, command: Said) -> Said:
        self.faults.arm(parse(command["faults"]))
        return {}

    async def reset(self, command: Said) -> Said:
        self.guarded.clear()
        return {}

    async def snapshot(self, command: Said) -> Said:
        self.guarded.snapshot()
        return {}

    async def late(self, command: Said) -> Said:
        return {"bytes": self.guarded.num_late()}

    async def state(self, command: Said) -> Said:
        return {
            "idle": self.is_idle(),
            "free": self.ring.num_free,
            "buffers": self.ring.num_buffers,
            "orphaned": self.ring.num_orphaned,
            "injected": self.faults.injected.total(),
            "mismatches": dict(self.stats.mismatches),
            "changed": self.guarded.num_changed() if command.get("look") else 0,
            "guards": self.guarded.adjacent,
        }

    def _transport(self, ucx: Ucx) -> KvTransport:
        if self.settings.transport == "loopback":
            return LoopbackTransport(self.ring)
        return NixlTransport(self.ring, self.me.instance_id, ucx)
