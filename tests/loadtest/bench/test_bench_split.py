"""What real runs say of a plan's answer."""

from __future__ import annotations

import pytest

from baton_loadtest.bench.split import CASES, Confirmed
from baton_loadtest.planner.fleet import Targets
from baton_loadtest.planner.split import Advice, Answer, Carried, Setup
from baton_loadtest.simulator.summary import Summary


@pytest.mark.parametrize(
    ("split", "aggregated", "answer"),
    [
        (2.0, 1.0, Answer.PAYS),
        (1.0, 2.0, Answer.DOES_NOT),
        (1.1, 1.0, Answer.WITHIN_ERROR),
        (1.0, 0.0, Answer.PAYS),
        (0.0, 1.0, Answer.DOES_NOT),
        (0.0, 0.0, None),
    ],
)
def test_runs_answer_by_the_plans_rule(
    split: float, aggregated: float, answer: Answer | None
) -> None:
    assert confirmed(split, aggregated).answer is answer


def confirmed(split: float, aggregated: float) -> Confirmed:
    whole, parts = (Carried(Setup(count, 2 - count, 64), 1.0, NOTHING) for count in (0, 1))
    advice = Advice((whole, parts), parts, whole, error=0.15, share=0.9)
    return Confirmed(CASES[0], Targets(1.0, 0.1), advice, split, aggregated)


NOTHING = Summary(0, 0, {}, 0, {}, {}, 0, 0, 0, 0, 0, 0, 0, (), (), (0, 0), (0, 0), 0, 0, 0)
