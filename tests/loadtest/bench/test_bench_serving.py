"""A workload is answered to its end, in static batches or all at once, with the same tokens."""

from __future__ import annotations

import pytest

from baton.core.errors import BatonError
from baton.testing.fake_runner import FakeRunner
from baton_loadtest.bench.engines import EngineRequests, engine_loop, policy, serve

REQUESTS = EngineRequests.draw(3, 7, (4, 60), (2, 20), 2048)
AT_ONCE = 3


def _runner(poison: int | None = None) -> FakeRunner:
    blocks = REQUESTS.positions(AT_ONCE) // 16
    return FakeRunner(num_blocks=blocks, block_size=16, poison_token_id=poison)


def test_both_ways_give_every_token_and_the_same() -> None:
    runner = _runner()
    rules = policy(AT_ONCE, 64)
    ours = serve(engine_loop(runner, rules), REQUESTS)
    batches = [range(3), range(3, 6), range(6, 7)]
    static = serve(engine_loop(runner, rules), REQUESTS, batches)
    assert [len(tokens) for tokens in ours.tokens] == list(REQUESTS.outputs)
    assert static.tokens == ours.tokens
    for served in (ours, static):
        assert sum(served.occupancy) == REQUESTS.output_tokens
        assert max(served.occupancy) == AT_ONCE
    assert len(static.occupancy) > len(ours.occupancy)


def test_a_request_that_fails_fails_the_benchmark() -> None:
    runner = _runner(poison=REQUESTS.prompts[0][-1])
    with pytest.raises(BatonError):
        serve(engine_loop(runner, policy(AT_ONCE, 64)), REQUESTS)
