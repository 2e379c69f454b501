"""How many requests of a batch are out at a time."""

from __future__ import annotations

from batonlm.cli.batch import RequestWindow


def test_it_opens_with_answers_up_to_the_most() -> None:
    window = RequestWindow(10)
    for _ in range(100):
        turns = 0
        while window.has_room(0.0):
            window.enter()
            turns += 1
        for _ in range(turns):
            window.left(answered=True)
    assert window.limit == 10 and window.out == 0


def test_a_burst_of_refusals_halves_it_once_and_the_least_is_one() -> None:
    window = RequestWindow(64)
    while window.limit < 64:
        window.enter()
        window.left(answered=True)
    turns = [window.enter() for _ in range(64)]
    for number, turn in enumerate(turns):
        window.refused(turn, float(number))
    assert (window.limit, window.out) == (32, 0)
    assert not window.has_room(62.9) and window.has_room(63.0), "the latest time counts"
    for _ in range(10):
        window.refused(window.enter(), 0.0)
    assert window.limit == 1


def test_failures_say_nothing_about_room() -> None:
    window = RequestWindow(8)
    before = window.limit
    for _ in range(50):
        window.enter()
        window.left(answered=False)
    assert window.limit == before
