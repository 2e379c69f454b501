"""Whole hand-overs over real gRPC and both transports."""

from __future__ import annotations

import pytest

from baton.kv.giver import Outcome
from tests.kv.rig import POSITIONS_PER_SLOT, TOKENS, Pool, expected, rig

TRANSPORTS = ("loopback", "nixl")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_positions", [1, POSITIONS_PER_SLOT, 16, 400])
async def test_kv_and_token_arrive(transport: str, num_positions: int) -> None:
    async with rig(transport) as world:
        offer, pool = world.offer(num_positions), Pool()
        world.compute(offer)
        collected = await world.collect(offer, pool)
        assert pool.kv == expected(offer.handover_id, num_positions)
        assert collected.tokens == TOKENS
        assert collected.cached_positions == 0
        assert collected.received_bytes == sum(map(len, pool.kv.values()))
        assert (await offer.wait()).outcome is Outcome.COMPLETED
        assert offer.granted is True
