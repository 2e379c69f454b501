"""What is asked, by whom and when: sessions of turns, drawn for a scenario before anything leaves.

A session's first turn is due at a time of its own; each further one a pause after the answer to the
one before, whose prompt and answer it begins with. Lengths are in tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from baton.core.errors import InvalidArgument
from baton_loadtest.drive import Piece, Session, Turn, Workload
from baton_loadtest.load.arrivals import Arrivals, replayed
from baton_loadtest.load.lengths import Lengths
from baton_loadtest.traces import BLOCK, Recorded, Trace


@dataclass(frozen=True, slots=True)
class Drawn:
    """Requests that are drawn. shared_tokens: of the beginning that all sessions of a group have in
    common, besides the prompt's own. pause_s: on average; exponential."""

    arrivals: Arrivals
    lengths: Lengths
    scale: float = 1.0
    most_tokens: int | None = None
    shared_tokens: int = 0
    shared_groups: int = 1
    turns: int = 1
    pause_s: float = 0.0

    @property
    def mean_rate(self) -> float:
        """Sessions a second."""
        return self.arrivals.mean_rate

    def scaled(self, factor: float) -> Drawn:
        return replace(self, arrivals=self.arrivals.scaled(factor))

    def workload(self, seed: int) -> Workload:
        draw = random.Random(f"workload {seed}")
        sessions, shortened = [], 0
        for number, due_s in enumerate(self.arrivals.times(draw)):
            turns, left_out = self._turns(draw, number)
            sessions.append(Session(due_s, turns))
            shortened += left_out
        return Workload(tuple(sessions), self.arrivals.seconds, shortened)

    def _turns(self, draw: random.Random, number: int) -> tuple[tuple[Turn, ...], int]:
        context, shortened = 0, 0
        turns: list[Turn] = []
        for index in range(self.turns):
            prompt = self.lengths.prompt.draw(draw, self.scale)
            output = self.lengths.output.draw(draw, self.scale)
            pause_s = draw.expovariate(1 / self.pause_s) if index and self.pause_s else 0.0
            pieces = []
            if not index and self.shared_tokens:
                group = draw.randrange(self.shared_groups)
                pieces.append(Piece(f"shared {group}", self.shared_tokens))
            pieces.append(Piece(f"own {number} {index}", prompt))
            turn = Turn(tuple(pieces), output, pause_s)
            if index and self.most_tokens is not None:
                if context + turn.prompt_tokens + output > self.most_tokens:
                    return tuple(turns), shortened + self.turns - index
            else:
                turn, cut = _fitted(turn, self.most_tokens)
                shortened += cut
            turns.append(turn)
            context += turn.prompt_tokens + turn.output_tokens
        return tuple(turns), shortened


@dataclass(frozen=True, slots=True)
class Replay:
    """Requests of a trace. speed: how many times as fast as they came. seconds: of the replay, None
    for all of it."""

    trace: Trace
    speed: float = 1.0
    scale: float = 1.0
    most_tokens: int | None = None
    seconds: float | None = None
    own_s: float = field(default=0.0, init=False)
    """The trace's own length, to its last request."""

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise InvalidArgument("must be a number above 0", field="trace.speed")
        times = [request.at_s for request in self.trace.requests]
        object.__setattr__(self, "own_s", max(times) - min(times))

    @property
    def mean_rate(self) -> float:
        """Requests a second, over all of the trace."""
        return len(self.trace.requests) * self.speed / self.own_s if self.own_s else 1.0

    def scaled(self, factor: float) -> Replay:
        """In the same time, if there is one."""
        return replace(self, speed=self.speed * factor)

    def workload(self, seed: int) -> Workload:
        """seed: chance has no part in it."""
        requests = sorted(self.trace.requests, key=lambda one: one.at_s)
        times = replayed((one.at_s for one in requests), self.speed)
        sessions, shortened = [], 0
        for number, (due_s, request) in enumerate(zip(times, requests, strict=True)):
            if self.seconds is not None and due_s >= self.seconds:
                break
            output = max(1, round(request.output_tokens * self.scale))
            pieces = tuple(_pieces(request, number, self.scale))
            turn, cut = _fitted(Turn(pieces, output), self.most_tokens)
            sessions.append(Session(due_s, (turn,)))
            shortened += cut
        seconds = self.own_s / self.speed
        if self.seconds is not None:
            seconds = min(seconds, self.seconds)
        return Workload(tuple(sessions), seconds, shortened)


Source = Drawn | Replay


def _pieces(request: Recorded, number: int, scale: float) -> Iterator[Piece]:
    """A block stays one when it is scaled: equal ids have equal tokens."""
    left = max(1, round(request.prompt_tokens * scale))
    if not request.blocks:
        yield Piece(f"own {number} 0", left)
        return
    size = max(1, round(BLOCK * scale))
    for place, block in enumerate(request.blocks, 1):
        # The last one takes what rounding left over.
        tokens = left if place == len(request.blocks) else min(size, left)
        if tokens:
            yield Piece(f"block {block}", tokens)
        left -= tokens


def _fitted(turn: Turn, most_tokens: int | None) -> tuple[Turn, bool]:
    """A turn of at most so many tokens, answer included, and whether it was longer. The answer
    gives way only where it has more than half of them."""
    if most_tokens is None or turn.prompt_tokens + turn.output_tokens <= most_tokens:
        return turn, False
    output = min(turn.output_tokens, most_tokens // 2)
    left = most_tokens - output
    pieces = []
    for piece in turn.pieces:
        if taken := min(left, piece.tokens):
            pieces.append(Piece(piece.key, taken))
        left -= taken
    return Turn(tuple(pieces), output, turn.pause_s), True
