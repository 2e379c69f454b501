"""What an operator writes becomes rules, and what means nothing is refused with a reason."""

from __future__ import annotations

import math

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.testing.faults import POINTS, FaultKind, FaultRule, FaultSpec, kinds_at, parse


def test_a_line_of_rules() -> None:
    spec = parse(
        " seed=7; corrupt@sender.sealed:rate=0.01,part=header; freeze@receiver.reading:at=3 ;"
        "delay@sender.told:seconds=0.5,every=10,times=2;"
    )
    assert spec.seed == 7
    assert spec.rules == (
        FaultRule(FaultKind.CORRUPT, "sender.sealed", rate=0.01, part="header"),
        FaultRule(FaultKind.FREEZE, "receiver.reading", at=3, every=0),
        FaultRule(FaultKind.DELAY, "sender.told", at=10, every=10, times=2, seconds=0.5),
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
    (rule,) = parse(f"kill@sender.opened{settings}").rules
    assert [n for n in range(1, 8) if rule.reaches(n)] == reached


def test_everything_that_can_be_listed_can_be_written() -> None:
    for point in POINTS:
        for kind in kinds_at(point):
            seconds = ":seconds=1" if kind is FaultKind.DELAY else ""
            (rule,) = parse(f"{kind.value}@{point}{seconds}").rules
            assert (rule.kind, rule.point) == (kind, point)
    (hidden,) = parse("drop@transport.read").rules
    assert hidden.seconds == math.inf


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("corrupt", "is not a point"),
        ("corrupt@sender.seal", "is not a point"),
        ("corrupt@sender.packed", "delay, freeze, kill$"),
        ("drop@receiver.read", "corrupt, delay, freeze, kill$"),
        ("melt@sender.sealed", "what can go wrong at sender.sealed"),
        ("kill@sender.told:when=3", "'when' is no setting"),
        ("kill@sender.told:at", "not a setting"),
        ("kill@sender.told:at=1,at=2", "given twice"),
        ("kill@sender.told:at=0", "whole number from 1"),
        ("kill@sender.told:rate=1.5", "at most 1"),
        ("kill@sender.told:rate=nan", "at most 1"),
        ("kill@sender.told:part=header", "'part' is no setting"),
        ("corrupt@sender.sealed:part=tail", "header or payload"),
        ("delay@sender.told", "needs seconds"),
        ("seed=x", "seed must be"),
    ],
)
def test_what_means_nothing_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as caught:
        parse(text)
    assert caught.value.field == "kv_faults" and text in caught.value.message
