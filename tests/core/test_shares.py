"""Shares of a limit among routers: a lone one gets all, greedy ones meet at equal parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.admission.tenant_budgets import (
    MAX_TOLD,
    NO_USE,
    OthersUsage,
    OthersUse,
    Refusal,
    TenantBudgets,
    UseMeter,
    share,
)
from batonlm.core.admission.tenants import Tenant
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.routing.load import TenantUse


def test_an_equal_part_and_what_others_leave() -> None:
    assert share(100, 2, 0) == 100
    assert share(100, 2, 20) == 80
    assert share(100, 2, 500) == 50
    assert share(100, 1, 0) == 100


def attempt(tenant: str, number: int = 0, prompt: int = 5, longest: int = 10) -> Attempt:
    return Attempt(
        "r", number, (0,), (1,) * prompt, prompt, SamplingParams(), StopParams(longest),
        tenant=tenant,
    )  # fmt: skip


def test_a_worker_tells_each_router_of_the_others() -> None:
    meter = UseMeter()
    meter.began("r1", attempt("a"))
    meter.made("r1", attempt("a"), 3)
    meter.began("r2", attempt("a"))
    meter.began("r2", attempt("b"))
    meter.began("r2", attempt("b", number=1))
    meter.began("r2", attempt(""))
    here = [("r1", attempt("a")), ("r2", attempt("b"))]
    assert meter.others("r1", here) == (
        TenantUse("b", 1, 5, 1, 15),
        TenantUse("a", 1, 5, 0, 0),
    )
    assert meter.others("r2", here) == (TenantUse("a", 1, 8, 1, 15),)


def test_a_report_is_bounded_to_the_most_recent() -> None:
    meter = UseMeter()
    for number in range(5000):
        meter.made("r2", attempt(f"t{number}"), 1)
    told = meter.others("r1", ())
    assert [use.tenant for use in told] == [f"t{4999 - i}" for i in range(MAX_TOLD)]


def test_rates_follow_reports_and_forget_gone_workers() -> None:
    others = OthersUse()
    for second in range(60):
        others.see({"w": [TenantUse("a", second, 100 * second, 2, 50)]}, float(second))
    use = others.of("a")
    assert use.requests_per_s == pytest.approx(1.0, rel=0.01)
    assert use.tokens_per_s == pytest.approx(100.0, rel=0.01)
    assert (use.requests, use.tokens) == (2, 50)
    # A worker that counts from 0 again is no burst backwards.
    others.see({"w": [TenantUse("a", 1, 100)]}, 60.0)
    assert others.of("a").tokens_per_s == pytest.approx(100.0, rel=0.01)
    others.see({}, 61.0)
    assert others.of("a") == NO_USE


QUOTA = Tenant("a", requests_per_minute=600, tokens_per_minute=60_000)


def admitted(wanted: tuple[int, int], seconds: int) -> list[int]:
    """Requests of 100 tokens that two routers let in of so many wanted a second, when each learns
    of the other's by way of a worker, twice a second."""
    meter = UseMeter()
    routers = [(f"r{i}", TenantBudgets(), OthersUse()) for i in range(2)]
    passed = [0, 0]
    for tick in range(seconds * 100):
        now = tick / 100
        for index, (name, budgets, others) in enumerate(routers):
            if tick % 50 == 0:
                others.see({"w": meter.others(name, ())}, now)
            if tick % 100 >= wanted[index]:
                continue
            try:
                budgets.check(QUOTA, 1, 100, others.of("a"), 2, now)
            except Exception:
                continue
            budgets.take("a", 1, 100, now)
            meter.began(name, attempt("a", prompt=100))
            passed[index] += 1
    return passed


def test_one_connection_gets_the_whole_quota_of_two_routers() -> None:
    one, other = admitted((50, 0), 60)
    assert other == 0
    # Ten a second, and at the start a part of the ten seconds' worth that may be saved up.
    assert 600 <= one <= 710


def test_greedy_at_both_routers_gets_no_more_than_the_quota() -> None:
    one, other = admitted((50, 50), 60)
    assert 600 <= one + other <= 790
    assert 0.7 < one / other < 1.4


def test_a_light_second_router_leaves_the_rest_to_the_first() -> None:
    one, other = admitted((50, 2), 60)
    assert other == 120
    assert 480 <= one <= 620


@given(
    per_minute=st.integers(1, 10_000),
    wanted=st.integers(1, 100_000),
    replicas=st.integers(1, 10),
    elsewhere=st.floats(0, 1000),
)
def test_a_first_request_is_let_in_whatever_its_size_and_however_many_routers_there_are(
    per_minute: int, wanted: int, replicas: int, elsewhere: float
) -> None:
    """What it goes beyond the part that this router has saved up is a debt."""
    tenant = Tenant("a", tokens_per_minute=per_minute)
    others = OthersUsage(tokens_per_s=elsewhere)
    budgets = TenantBudgets()
    budgets.check(tenant, 1, wanted, others, replicas, 0.0)
    budgets.take("a", 1, wanted, 0.0)
    if wanted > per_minute:
        with pytest.raises(Refusal):
            budgets.check(tenant, 1, 1, others, replicas, 0.0)
