"""The load of `baton bench overload` and `fairness`, against a server that counts."""

from __future__ import annotations

import json

import pytest

from baton_loadtest.bench import open_loop
from baton_loadtest.bench.known import known
from baton_loadtest.bench.known_server import Latencies
from baton_loadtest.bench.open_loop import Asked

BODY = {"prompt": "PROMPT", "max_tokens": 3, "stream": True}
FAST = Latencies(first_s=0.02, between_s=0.005, refuse_every=4)


@pytest.mark.deep
def test_phases() -> None:
    with known(FAST) as server:
        job = {
            "targets": [server.address],
            "headers": ["", "authorization: Bearer x\r\n"],
            "body": json.dumps(BODY).replace('"PROMPT"', "PROMPT"),
            "prompt_tokens": 5,
            "seed": 1,
            "phases": [
                {"name": "open", "seconds": 1.0, "retry": True,
                 "streams": [{"rate": 60, "tenant": 1, "targets": [0]}]},
                {"name": "closed", "seconds": 0.5, "closed": 3},
            ],
        }  # fmt: skip
        phases = [[Asked(**one) for one in phase] for phase in open_loop.run(job)["phases"]]
        records = server.records()
    first, second = phases
    assert len(first) > 20
    # Who is refused asks again at once, and again.
    assert any(one.refusals_s for one in first)
    assert all(s == 1.0 for one in first for s in one.retry_after_s)
    assert sum(one.whole for one in [*first, *second]) == len(records)
    for one in [*first, *second]:
        assert one.status in (200, 429)
        if one.whole:
            assert one.tokens == 3
            assert 0 < one.first_s <= one.took_s


def test_nobody_listens() -> None:
    job = {
        "targets": ["127.0.0.1:1"], "headers": [""], "body": "{}", "prompt_tokens": 1, "seed": 1,
        "phases": [{"name": "open", "seconds": 0.2,
                    "streams": [{"rate": 60, "tenant": 0, "targets": [0]}]}],
    }  # fmt: skip
    (phase,) = open_loop.run(job)["phases"]
    assert phase and all(one["status"] == 0 and not one["whole"] for one in phase)
