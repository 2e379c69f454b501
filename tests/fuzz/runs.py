"""Runs hypothesis over a target that is still to be started; says which seed was taken."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

Input = TypeVar("Input")

SEED = "BATON_FUZZ_SEED"


def fuzz(
    inputs: st.SearchStrategy[Input], count: int, body: Callable[[Input], None], *, fixed: bool
) -> None:
    """Puts `count` inputs through body. fixed: always the same ones, unless BATON_FUZZ_SEED says
    otherwise; else others every time, and the seed that gives them again is printed.
    """
    number = int(os.environ.get(SEED, "0" if fixed else str(secrets.randbits(32))))
    print(f"{SEED}={number}")
    sent = 0

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def run(one: Input) -> None:
        nonlocal sent
        sent += 1
        body(one)

    run()
    # Hypothesis stops early when it knows no more inputs, or throws too many away.
    assert sent >= count, f"only {sent} of {count} inputs"
