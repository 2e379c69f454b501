"""What the runner does with ranks that fail while others load and are silent.

The ranks here are the other ends of the links, in the test's hands.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from batonlm.core.errors import Internal, InvalidArgument
from batonlm.engine.config import EngineConfig
from batonlm.engine.ranks.link import Link
from batonlm.engine.ranks.runner import (
    Answer,
    FarMemory,
    Loading,
    RankedRunner,
    RankRefused,
    encode,
)

TIME_S = 20.0


class HeldRanks:
    """See `Ranks`. `theirs` are the ranks' ends of the links for steps."""

    tensor, stages = 2, 1

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.steps = [Link(ours) for ours, _ in pairs]
        self.theirs = [Link(theirs) for _, theirs in pairs]
        self.copies: list[Link] = []
        self.watched: list[Link] = []
        self.far: list[FarMemory] = []

    def close(self) -> None:
        for link in self.steps:
            link.close()

    def say(self, rank: int, *answers: Answer) -> None:
        for answer in answers:
            self.theirs[rank].send(encode(answer), TIME_S)


@pytest.fixture
def held() -> Iterator[HeldRanks]:
    ranks = HeldRanks()
    yield ranks
    for link in (*ranks.steps, *ranks.theirs):
        link.close()


def test_a_refusal_is_raised_while_another_rank_that_loads_is_silent(held: HeldRanks) -> None:
    """Rank 1 has read its weights and waits for rank 0, which was slower and failed."""
    held.say(0, Loading(1, 9), Loading(2, 9), RankRefused("no room", "kv_memory_bytes"))
    held.say(1, Loading(9, 9))
    with pytest.raises(InvalidArgument, match="no room"):
        RankedRunner.open(held, EngineConfig("m", threads=1))


def test_a_death_is_raised_while_another_rank_that_loads_is_silent(held: HeldRanks) -> None:
    held.say(0, Loading(1, 9), Loading(2, 9))
    held.say(1, Loading(9, 9))

    def die() -> None:
        held.theirs[0].receive(TIME_S)
        held.theirs[0].close()

    rank = threading.Thread(target=die)
    rank.start()
    try:
        with pytest.raises(Internal, match="died"):
            RankedRunner.open(held, EngineConfig("m", threads=1))
    finally:
        rank.join()


def test_progress_is_that_of_the_slowest_rank(held: HeldRanks) -> None:
    told: list[tuple[int, int]] = []
    held.say(0, Loading(5, 9))
    held.say(1, Loading(3, 9), Loading(8, 9), RankRefused("enough"))
    with pytest.raises(Internal, match="enough"):
        RankedRunner.open(
            held, EngineConfig("m", threads=1), lambda done, total: told.append((done, total))
        )
    assert told[-1] == (5, 9)
