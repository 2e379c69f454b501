"""Figures that every schedule has: what streams gave against their reference, and what stayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from baton_loadtest.chaos.streams.answer import PARTS, Answer, differences, is_shifted
from baton_loadtest.chaos.streams.workload import KINDS, Wanted
from baton_loadtest.launch import say
from baton_loadtest.report import Result, at_most, compared


def compared_with(
    wanted: Sequence[Wanted], reference: Sequence[Answer], answers: Sequence[Answer]
) -> list[Result]:
    """All three belong together by their places. What differs is told on the way."""
    differing: Counter[str] = Counter()
    equal: Counter[str] = Counter()
    shifted = 0
    for one, expected, got in zip(wanted, reference, answers, strict=True):
        found = differences(got, expected)
        differing.update(found)
        equal[one.kind.value] += not found
        shifted += _is_shifted(got, expected)
        if found or not (got.finished and expected.finished):
            _tell(one, expected, got, found)
    count, kinds = len(answers), Counter(one.kind.value for one in wanted)
    return [
        Result("streams", count, ""),
        Result("tokens of these", sum(answer.num_tokens for answer in answers), ""),
        compared("finished", sum(a.finished for a in answers), "", count, 1.0),
        *(compared(f"equal {part}", count - differing[part], "", count, 1.0) for part in PARTS),
        at_most("streams with tokens left out or told twice", shifted, "", 0),
        *(
            compared(f"equal in everything: {kind.value}", equal[kind.value], "", number, 1.0)
            for kind in KINDS
            if (number := kinds[kind.value])
        ),
    ]


def left_behind(held: float, unasked: int) -> list[Result]:
    """What holds for the processes once all streams have ended."""
    return [
        at_most("held on workers when all streams had ended", held, "", 0),
        at_most("processes that ended by themselves", unasked, "", 0),
    ]


def _is_shifted(got: Answer, expected: Answer) -> bool:
    return any(
        is_shifted(got.tokens.get(choice, []), ids)
        for choice, ids in expected.tokens.items()
        if got.finished
    )


def _tell(wanted: Wanted, expected: Answer, got: Answer, found: set[str]) -> None:
    parts = ", ".join(sorted(found)) or "nothing"
    failed = f"; failed with {got.failed.name}: {got.words}" if got.failed else ""
    missing = "" if expected.finished else "; its reference did not finish"
    say(
        f"stream {wanted.number} ({wanted.kind.value}, {got.request_id}) differs in {parts}"
        f"{failed}{missing}"
    )
