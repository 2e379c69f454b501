"""Time remaining travels with everything a router asks of its workers."""

from __future__ import annotations

from dataclasses import replace

from tests.services.router.conftest import World
from tests.services.router.disturbed import REQUEST, check

DEADLINE_S = 15.0
ROUNDING_S = 1.0
"""gRPC rounds up what it tells."""


async def test_every_hop_is_told_how_much_time_is_left(world: World) -> None:
    await world.start()
    check(await world.ask(replace(REQUEST, deadline_s=DEADLINE_S)))
    (encoding,) = world.tokenizers[0].remaining_s
    (prefilling,), (decoding,) = world.prefills[0].runs, world.decodes[0].starts
    (opening,) = world.detokenizers[0].openings
    told = [encoding, prefilling.remaining_s, decoding.remaining_s, opening.remaining_ms / 1000]
    assert all(left is not None and 0 < left <= DEADLINE_S + ROUNDING_S for left in told), told
