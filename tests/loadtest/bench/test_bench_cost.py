"""What is counted of blocks is what a hand count gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_loadtest.bench.cost import (
    BlockWaste,
    new_scheduler,
    read_lengths,
    replay,
    sharing,
    step_times,
    waste,
)
from baton_loadtest.bench.engines import attempt
from batonlm.core.errors import InvalidArgument
from batonlm.core.scheduler.events import NewTokens


def test_one_sequences_waste_by_hand() -> None:
    # One prompt of a whole block and 18 tokens: decode steps reach positions 17 to 33. Growth is
    # for what it still can need, so both further blocks are there from the start.
    found = waste([(16, 18)], seed=0)
    ends = range(17, 34)
    assert found.owned == 48 * len(ends)
    assert found.unused == sum(-end % 16 for end in ends)
    assert found.ahead == 16 * sum(end <= 32 for end in ends)
    assert found.owned - found.unused - found.ahead == sum(ends)
    assert found.slabs == 34 * len(ends)


def test_longer_requests_waste_a_smaller_share() -> None:
    def share(found: BlockWaste) -> float:
        return found.unused / found.owned

    assert share(waste([(512, 64)] * 8, 0)) < share(waste([(32, 64)] * 8, 0))


def test_choices_share_their_prompts_blocks() -> None:
    together = sharing([attempt("a", range(160), 8, (0, 1, 2, 3))])
    alone = sharing([attempt(str(i), range(1000 * i, 1000 * i + 160), 8) for i in range(4)])
    # The prompt's ten blocks are counted for each choice and are there once.
    assert together.named - together.different == 3 * 10 * 7
    assert alone.named == alone.different


def test_a_prefix_that_was_computed_is_found_again() -> None:
    system = list(range(64))
    found = sharing([attempt(str(i), [*system, 1000 + i], 80) for i in range(70)])
    # 64 run at once and compute the prefix as they come; those after them find it.
    assert found.cached_tokens >= 6 * 64
    assert found.named > found.different


def test_a_replay_answers_everything() -> None:
    asked = [attempt(str(i), range(40), 1 + i) for i in range(30)]
    made = sum(
        len(tokens.token_ids)
        for _, events in replay(new_scheduler(8), asked, 5)
        for event in events
        if isinstance(event, NewTokens)
        for tokens in event.tokens
    )
    assert made == sum(range(1, 31))


def test_the_scheduler_is_timed_in_full_steps_only() -> None:
    assert len(step_times(4, seed=0)) == 400


def test_recorded_lengths(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\na,374,44\nb,9000,1\nc,5,0\nd,1,1\n")
    assert read_lengths(file, 3) == [(374, 44), (5, 1)]
    file.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_lengths(file, 3)
