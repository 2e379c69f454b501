"""What an operator writes becomes rules, and what means nothing is refused with a reason."""

from __future__ import annotations

import math

import pytest

from baton.core.errors import InvalidArgument
from baton.kv.fault_spec import FaultSpec, Kind, Rule, kinds_at, parse
from baton.kv.faults import POINTS


def test_a_line_of_rules() -> None:
    spec = parse(
        " seed=7; corrupt@giver.sealed:rate=0.01,part=header; freeze@collector.reading:at=3 ;"
        "delay@giver.told:seconds=0.5,every=10,times=2;"
    )
    assert spec.seed == 7
    assert spec.rules == (
        Rule(Kind.CORRUPT, "giver.sealed", rate=0.01, part="header"),
        Rule(Kind.FREEZE, "collector.reading", at=3, every=0),
        Rule(Kind.DELAY, "giver.told", at=10, every=10, times=2, seconds=0.5),
    )
    assert parse("") == FaultSpec()


@pytest.mark.parametrize(
    ("settings", "reached"),
    [
        ("", [1, 2, 3, 4, 5, 6, 7]),
        (":at=3", [3]),
        (":every=3", [3, 6]),
        (":at=2,every=3", [2, 5]),
        (":at=5,rate=1", [5, 6, 7]),
    ],
)
def test_when_a_rule_applies(settings: str, reached: list[int]) -> None:
    (rule,) = parse(f"kill@giver.opened{settings}").rules
    assert [n for n in range(1, 8) if rule.reaches(n)] == reached


def test_everything_that_can_be_listed_can_be_written() -> None:
    for point in POINTS:
        for kind in kinds_at(point):
            seconds = ":seconds=1" if kind is Kind.DELAY else ""
            (rule,) = parse(f"{kind.value}@{point}{seconds}").rules
            assert (rule.kind, rule.point) == (kind, point)
    (hidden,) = parse("drop@transport.read").rules
    assert hidden.seconds == math.inf


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("corrupt", "is not a point"),
        ("corrupt@giver.seal", "is not a point"),
        ("corrupt@giver.packed", "delay, freeze, kill$"),
        ("drop@collector.read", "corrupt, delay, freeze, kill$"),
        ("melt@giver.sealed", "what can go wrong at giver.sealed"),
        ("kill@giver.told:when=3", "'when' is no setting"),
        ("kill@giver.told:at", "not a setting"),
        ("kill@giver.told:at=1,at=2", "given twice"),
        ("kill@giver.told:at=0", "whole number from 1"),
        ("kill@giver.told:rate=1.5", "at most 1"),
        ("kill@giver.told:rate=nan", "at most 1"),
        ("kill@giver.told:part=header", "'part' is no setting"),
        ("corrupt@giver.sealed:part=tail", "header or payload"),
        ("delay@giver.told", "needs seconds"),
        ("seed=x", "seed must be"),
    ],
)
def test_what_means_nothing_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as caught:
        parse(text)
    assert caught.value.field == "kv_faults" and text in caught.value.message
