"""Keeps the ways to known senders proven while nothing moves on them.

One peer at a time, only one that moved nothing for half an interval, and none while hand-overs run:
those prove the ways better. One failed probe may be a pause of the sender, so nothing follows from
it; after two in a row the peer is forgotten and met again, over another transport if need be. A
peer that cannot be met stays forgotten until somebody wants its KV.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton.core.errors import BatonError
from baton.core.handover.fit import short_name
from baton.transfer.peers import Peer, Peers
from baton.transfer.ticket import Probe, ProbeOutcome

log = logging.getLogger(__name__)


class IdleProbes:
    """`run` runs until cancelled. busy: whether hand-overs run. probing: whether one is probed."""

    def __init__(
        self,
        peers: Peers,
        probe: Callable[[Peer], Awaitable[Probe]],
        busy: Callable[[], bool],
        every_s: float,
    ) -> None:
        self._peers, self._probe, self._busy, self._every_s = peers, probe, busy, every_s
        self.probing = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            for peer in self._peers.unused_for(self._every_s / 2):
                if self._busy():
                    break
                if not self._peers.is_unused(peer):
                    continue
                try:
                    self.probing = True
                    await self._look_at(peer)
                except Exception:
                    log.exception("a sender could not be probed")
                finally:
                    self.probing = False

    async def _look_at(self, peer: Peer) -> None:
        async with self._peers.hold(peer):
            result = await self._probe(peer)
        if not peer.verdict.observe(result.outcome is ProbeOutcome.OK):
            return
        sender = peer.meeting.sender
        why = result.error.message if result.error is not None else ""
        log.warning("%s fails its probes and is met again: %s", short_name(sender), why)
        await self._peers.forget(sender.instance_id)
        try:
            await self._peers.meet(sender)
        except BatonError as error:
            log.warning("%s cannot be met: %s", short_name(sender), error.message)
