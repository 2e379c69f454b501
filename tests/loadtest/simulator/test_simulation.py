"""What a simulated fleet does, where it can be said beforehand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton_loadtest.simulator.requests import Request
from baton_loadtest.simulator.settings import Delays, FleetFacts, WorkerFacts
from baton_loadtest.simulator.simulation import Simulation, simulate
from batonlm.core.errors import Internal, InvalidArgument
from batonlm.core.routing.load import UNMEASURED, reads
from tests.loadtest.simulator.fleets import SPEED, fleet, traffic

HOP_S = 0.001


def _prefill_s(tokens: int, steps: int) -> float:
    return (
        steps * SPEED.prefill_step_s
        + tokens * SPEED.prefill_position_s
        + reads(0, tokens) * SPEED.prefill_read_s
    )


def test_one_request_alone_on_decode() -> None:
    facts = fleet(0, 1)
    outcome = simulate(facts, [Request(1.0, 1000, 3)])
    (record,) = outcome.records
    # Nothing runs beside it, so its prompt takes steps of as much as a step computes at all.
    size = facts.decode.step_tokens + facts.decode.max_running
    steps = -(-1000 // size)
    computed = 1.0 + 2 * HOP_S + steps * SPEED.step_s + _prefill_s(1000, steps)
    assert record.first_token == pytest.approx(computed)
    last = computed + SPEED.decode_s(1, 1000) + SPEED.decode_s(1, 1001)
    assert record.ended == pytest.approx(last)
    assert (record.prefill, record.decode, record.tokens) == (None, 0, 3)


def test_one_request_alone_apart() -> None:
    facts = fleet(1, 1)
    outcome = simulate(facts, [Request(1.0, 1000, 3)])
    (record,) = outcome.records
    assert (record.prefill, record.decode, record.moved_tokens) == (0, 0, 1000)
    # The first chunk ends where a block ends; 1000 tokens fill a step, so it waits for no company.
    computed = 1.0 + HOP_S + _prefill_s(1000, 2)
    assert record.first_token == pytest.approx(computed + HOP_S)
    # Of the KV, what the last chunk made is still to move when all is computed.
    handed = computed + (1000 - 512) * 1000 / SPEED.link_bytes_per_s + SPEED.handover_s
    ended = handed + SPEED.decode_s(1, 1000) + SPEED.decode_s(1, 1001) + HOP_S
    assert record.ended == pytest.approx(ended)
    short = simulate(facts, [Request(1.0, 100, 1)]).records[0]
    assert short.decode is None
    assert short.first_token == pytest.approx(1.0 + 2 * HOP_S + _prefill_s(100, 1))


def test_a_prefix_is_computed_once() -> None:
    names = (1, 2, 3)
    requests = [Request(0.0, 1536, 2, names), Request(5.0, 1600, 2, names)]
    first, second = simulate(fleet(0, 1), requests).records
    assert (first.cached_tokens, second.cached_tokens) == (0, 1536)
    assert first.first_token_s is not None and second.first_token_s is not None
    assert second.first_token_s < first.first_token_s / 2


def test_requests_go_where_their_prefix_is() -> None:
    requests = [Request(float(n), 1536, 8, (n % 2, 100 + n % 2, 200 + n % 2)) for n in range(20)]
    records = simulate(fleet(0, 2), requests).records
    homes = [{r.decode for r in records[which::2]} for which in (0, 1)]
    assert all(len(home) == 1 for home in homes)


@pytest.mark.parametrize(("prefills", "decodes"), [(0, 2), (2, 2)])
def test_everybody_gets_all_tokens_or_a_refusal(prefills: int, decodes: int) -> None:
    simulation = Simulation(fleet(prefills, decodes, blocks=300))
    outcome = simulation.run(traffic(5, 150, 12.0))
    simulation.check()
    for record in outcome.records:
        assert (record.ended is not None) != bool(record.refused)
        if record.ended is not None:
            assert record.tokens == record.request.output_tokens
            assert sum(record.gaps.values()) == record.tokens - 1
            assert record.request.arrival < record.first_token <= record.ended  # type: ignore[operator]
    workers = [g.worker for g in simulation.senders] + [c.worker for c in simulation.receivers]
    assert not any(worker.scheduler.has_work for worker in workers)
    for use in (*outcome.prefills, *outcome.decodes):
        assert use.busy_s <= outcome.end + 1.0


def test_the_same_again() -> None:
    runs = [simulate(fleet(1, 2, blocks=300), traffic(9, 60, 20.0)).records for _ in range(2)]
    said = [[(r.first_token, r.ended, r.decode, r.refused) for r in records] for records in runs]
    assert said[0] == said[1]


def test_overload_is_refused_and_the_rest_served() -> None:
    facts = fleet(1, 1)
    facts = replace(facts, router=replace(facts.router, max_queue_s=1.0))
    records = simulate(facts, traffic(2, 400, 200.0)).records
    refused = [r for r in records if r.refused]
    waits = [r.placed - r.request.arrival for r in records if r.placed is not None]
    assert refused and len(waits) == 400 - len(refused)
    assert max(waits) < 2 * 1.0 + 1.0


def test_what_can_never_run_is_refused() -> None:
    records = simulate(fleet(1, 1, blocks=20), [Request(0.0, 4000, 5), Request(1.0, 50, 5)]).records
    assert records[0].refused == "It does not fit a worker." and records[0].ended is None
    assert records[1].ended is not None


def test_a_step_may_take_time_by_its_sequences_alone() -> None:
    facts = fleet(1, 1)
    speed = replace(SPEED, step_s=0.0, row_s=0.01)
    facts = replace(facts, decode=replace(facts.decode, speed=speed))
    records = simulate(facts, traffic(2, 40, 2.0)).records
    assert len(records) == 40 and all(record.ended is not None for record in records)


def test_bad_facts_are_named() -> None:
    worker = WorkerFacts(SPEED, 100)
    for changes, field in (
        ({"decodes": 0}, "decodes"),
        ({"kv_bytes": 0}, "kv_bytes"),
        ({"prefills": -1}, "prefills"),
        ({"decode": WorkerFacts(UNMEASURED, 100)}, "decode.speed.step_s"),
        ({"prefill": WorkerFacts(UNMEASURED, 100)}, "prefill.speed.prefill_position_s"),
        ({"decode": WorkerFacts(replace(SPEED, handover_s=0.0), 100)}, "decode.speed.handover_s"),
    ):
        with pytest.raises(InvalidArgument) as error:
            FleetFacts(**{"prefill": worker, "decode": worker, "prefills": 1, "decodes": 1,
                          "kv_bytes": 1000, **changes})  # type: ignore[arg-type]  # fmt: skip
        assert error.value.field == field
    with pytest.raises(InvalidArgument) as error:
        WorkerFacts(SPEED, 0)
    assert error.value.field == "num_blocks"
    with pytest.raises(InvalidArgument) as error:
        WorkerFacts(SPEED, 100, drafts_right=1.5)
    assert error.value.field == "drafts_right"
    with pytest.raises(InvalidArgument) as error:
        Delays(report_s=0.0)
    assert error.value.field == "report_s"
    with pytest.raises(InvalidArgument) as error:
        simulate(fleet(), [Request(2.0, 10, 5), Request(1.0, 10, 5)])
    assert error.value.field == "arrival"


def test_what_is_stuck_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(fleet(0, 1))
    monkeypatch.setattr(simulation.receivers[0].worker.scheduler, "plan", lambda now: None)
    with pytest.raises(Internal, match="stuck"):
        simulation.run([Request(0.0, 100, 10)])


def test_long_pauses_are_no_standstill() -> None:
    requests = [Request(0.0, 10, 30_000), Request(5000.0, 10, 5)]
    facts = fleet(0, 1, blocks=2000)
    assert all(record.ended is not None for record in simulate(facts, requests).records)


def test_drafts_save_steps_where_they_are_right_and_cost_none_where_not() -> None:
    facts, requests = fleet(1, 2), traffic(4, 25, 2.0)
    without = simulate(facts, requests)
    for right, least, most in ((0.9, 0.0, 0.6), (0.05, 0.9, 1.02)):
        drafting = replace(facts, decode=replace(facts.decode, drafts_right=right))
        outcome = simulate(drafting, requests)
        assert [one.tokens for one in outcome.records] == [one.tokens for one in without.records]
        spent = sum(use.busy_s for use in outcome.decodes)
        plain = sum(use.busy_s for use in without.decodes)
        assert least * plain <= spent <= most * plain
        saved = sum(use.saved_steps for use in outcome.decodes)
        assert 0 <= saved <= sum(use.drafts for use in outcome.decodes)
        assert sum(use.rows for use in outcome.decodes) == (
            sum(use.rows for use in without.decodes) - saved
        )
        again = simulate(drafting, requests)
        assert [one.ended for one in again.records] == [one.ended for one in outcome.records]
