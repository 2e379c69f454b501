"""The highest rate that is served well."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_loadtest.load.search import Found, Range, Verdict, highest
from batonlm.core.errors import InvalidArgument


def search(bounds: Range, most: float, limit: Verdict = Verdict.BADLY) -> Found:
    async def probe(rate: float) -> Verdict:
        return Verdict.WELL if rate <= most else limit

    return asyncio.run(highest(bounds, probe))


@settings(max_examples=50)
@given(
    st.floats(0.1, 1e4), st.floats(1.1, 1e4), st.floats(0.01, 1), st.floats(0.5, 2e4),
    st.floats(0, 1),
)  # fmt: skip
def test_it_is_found_within_its_resolution(
    lowest: float, factor: float, resolution: float, most: float, begin: float
) -> None:
    most_tried = lowest * factor
    bounds = Range(lowest, most_tried, resolution, lowest + begin * (most_tried - lowest))
    found = search(bounds, most)
    assert all(lowest <= rate <= bounds.highest for rate, _ in found.tried)
    assert len(found.tried) < 60
    if most < lowest:
        assert found.rate is None and "Even the lowest rate" in found.conclusion()
    elif most >= bounds.highest:
        assert found.rate == bounds.highest and found.above is None
        assert "At least" in found.conclusion()
    else:
        assert found.rate is not None and found.above is not None
        assert found.rate <= most < found.above <= found.rate * (1 + resolution) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("most", "tried"),
    [
        (1.0, [2, 1.6, 1.28, 1.024, 1]),
        (1.3, [2, 1.6, 1.28]),
        (2.0, [2, 2.5]),
        (9.0, [2, 2.5, 3.125, 3.90625, 4]),
    ],
)
def test_it_grows_and_shrinks_by_what_was_said(most: float, tried: list[float]) -> None:
    found = search(Range(1, 4, 0.26, 2, growth=1.25), most)
    assert [rate for rate, _ in found.tried] == pytest.approx(tried)
    assert found.rate == pytest.approx(max(rate for rate in tried if rate <= most))


def test_rates_that_do_not_grow_are_refused() -> None:
    with pytest.raises(ValueError, match="growth"):
        Range(1, 4, growth=1.0)


def test_what_cannot_be_asked_for_is_no_limit_of_the_server() -> None:
    found = search(Range(1, 1000), 100, Verdict.UNKNOWN)
    assert found.rate == pytest.approx(98, rel=0.05)
    assert "could not be asked for in time from here" in found.conclusion()
    assert "could be asked" in search(Range(200, 1000), 100, Verdict.UNKNOWN).conclusion()


def test_it_is_stopped() -> None:
    found = search(Range(1, 1000), 5, Verdict.STOPPED)
    assert found.conclusion() == "Stopped before the search ended."
    assert found.rate == 4


@pytest.mark.parametrize(
    ("bounds", "field"),
    [((0, 5), "from"), ((5, 5), "to"), ((1, float("inf")), "to"), ((1, 5, 0.0), "step")],
)
def test_what_is_no_range(bounds: tuple[float, ...], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Range(*bounds)
    assert caught.value.field == f"search_{field}"
