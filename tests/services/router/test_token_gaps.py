"""How long tokens are apart, told message by message."""

from __future__ import annotations

import pytest

from batonlm.core.observe.timings import BOUNDS_S, Durations
from batonlm.router.request.pacing import TokenGaps


def test_tokens_of_one_message_share_its_gap() -> None:
    logs: list[list[int]] = [[], []]
    times = Durations()
    gaps = TokenGaps(logs, times)

    def came(choice: int, now: float, tokens: int) -> None:
        logs[choice] += [0] * tokens
        gaps.came(choice, now)

    came(0, 1.0, 1)
    came(1, 1.0, 2)
    assert times.count == 0
    came(0, 1.03, 1)
    came(0, 1.03, 0)
    came(1, 1.2, 4)
    assert times.count == 1 + 4 and times.total_s == pytest.approx(0.03 + 0.2)
    assert times.counts[BOUNDS_S.index(0.05)] == 5


def test_a_log_that_was_cut_short_is_no_gap() -> None:
    logs, times = [[1, 2, 3]], Durations()
    gaps = TokenGaps(logs, times)
    gaps.came(0, 1.0)
    del logs[0][1:]
    gaps.came(0, 2.0)
    assert times.count == 0
