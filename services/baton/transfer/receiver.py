"""The collecting side of hand-overs: meets senders and collects KV from them.

One stream's work is `baton.transfer.collecting.IncomingTransfer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from baton.core.errors import (
    BatonError,
    Cancelled,
    Incompatible,
    InvalidArgument,
    Overloaded,
)
from baton.core.handover.messages import HANDOVER_ID_BYTES
from baton.core.handover.table import LIMITS, HandoverEvent, Limit, State
from baton.core.request.model import KvLayout, WorkerIdentity
from baton.transfer.collecting import IncomingTransfer
from baton.transfer.connection import Connect
from baton.transfer.ending import TransferAborted
from baton.transfer.idle_probes import IdleProbes
from baton.transfer.kv_chunk import positions_per_kv_chunk
from baton.transfer.line import Liveness
from baton.transfer.peers import Peer, Peers, as_handover_failure
from baton.transfer.probe import probe
from baton.transfer.staging import Staging
from baton.transfer.stats import HandoverStats, now
from baton.transfer.tasks import outlast
from baton.transfer.ticket import Collected as Collected
from baton.transfer.ticket import Probe, Reserve, Surroundings, Unpack
from baton.transfer.ticket import TransferRequest as TransferRequest

FAREWELL_S = 1.0


class KvReceiver:
    """Collects KV into one staging ring. Lives on the event loop.

    connect: how a sender is spoken to, one connection per sender.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        layout: KvLayout,
        staging: Staging,
        connect: Connect,
        *,
        liveness: Liveness | None = None,
        limits: Mapping[State, Limit] = LIMITS,
        stats: HandoverStats | None = None,
    ) -> None:
        if positions_per_kv_chunk(staging.ring.buffer_bytes, layout) == 0:
            raise InvalidArgument(
                f"a buffer must hold one position, {layout.bytes_per_position} bytes and a header",
                field="slot_mib",
            )
        self.stats = stats or HandoverStats()
        self._around = Surroundings(
            identity, layout, staging.ring, liveness or Liveness(), limits, self.stats,
            staging.faults,
        )  # fmt: skip
        self._peers = Peers(identity, layout, staging, connect, self._probe, self.stats)
        self._running = 0
        self._farewells: set[asyncio.Task[None]] = set()
        self._probes: IdleProbes | None = None
        self._probing: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """No hand-over runs and every ended one has taken its leave."""
        return not self._running and not self._farewells

    @property
    def probing(self) -> bool:
        """A sender is being probed, for want of traffic."""
        return self._probes is not None and self._probes.probing

    @property
    def holdings(self) -> dict[str, int]:
        """What hand-overs hold here, by kind; nothing when there are none and no probe runs."""
        return {"handovers": self._running, "farewells": len(self._farewells)}

    def start_probing(self, every_s: float) -> None:
        """Probes senders that nothing came from for so long, until closed. Called once at most."""
        self._probes = IdleProbes(
            self._peers, self._probe, busy=lambda: not self.idle, every_s=every_s
        )
        self._probing = asyncio.create_task(self._probes.run())

    async def meet(self, sender: WorkerIdentity) -> None:
        """Meets a sender ahead of traffic: layouts compared, a probe collected, result remembered.

        Raises Incompatible with a readable difference, and Unavailable.
        """
        await self._peers.meet(sender)

    async def forget(self, instance_id: str) -> None:
        """Drops what is kept of a sender that is gone."""
        await self._peers.forget(instance_id)

    async def collect(self, ticket: TransferRequest, reserve: Reserve, unpack: Unpack) -> Collected:
        """Collects one hand-over.

        On return all KV from `Collected.cached_positions` on is unpacked. When this raises or is
        cancelled, unpack runs no more and what `reserve` holds is the caller's to free. Raises
        HandoverFailed (prefill again elsewhere), Overloaded (reserve had no room), Incompatible,
        Cancelled (the sender was), and what reserve and unpack raise.
        """
        if len(ticket.handover_id) != HANDOVER_ID_BYTES:
            raise InvalidArgument(f"must be {HANDOVER_ID_BYTES} bytes", field="handover_id")
        outcome = "failed"
        self._running += 1
        try:
            collected = await self._collect(ticket, reserve, unpack)
            outcome = "completed"
            return collected
        except Overloaded:
            outcome = "full"
            raise
        except (Cancelled, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        finally:
            self._running -= 1
            self.stats.outcomes[outcome] += 1

    async def close(self) -> None:
        """Waits for farewells under way and forgets all peers. Collections are ended before."""
        if self._probing is not None:
            self._probing.cancel()
            await outlast([self._probing])
        await outlast(list(self._farewells))
        await self._peers.close()

    async def _collect(
        self, ticket: TransferRequest, reserve: Reserve, unpack: Unpack
    ) -> Collected:
        clock = asyncio.get_running_loop().time
        deadline, began = clock() + ticket.deadline_s, now()
        try:
            async with self._peers.use(ticket.sender, ticket.deadline_s) as peer:
                self.stats.took("meet", began)
                ticket = replace(ticket, deadline_s=deadline - clock())
                stream = peer.connection.collect()
                work = IncomingTransfer(self._around, ticket, peer, stream, reserve, unpack)
                try:
                    return await work.run()
                finally:
                    peer.doubted |= work.ending is not None and (
                        work.ending.event is HandoverEvent.PEER_LOST
                    )
                    self._see_off(work)
        except TransferAborted as ending:
            raise _for_the_caller(ending) from None
        except Overloaded:
            raise
        except BatonError as error:
            # Meeting failed; what happened on the stream is an Ending.
            raise as_handover_failure(error) from None

    async def _probe(self, peer: Peer) -> Probe:
        return await probe(self._around, peer)

    def _see_off(self, work: IncomingTransfer) -> None:
        # Not awaited here: a cancelled hand-over gives its memory back at once.
        farewell = asyncio.create_task(work.see_off(FAREWELL_S))
        self._farewells.add(farewell)
        farewell.add_done_callback(self._farewells.discard)


def _for_the_caller(ending: TransferAborted) -> BatonError:
    """Our own failures as they are; the sender's, the stream's and lost time: prefill elsewhere."""
    if ending.event is HandoverEvent.CANCEL or isinstance(ending.error, Cancelled | Incompatible):
        return ending.error
    return as_handover_failure(ending.error)
