"""A probe: a hand-over of made-up KV that proves the whole way from a giver's slot to ours.

It differs from others in this only: the collector asks for it and no worker offers it, its KV
follows from its id, and it does not count as traffic. Knows neither when to probe nor what a failed
probe means.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from baton.core.errors import HandoverFailed
from baton.core.handover_messages import HANDOVER_ID_BYTES
from baton.kv.collecting import Collecting
from baton.kv.ending import Ending
from baton.kv.made_up import PROBE_S, made_up, probe_positions
from baton.kv.stats import HandoverStats
from baton.kv.ticket import Probe, ProbeOutcome, Surroundings, Ticket

if TYPE_CHECKING:
    from baton.kv.peers import Peer

FAREWELL_S = 1.0


async def probe(around: Surroundings, peer: Peer) -> Probe:
    """Collects a probe from a met peer and counts its outcome. Bounded; leaves `peer` as it is."""
    slot_bytes = min(around.ring.slot_bytes, peer.meeting.ring.slot_bytes)
    positions = probe_positions(slot_bytes, around.layout)
    ticket = Ticket(
        secrets.token_bytes(HANDOVER_ID_BYTES),
        peer.meeting.giver,
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
    work = Collecting(around_it, ticket, copy, peer.connection.collect(), reserve, unpack)
    result = Probe(ProbeOutcome.LOST)
    try:
        await work.run()
        result = Probe(ProbeOutcome.OK)
    except Ending as ending:
        result = Probe(_outcome(copy, around_it.stats), ending.error)
    finally:
        around.stats.probes["peer", result.outcome.value] += 1
        await work.see_off(FAREWELL_S)
    return result


def _outcome(peer: Peer, stats: HandoverStats) -> ProbeOutcome:
    if stats.mismatches:
        return ProbeOutcome.MISMATCH
    return ProbeOutcome.UNREADABLE if peer.suspect else ProbeOutcome.LOST
