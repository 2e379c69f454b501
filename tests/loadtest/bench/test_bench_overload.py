"""The load of `baton bench overload` and `fairness`, against a server that counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton_loadtest.bench.known_server import Latencies, known
from baton_loadtest.bench.overload import run_load
from baton_loadtest.drive import ANSWERED, REFUSED, Sample

FAST = Latencies(first_s=0.02, between_s=0.005, refuse_every=4)


def job(address: str, **more: Any) -> dict[str, Any]:
    return {
        "routers": [address],
        "fields": {},
        "prompt_tokens": 5,
        "output_tokens": 3,
        "seed": 1,
        "name": "load",
        "seconds": 1.0,
        "retries": 0,
        "at_once": 0,
        "streams": [{"rate": 60.0, "key": "x"}],
        **more,
    }


@pytest.mark.deep
async def test_phases() -> None:
    async with known(FAST) as server:
        jobs = [
            job(server.address, retries=5),
            job(server.address, seconds=0.5, at_once=3),
        ]
        found = [(await asyncio.to_thread(run_load, each))["streams"][0] for each in jobs]
        records = await server.records()
    first, second = ([Sample(**one) for one in each["samples"]] for each in found)
    assert len(first) > 20
    # Who is refused asks again at once, and again.
    assert found[0]["refusals_s"]
    assert all(seconds == 1.0 for seconds in found[0]["retry_after_s"])
    assert sum(one.end == ANSWERED for one in [*first, *second]) == len(records)
    for one in [*first, *second]:
        assert one.end in (ANSWERED, REFUSED)
        if one.end == ANSWERED:
            assert one.tokens == 3
            assert 0 < one.first_s - one.left_s <= one.ended_s - one.left_s


def test_nobody_listens() -> None:
    (stream,) = run_load(job("127.0.0.1:1", seconds=0.2))["streams"]
    samples = [Sample(**one) for one in stream["samples"]]
    assert samples and all(one.end == "no connection" for one in samples)
