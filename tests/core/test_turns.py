"""Tenants take turns at a prefill worker; FCFS stays selectable."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.scheduler.events import Planned
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.policy import PREFILL, SchedulerPolicy, first_come
from batonlm.core.scheduler.scheduler import Scheduler
from tests.core.attempts import BLOCK_SIZE, attempt, runner

SIZE = 16


def begun(policy: SchedulerPolicy, asked: list[tuple[str, int, float]]) -> list[str]:
    """Tenants in the order in which their inputs, of SIZE tokens, are computed."""
    engine = runner(256)
    scheduler = Scheduler(BlockPool(256, BLOCK_SIZE), policy, engine.model)
    loop = EngineLoop(engine, scheduler)
    names = {}
    for number, (tenant, priority, weight) in enumerate(asked):
        one = replace(
            attempt(f"r{number}", size=SIZE, seed=number), tenant=tenant, weight=weight,
            priority=priority,
        )  # fmt: skip
        names[one.key] = tenant
        loop.scheduler.add(one, 0.0, keep=False)
    order = []
    while loop.scheduler.has_work:
        for event in loop.step(1.0):
            if isinstance(event, Planned):
                order.append(names[event.key])
    return order


FLOOD = [("flood", 0, 1.0)] * 12


@pytest.mark.parametrize("budget", [SIZE, 4 * SIZE])
def test_a_flood_before_it_does_not_hold_up_another_tenant(budget: int) -> None:
    policy = replace(PREFILL, token_budget=budget, order=first_come, quantum=SIZE)
    order = begun(policy, FLOOD + [("light", 0, 1.0)] * 3)
    assert Counter(order[:6])["light"] == 3
    plain = replace(policy, quantum=0)
    assert begun(plain, FLOOD + [("light", 0, 1.0)] * 3)[-3:] == ["light"] * 3


def test_turns_are_as_long_as_weights_say() -> None:
    policy = replace(PREFILL, token_budget=SIZE, order=first_come, quantum=SIZE)
    order = begun(policy, [("one", 0, 1.0)] * 8 + [("three", 0, 3.0)] * 8)
    assert Counter(order[:8]) == {"one": 2, "three": 6}


def test_a_priority_class_comes_before_any_turn() -> None:
    policy = replace(PREFILL, token_budget=SIZE, quantum=SIZE)
    order = begun(policy, [*FLOOD, ("urgent", -1, 1.0), ("urgent", -1, 1.0)])
    assert order[:2] == ["urgent", "urgent"]
