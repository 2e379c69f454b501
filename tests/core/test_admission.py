"""Admission under any order of calls: nothing leaks, no limit is passed, refusals say when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batonlm.core.admission.admission import (
    Admission,
    AdmissionCharge,
    AdmissionLimits,
    Ask,
    FleetState,
)
from batonlm.core.admission.fair_queue import DrainRate, Entry, FairQueue
from batonlm.core.admission.tenant_budgets import Limit, OthersUsage, Refusal
from batonlm.core.admission.tenants import ANY_ADAPTER, AdapterLimits, Tenant
from batonlm.core.errors import InvalidArgument
from tests.depth import examples

TENANTS = {
    "free": Tenant("free"),
    "few": Tenant("few", max_requests=2, requests_per_minute=120),
    "small": Tenant("small", max_tokens=400, tokens_per_minute=6000),
}
MAX_REQUESTS, MAX_TOKENS = 6, 2000
NOWHERE = FleetState()


@dataclass
class Held:
    grant: AdmissionCharge
    tenant: str
    charged: int
    settled: bool = False


def admission(
    queue: FairQueue[Any] | None = None,
    drain: DrainRate | None = None,
    max_requests: int = MAX_REQUESTS,
) -> Admission:
    return Admission(
        AdmissionLimits(max_requests, MAX_TOKENS, max_queue_s=2.0),
        FairQueue(max_tokens=10**6, max_entries=1000) if queue is None else queue,
        drain or DrainRate(),
        jitter=lambda: 0.5,
    )


def ask(tenant: Tenant = TENANTS["free"], **more: Any) -> Ask:
    fields = {"priority": 0, "choices": 1, "least_tokens": 1, "most_tokens": 50}
    return Ask(tenant, **{**fields, "longest_output": 20, **more})


def enter(
    by: Admission, wanted: Ask, outlook: FleetState, left_s: float, now: float
) -> AdmissionCharge:
    """As a request is: first room for its bytes, then the request."""
    holding = by.receive(wanted.tenant, wanted.most_tokens, outlook, now)
    try:
        return by.open(wanted, holding, outlook, left_s, now)
    except BaseException:
        holding.release()
        raise


class AdmissionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.admission = admission()
        self.held: list[Held] = []
        self.now = 0.0

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(tenant=st.sampled_from(sorted(TENANTS)), output=st.integers(1, 300))
    def open(self, tenant: str, output: int) -> None:
        wanted = ask(TENANTS[tenant], longest_output=output)
        away = self.turned_away(tenant)
        try:
            grant = enter(self.admission, wanted, NOWHERE, 100.0, self.now)
        except Refusal as refusal:
            self.told_when(refusal)
            return
        assert not away, "it was turned away at a glance and would be let in"
        self.held.append(Held(grant, tenant, 1 + output))

    @precondition(lambda self: any(not held.settled for held in self.held))
    @rule(data=st.data(), prompt=st.integers(1, 200), output=st.integers(0, 300))
    def settle(self, data: st.DataObject, prompt: int, output: int) -> None:
        held = data.draw(st.sampled_from([h for h in self.held if not h.settled]))
        longest = held.charged - 1 + output
        try:
            held.grant.settle(prompt, longest, NOWHERE, 100.0, self.now)
        except Refusal as refusal:
            self.told_when(refusal)
            self.held.remove(held)
            held.grant.release(0, self.now)
            return
        held.settled = True
        held.charged = prompt + longest

    @precondition(lambda self: any(held.settled for held in self.held))
    @rule(data=st.data())
    def place(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([h for h in self.held if h.settled])).grant.placed()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), output=st.integers(0, 300), twice=st.booleans())
    def release(self, data: st.DataObject, output: int, twice: bool) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        held.grant.release(output, self.now, finished=True)
        if twice:
            held.grant.release(output, self.now)

    @invariant()
    def books_agree(self) -> None:
        assert self.admission.requests.total == len(self.held) <= MAX_REQUESTS
        assert self.admission.tokens.total == sum(held.charged for held in self.held)
        assert self.admission.tokens.total <= MAX_TOKENS or len(self.held) == 1
        for name, tenant in TENANTS.items():
            own = [held for held in self.held if held.tenant == name]
            assert self.admission.budgets.held(name) == (len(own), sum(h.charged for h in own))
            assert tenant.max_requests is None or len(own) <= tenant.max_requests
        if not self.held:
            assert self.admission.input_bytes.total == self.admission.unplaced.total == 0
        coming = {held.tenant for held in self.held if not held.settled}
        assert len(self.admission.approach) == len(coming)

    def turned_away(self, tenant: str) -> bool:
        try:
            self.admission.precheck(TENANTS[tenant], 0, NOWHERE, self.now)
        except Refusal as refusal:
            self.told_when(refusal)
            return True
        return False

    def told_when(self, refusal: Refusal) -> None:
        assert refusal.retry_after_s is not None
        assert 0 < refusal.retry_after_s <= 60.0


AdmissionMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestAdmission = AdmissionMachine.TestCase


def refused(
    by: Admission, wanted: Ask, outlook: FleetState = NOWHERE, left_s: float = 100.0
) -> Refusal:
    with pytest.raises(Refusal) as caught:
        enter(by, wanted, outlook, left_s, 0.0)
    return caught.value


def waiting(
    tokens: int,
    tenant: str = "free",
    rate: float = 100.0,
    queue: FairQueue[Any] | None = None,
    group: str = "",
) -> Admission:
    """With so many tokens of a tenant in a queue that drains at a rate."""
    if queue is None:
        queue = FairQueue(max_tokens=10**6, max_entries=1000)
    drain = DrainRate()
    drain.waiting(0.0, 1)
    for step in range(1, 21):
        drain.left(rate / 10, step / 10)
    queue.add(Entry(None, tenant, 1.0, 0, tokens, 0.0, group=group))
    return admission(queue, drain)


def test_more_urgency_than_a_tenant_may_have_is_an_error_that_names_the_field() -> None:
    modest = Tenant("modest", most_urgent=3)
    with pytest.raises(InvalidArgument) as caught:
        enter(admission(), ask(modest, priority=2), NOWHERE, 100.0, 0.0)
    assert caught.value.field == "priority"
    assert "at least 3" in caught.value.message
    enter(admission(), ask(modest, priority=3), NOWHERE, 100.0, 0.0)


def test_who_would_wait_for_too_long_is_refused_and_told_to_come_later_the_longer_it_is() -> None:
    enter(waiting(150), ask(), NOWHERE, 100.0, 0.0)
    refusals = [refused(waiting(tokens), ask()) for tokens in (250, 1000)]
    assert [refusal.limit for refusal in refusals] == [Limit.WAIT, Limit.WAIT]
    first, second = (refusal.retry_after_s or 0.0 for refusal in refusals)
    assert second > 3 * first


def test_whoever_waits_for_one_model_delays_no_request_for_another() -> None:
    queue: FairQueue[Any] = FairQueue(max_tokens=10**6, max_entries=1000)
    by = waiting(1000, queue=queue, group="busy")
    outlook = FleetState(models=frozenset(("busy", "idle")))
    by.precheck(TENANTS["free"], 0, outlook, 0.0)
    assert refused(by, replace(ask(), model="busy"), outlook).limit is Limit.WAIT
    # Another name may stand for either, which is known when it is settled.
    for name in ("idle", "name", "name"):
        grant = enter(by, replace(ask(), model=name), outlook, 100.0, 0.0)
        grant.settle(10, 10, outlook, 100.0, 0.0, "idle")
    with pytest.raises(Refusal):
        grant.settle(10, 10, outlook, 100.0, 0.0, "busy")
    queue.add(Entry(None, "free", 1.0, 0, 10, 0.0, group="idle"))
    with pytest.raises(Refusal):
        by.precheck(TENANTS["free"], 0, outlook, 0.0)


@given(
    queued=st.lists(st.tuples(st.sampled_from(["free", "few"]), st.integers(1, 400)), max_size=6),
    tenant=st.sampled_from(["free", "few"]),
    priority=st.integers(-2, 2),
    wanted=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    kv_tokens=st.none() | st.integers(0, 500),
)
def test_a_precheck_refuses_nothing_that_would_be_enter(
    queued: list[tuple[str, int]],
    tenant: str,
    priority: int,
    wanted: tuple[int, int],
    kv_tokens: int | None,
) -> None:
    queue: FairQueue[Any] = FairQueue(max_tokens=10**6, max_entries=1000)
    busy = waiting(1, queue=queue)
    for name, tokens in queued:
        queue.add(Entry(None, name, 1.0, 0, tokens, 0.0))
    outlook = FleetState(kv_tokens=kv_tokens)
    asked = ask(TENANTS[tenant], priority=priority, least_tokens=wanted[0], most_tokens=400)
    refused_anyway = False
    try:
        busy.precheck(TENANTS[tenant], priority, outlook, 0.0)
    except Refusal:
        refused_anyway = True
    try:
        enter(busy, replace(asked, longest_output=wanted[1]), outlook, 100.0, 0.0)
    except Refusal:
        return
    assert not refused_anyway


def test_at_a_precheck_a_long_queue_turns_away_all_but_who_would_pass_it() -> None:
    busy = waiting(1000)
    with pytest.raises(Refusal) as caught:
        busy.precheck(TENANTS["free"], 0, NOWHERE, 0.0)
    assert caught.value.limit is Limit.WAIT
    busy.precheck(TENANTS["free"], -1, NOWHERE, 0.0)
    busy.precheck(TENANTS["few"], 0, NOWHERE, 0.0)
    assert busy.requests.total == busy.tokens.total == busy.input_bytes.total == 0


def test_those_that_are_being_encoded_count_as_if_they_waited() -> None:
    busy = waiting(120)
    prompt: dict[str, Any] = {"least_tokens": 40, "most_tokens": 40}
    grants = [enter(busy, ask(**prompt), NOWHERE, 100.0, 0.0) for _ in range(2)]
    assert refused(busy, ask(**prompt)).limit is Limit.WAIT
    enter(busy, ask(priority=-1, **prompt), NOWHERE, 100.0, 0.0).release(0, 0.0)
    enter(busy, ask(TENANTS["few"], **prompt), NOWHERE, 100.0, 0.0).release(0, 0.0)
    grants[0].settle(40, 20, NOWHERE, 100.0, 0.0)
    enter(busy, ask(**prompt), NOWHERE, 100.0, 0.0)


def test_who_was_let_in_is_kept_unless_the_wait_is_too_long_for_certain() -> None:
    for tokens, kept in ((300, True), (500, False)):
        queue: FairQueue[Any] = FairQueue(max_tokens=10**6, max_entries=1000)
        busy = waiting(100, queue=queue)
        grant = enter(busy, ask(), NOWHERE, 100.0, 0.0)
        queue.add(Entry(None, "free", 1.0, 0, tokens - 100, 0.0))
        assert refused(busy, ask()).limit is Limit.WAIT
        if kept:
            grant.settle(40, 20, NOWHERE, 100.0, 0.0)
        else:
            with pytest.raises(Refusal) as caught:
                grant.settle(40, 20, NOWHERE, 100.0, 0.0)
            assert caught.value.limit is Limit.WAIT


def test_another_tenants_flood_is_not_waited_for() -> None:
    enter(waiting(5000), ask(TENANTS["few"]), NOWHERE, 100.0, 0.0)


def test_what_another_baton_runs_waits_for_nobody_here() -> None:
    busy = waiting(1000)
    assert refused(busy, ask()).limit is Limit.WAIT
    grant = enter(busy, ask(elsewhere=True), NOWHERE, 100.0, 0.0)
    grant.settle(50, 20, FleetState(kv_tokens=10), 100.0, 0.0)
    assert (busy.tokens.total, busy.unplaced.total) == (70, 0)
    grant.placed()
    grant.release(90, 1.0, finished=True)
    assert busy.requests.total == busy.tokens.total == len(busy.approach) == 0


def test_who_cannot_begin_before_its_deadline_is_refused() -> None:
    assert refused(waiting(150), ask(), left_s=1.0).limit is Limit.DEADLINE
    slow = FleetState(first_token_s=5.0)
    assert refused(waiting(50), ask(), slow, left_s=4.0).limit is Limit.DEADLINE


def test_prompts_that_wait_may_take_what_kv_memory_is_free_and_comes_free() -> None:
    tight = FleetState(kv_tokens=100)
    busy = waiting(50)
    for tenant, size, fits in (("free", 250, True), ("few", 100, False)):
        grant = enter(busy, ask(TENANTS[tenant]), tight, 100.0, 0.0)
        if fits:
            grant.settle(size, 20, tight, 100.0, 0.0)
        else:
            with pytest.raises(Refusal) as caught:
                grant.settle(size, 20, tight, 100.0, 0.0)
            assert caught.value.limit is Limit.KV


def test_tokens_that_were_not_used_are_given_back_to_the_rate() -> None:
    tenant = Tenant("paid", tokens_per_minute=6000)
    let_in = admission()
    grant = enter(let_in, ask(tenant, longest_output=900), NOWHERE, 100.0, 0.0)
    grant.settle(50, 900, NOWHERE, 100.0, 0.0)
    grant.placed()
    assert refused(let_in, ask(tenant, longest_output=500)).limit is Limit.TOKEN_RATE
    grant.release(10, 0.0)
    enter(let_in, ask(tenant, longest_output=900), NOWHERE, 100.0, 0.0)


def test_a_refused_request_is_not_charged() -> None:
    tenant = Tenant("rated", requests_per_minute=6)
    let_in = admission()
    for _ in range(5):
        enter(let_in, ask(tenant), NOWHERE, 100.0, 0.0).release(0, 0.0)
    grant = enter(let_in, ask(tenant), NOWHERE, 100.0, 0.0)
    grant.settle(5, 5, NOWHERE, 100.0, 0.0)
    grant.placed()
    grant.release(5, 0.0)
    assert refused(let_in, ask(tenant)).limit is Limit.REQUEST_RATE


def test_what_a_tenant_holds_at_other_routers_counts() -> None:
    two = Tenant("two", max_requests=2)
    let_in = admission()
    enter(let_in, ask(two), FleetState(replicas=2), 100.0, 0.0)
    elsewhere = FleetState(replicas=2, others=OthersUsage(requests=1))
    assert refused(let_in, ask(two), elsewhere).limit is Limit.TENANT_REQUESTS
    enter(let_in, ask(two), FleetState(replicas=2), 100.0, 0.0)


def test_one_larger_than_its_limit_passes_alone_and_keeps_the_next_one_out() -> None:
    tenant = Tenant("tiny", max_tokens=40, tokens_per_minute=60)
    let_in = admission()
    grant = enter(let_in, ask(tenant), NOWHERE, 100.0, 0.0)
    grant.settle(100, 50, NOWHERE, 100.0, 0.0)
    assert let_in.budgets.held("tiny") == (1, 150)
    assert refused(let_in, ask(tenant)).limit is Limit.TOKEN_RATE


def take_all(by: Admission, wanted: Ask) -> list[AdmissionCharge]:
    """Everything a tenant gets of one kind of request."""
    grants = []
    while True:
        try:
            grants.append(enter(by, wanted, NOWHERE, 100.0, 0.0))
        except Refusal:
            return grants


GREEDY = [Tenant("greedy"), Tenant("as greedy", weight=0.5)]


@pytest.mark.parametrize(
    ("flood", "limit"),
    [
        ({"most_tokens": 1 << 20}, Limit.INPUT),
        ({"most_tokens": 100}, Limit.REQUESTS),
        ({"most_tokens": 100, "longest_output": 500}, Limit.TOKENS),
    ],
    ids=lambda value: value.value if isinstance(value, Limit) else "",
)
def test_a_tenant_is_let_in_whatever_others_hold(flood: dict[str, Any], limit: Limit) -> None:
    limits = AdmissionLimits(max_requests=64, max_tokens=20_000, max_queue_s=2.0)
    busy = Admission(limits, FairQueue(max_tokens=1, max_entries=1), DrainRate(), lambda: 0.5)
    floods = [take_all(busy, ask(tenant, **flood)) for tenant in GREEDY]
    assert all(floods)
    assert refused(busy, ask(GREEDY[0], **flood)).limit is limit
    for _ in range(3):
        grant = enter(busy, ask(Tenant("polite"), most_tokens=1000), NOWHERE, 100.0, 0.0)
        grant.settle(200, 20, NOWHERE, 100.0, 0.0)
    while floods[0]:
        floods[0].pop().release(0, 0.0)
    assert take_all(busy, ask(GREEDY[0], **flood)), "there is room for it again"


def test_a_tenants_prompts_do_not_take_the_kv_that_others_wait_for() -> None:
    tight = FleetState(kv_tokens=100)
    busy = waiting(50)
    with pytest.raises(Refusal) as caught:
        for _ in range(100):
            enter(busy, ask(), tight, 100.0, 0.0).settle(60, 1, tight, 100.0, 0.0)
    assert caught.value.limit is Limit.KV
    enter(busy, ask(TENANTS["few"]), tight, 100.0, 0.0).settle(30, 1, tight, 100.0, 0.0)


def test_a_clients_own_fault_is_not_refunded_and_what_was_encoded_is_paid_for() -> None:
    tenant = Tenant("faulty", requests_per_minute=6, tokens_per_minute=6000)
    for encoded, left in ((0, 1000), (400, 600), (5000, -4000)):
        let_in = admission()
        grant = enter(let_in, ask(tenant, most_tokens=4000), NOWHERE, 100.0, 0.0)
        if encoded:
            grant.encoding()
            grant.encoded(encoded)
        grant.release(0, 0.0, at_fault=True)
        assert refused(let_in, ask(tenant)).limit is Limit.REQUEST_RATE
        wanted = ask(replace(tenant, requests_per_minute=None), longest_output=999)
        if left == 1000:
            enter(let_in, wanted, NOWHERE, 100.0, 0.0)
        else:
            retry_s = refused(let_in, wanted).retry_after_s
            assert retry_s == min(60.0, (1000 - left) / 100 * 1.5)


def test_output_beyond_the_longest_that_was_known_is_paid_for() -> None:
    """Of a model at another Baton nothing is known beforehand."""
    tenant = Tenant("far", tokens_per_minute=6000)
    let_in = admission()
    grant = enter(let_in, ask(tenant), NOWHERE, 100.0, 0.0)
    grant.settle(10, 1, NOWHERE, 100.0, 0.0)
    grant.placed()
    grant.release(2000, 0.0, finished=True)
    assert refused(let_in, ask(tenant)).limit is Limit.TOKEN_RATE
    enter(let_in, ask(tenant), NOWHERE, 100.0, 12.0)


def test_what_a_tokenizer_began_and_refused_is_paid_for_by_what_it_had_to_be_taken_for() -> None:
    tenant = Tenant("faulty", tokens_per_minute=6000)
    let_in = admission()
    grant = enter(let_in, ask(tenant, most_tokens=2000), NOWHERE, 100.0, 0.0)
    grant.encoding()
    grant.release(0, 0.0, at_fault=True)
    assert refused(let_in, ask(tenant, longest_output=600)).limit is Limit.TOKEN_RATE
    enter(let_in, ask(tenant, longest_output=400), NOWHERE, 100.0, 0.0)


def test_a_request_that_could_not_be_read_counts_as_one() -> None:
    tenant = Tenant("faulty", requests_per_minute=6)
    let_in = admission()
    let_in.precheck(tenant, 0, NOWHERE, 0.0)
    let_in.fault(tenant, NOWHERE, 0.0)
    with pytest.raises(Refusal) as caught:
        let_in.receive(tenant, 1, NOWHERE, 0.0)
    assert caught.value.limit is Limit.REQUEST_RATE


def test_what_is_only_encoded_or_decoded_takes_a_request_and_no_tokens() -> None:
    tenant = Tenant("texts", requests_per_minute=6, tokens_per_minute=60)
    let_in = waiting(10**6)
    grant = enter(let_in, ask(tenant, choices=0, longest_output=0), NOWHERE, 100.0, 0.0)
    assert let_in.budgets.held("texts") == (1, 0)
    grant.encoding()
    grant.encoded(500)
    grant.release(0, 0.0, finished=True)
    assert let_in.budgets.held("texts") == (0, 0)
    assert len(let_in.approach) == 0
    rated = refused(let_in, ask(tenant, choices=0, longest_output=0))
    assert rated.limit is Limit.REQUEST_RATE
    let_in.budgets.check(replace(tenant, requests_per_minute=None), 1, 10, OthersUsage(), 1, 0.0)


def test_bytes_are_held_until_they_are_encoded_whoever_holds_them() -> None:
    busy = admission()
    holding = busy.receive(TENANTS["free"], 10, NOWHERE, 0.0)
    holding.grow(5)
    parts = holding.divided(2)
    holding.release()
    assert busy.input_bytes.total == 15
    grants = [busy.open(ask(), part, NOWHERE, 100.0, 0.0) for part in parts]
    grants[0].encoded(3)
    grants[0].release(0, 0.0)
    assert busy.input_bytes.total == 7
    parts[1].release()
    grants[1].release(0, 0.0)
    assert busy.input_bytes.total == 0


def test_callers_without_names_share_by_their_addresses() -> None:
    busy = admission(max_requests=1000)
    most = {"most_tokens": 1 << 20}
    flood = take_all(busy, ask(Tenant(address="10.0.0.1"), **most))
    assert refused(busy, ask(Tenant(address="10.0.0.1"), **most)).limit is Limit.INPUT
    enter(busy, ask(Tenant(address="10.0.0.2"), **most), NOWHERE, 100.0, 0.0)
    assert flood


def test_the_use_of_an_adapter_has_limits_of_its_own() -> None:
    """Ten seconds' worth of a rate may be used at once, and what was not used comes back."""
    limits = {"a": AdapterLimits(tokens_per_minute=600), ANY_ADAPTER: AdapterLimits(6, None)}
    tenant = Tenant("t", adapters=limits)
    by = admission(max_requests=100)

    def settled(adapter: str, now: float, outlook: FleetState = NOWHERE) -> AdmissionCharge:
        grant = enter(by, ask(tenant), outlook, 100.0, now)
        try:
            grant.settle(30, 40, outlook, 100.0, now, "m", adapter)
        except BaseException:
            grant.release(0, now)
            raise
        return grant

    first = settled("a", 0.0)
    with pytest.raises(Refusal, match="a: More than 600 tokens per minute") as refused:
        settled("a", 0.0)
    assert (refused.value.limit, refused.value.field) == (Limit.TOKEN_RATE, "model")
    assert refused.value.retry_after_s is not None
    first.placed()
    first.release(20, 0.0, finished=True)
    # 50 of 100 tokens were used, and 2 s later there are the 70 that are wanted.
    settled("a", 2.0).release(0, 2.0)
    # Others count each by itself, and the model alone has no such limit.
    for name in ("b", "c"):
        settled(name, 3.0).placed()
        with pytest.raises(Refusal, match=f"{name}: More than 6 requests per minute"):
            settled(name, 3.0)
    settled("", 3.0).release(0, 3.0)
    settled("b", 13.0)
    # With a second router, half of the rate is this one's.
    two = replace(NOWHERE, replicas=2)
    settled("d", 20.0, two)
    with pytest.raises(Refusal):
        settled("d", 30.0, two)
    settled("d", 40.0, two)
