"""When the former weights of a name count again."""

from __future__ import annotations

from batonlm.core.routing.aliases import Alias
from batonlm.core.routing.step_back import LEAST, NEWEST, Outcome, StepBack

BEFORE = Alias((("small", 100),))
TRIED = BEFORE.changed((("small", 90), ("large", 10)))
FINE, FAILED = Outcome(False, 0.2), Outcome(True, None)


def trial(alias: Alias = TRIED) -> StepBack:
    watch = StepBack()
    assert watch.now("chat", alias) == alias
    return watch


def ends(watch: StepBack, model: str, *outcomes: Outcome) -> str:
    return "".join(watch.ended("chat", model, outcome) for outcome in outcomes)


def test_a_model_that_fails_more_than_the_others_loses_its_part() -> None:
    watch = trial()
    assert not ends(watch, "small", *[FINE] * 50)
    assert not ends(watch, "large", *[FAILED] * (LEAST - 1))
    why = ends(watch, "large", FAILED)
    assert why == "large fails 100% of its requests, and others 0%"
    assert watch.now("chat", TRIED).weights == BEFORE.weights
    # Once only, and until the operator says something else.
    assert not ends(watch, "large", *[FAILED] * 50)
    again = TRIED.changed(TRIED.weights)
    assert watch.now("chat", again) == again
    assert not ends(watch, "large", *[FAILED] * 50), "it has no larger part than before"


def test_what_fails_everywhere_is_no_reason() -> None:
    watch = trial()
    assert not ends(watch, "small", *[FAILED, FINE] * 30)
    assert not ends(watch, "large", *[FAILED, FINE] * 30)
    assert not ends(watch, "small", *[FAILED] * 200), "nor is what the other model does"
    assert watch.now("chat", TRIED) == TRIED


def test_a_model_that_answers_much_later_loses_its_part() -> None:
    for usual_s, own_s, goes in ((0.2, 0.7, True), (0.2, 0.39, False), (0.01, 0.05, False)):
        watch = trial()
        ends(watch, "small", *[Outcome(False, usual_s)] * LEAST)
        why = ends(watch, "large", *[Outcome(False, own_s)] * LEAST)
        assert bool(why) is goes, why
        assert (watch.now("chat", TRIED) != TRIED) is goes


def test_where_all_conversations_moved_failures_alone_count() -> None:
    alias = BEFORE.changed((("large", 1),))
    watch = trial(alias)
    assert not ends(watch, "large", *[Outcome(False, 30.0)] * NEWEST)
    assert ends(watch, "large", *[FAILED] * 10) == "large fails 10% of its requests, and others 0%"
    assert watch.now("chat", alias).weights == BEFORE.weights


def test_a_name_that_never_changed_stays() -> None:
    watch = trial(BEFORE)
    assert not ends(watch, "small", *[FAILED] * NEWEST)
    assert not watch.ended("unknown", "small", FAILED)
    assert watch.now("chat", BEFORE) == BEFORE


def test_names_that_stand_for_nothing_any_more_are_forgotten() -> None:
    watch = trial()
    ends(watch, "small", *[FINE] * LEAST)
    ends(watch, "large", *[FAILED] * LEAST)
    assert watch.now("chat", TRIED) != TRIED
    watch.keep(["chat"])
    assert watch.now("chat", TRIED) != TRIED
    watch.keep([])
    assert watch.now("chat", TRIED) == TRIED
