"""A probe: a hand-over of made-up KV that proves the whole way from a sender's buffer to ours.

It differs from others in this only: the receiver asks for it and no worker offers it, its KV
follows from its id, and it does not count as traffic.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from baton.core.errors import HandoverFailed
from baton.core.handover.messages import HANDOVER_ID_BYTES
from baton.transfer.collecting import IncomingTransfer
from baton.transfer.ending import TransferAborted
from baton.transfer.made_up import PROBE_S, made_up, probe_positions
from baton.transfer.stats import HandoverStats
from baton.transfer.ticket import Probe, ProbeOutcome, Surroundings, TransferRequest

if TYPE_CHECKING:
    from baton.transfer.peers import Peer

FAREWELL_S = 1.0


async def probe(around: Surroundings, peer: Peer) -> Probe:
    """Collects a probe from a met peer and counts its outcome. Bounded; leaves `peer` as it is."""
    buffer_bytes = min(around.ring.buffer_bytes, peer.meeting.ring.buffer_bytes)
    positions = probe_positions(buffer_bytes, around.layout)
    ticket = TransferRequest(
        secrets.token_bytes(HANDOVER_ID_BYTES),
        peer.meeting.sender,
        positions,
        PROBE_S,
        is_probe=True,
    )

    async def reserve() -> int | None:
        return 0

    async def unpack(first_position: int, count: int, payload: memoryview) -> None:
        if payload != made_up(ticket.handover_id, first_position, len(payload)):
            around_it.stats.mismatches["payload"] += 1
            raise HandoverFailed("a probe brought other bytes than were sent")

    # Neither its numbers nor its suspicions are those of hand-overs.
    around_it, copy = replace(around, stats=HandoverStats()), replace(peer)
    work = IncomingTransfer(around_it, ticket, copy, peer.connection.collect(), reserve, unpack)
    result = Probe(ProbeOutcome.LOST)
    try:
        await work.run()
        result = Probe(ProbeOutcome.OK)
    except TransferAborted as ending:
        result = Probe(_outcome(copy, around_it.stats), ending.error)
    finally:
        around.stats.probes["peer", result.outcome.value] += 1
        await work.see_off(FAREWELL_S)
    return result


def _outcome(peer: Peer, stats: HandoverStats) -> ProbeOutcome:
    if stats.mismatches:
        return ProbeOutcome.MISMATCH
    return ProbeOutcome.UNREADABLE if peer.suspect else ProbeOutcome.LOST
