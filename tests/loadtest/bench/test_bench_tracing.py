"""What tracing costs: the interval of pairs, the receiver's count, and a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton_loadtest.bench.tracing import MOST_PAIRS, TracedPair, figures, ratio, receive_spans
from baton_loadtest.launch import peer
from batonlm.cli.main import main
from batonlm.core.errors import InvalidArgument
from batonlm.rpc.otel import otlp_tracer


def test_pairs_that_agree_leave_no_doubt() -> None:
    found = ratio([(3.0, 2.0), (6.0, 4.0), (1.5, 1.0)])
    assert (found.mean, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_the_interval_is_students() -> None:
    # Logarithms 0 and 2: mean 1, standard error 1, and Student's t of one degree of freedom.
    e = 2.718281828459045
    found = ratio([(1.0, 1.0), (e**2, 1.0)])
    assert found.mean == pytest.approx(e)
    assert found.high == pytest.approx(e ** (1 + 12.706))
    assert found.low == pytest.approx(e ** (1 - 12.706))


def test_more_and_less_are_alike() -> None:
    found = ratio([(2.0, 1.0), (1.0, 2.0)])
    assert found.mean == pytest.approx(1.0)
    assert found.low == pytest.approx(1 / found.high)


@pytest.mark.parametrize("count", [0, 1, MOST_PAIRS + 1])
def test_so_many_pairs_say_nothing(count: int) -> None:
    with pytest.raises(InvalidArgument) as refused:
        ratio([(1.0, 1.0)] * count)
    assert refused.value.field == "pairs"


def test_the_goal_is_for_the_upper_end() -> None:
    pairs = [
        TracedPair({"router": on, "decode": 41.0}, {"router": off, "decode": 41.0}, 150, 8)
        for on, off in ((60.0, 59.0), (62.0, 59.0))
    ]
    found = {result.name: result for result in figures(pairs, 10)}
    assert found["CPU a token, all processes"].value == pytest.approx(102.0)
    assert found["CPU a token, all processes"].against == pytest.approx(100.0)
    assert found["CPU a token, router"].against == pytest.approx(59.0)
    assert found["what tracing and metrics add"].value == pytest.approx(2.0, abs=0.1)
    upper = found["upper end of its 95 % interval"]
    assert upper.goal == 3.0 and upper.met is False
    assert found["spans received of a request"].value == 15.0


async def test_the_receiver_counts_spans_and_traces() -> None:
    async with peer(receive_spans) as receiver:
        tracer = otlp_tracer((await receiver.ask(do="open"))["endpoint"], 1.0, "router", "i")
        for _ in range(3):
            span = tracer.begin("a")
            span.child("b").end()
            span.end()
        tracer.close()
        assert await receiver.ask(do="take") == {"spans": 6, "traces": 3}
        assert await receiver.ask(do="take") == {"spans": 0, "traces": 0}


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    few = ["--pairs", "2", "--requests", "4", "--concurrency", "2", "--output-tokens", "16"]
    assert main(["bench", "tracing", *few, "--json", str(file)]) == 0
    found = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    assert found["spans received of a request"]["value"] > 10
    assert found["scrapes of each process, of a pair"]["value"] >= 1
    assert found["CPU a token, decode"]["against"] > 0
