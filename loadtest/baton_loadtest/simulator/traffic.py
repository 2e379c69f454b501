"""Converts a trace, or a load test's workload, to requests for the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton_loadtest.drive import Piece, Workload
from baton_loadtest.simulator.requests import Request
from baton_loadtest.traces import BLOCK, Recorded
from batonlm.core.errors import InvalidArgument
from batonlm.core.kvcache.prefix import UNIT_TOKENS

Part = tuple[str, int, int]
"""A part of a piece: its key, and the range of its tokens."""


def drawn_requests(workload: Workload) -> list[Request]:
    """Returns requests in order of arrival. Pieces with one key have equal tokens, so stretches
    made of the same parts have the same name.

    Raises InvalidArgument for sessions of several turns: a later turn is due after the previous
    answer, and requests of the simulator have fixed times.
    """
    names: dict[tuple[Part, ...], int] = {}
    found = []
    for session in workload.sessions:
        if len(session.turns) > 1:
            raise InvalidArgument("must be 1 here", field="prompts.turns")
        turn = session.turns[0]
        stretches = tuple(names.setdefault(parts, len(names)) for parts in _stretches(turn.pieces))
        found.append(
            Request(
                session.due_s,
                turn.prompt_tokens,
                max(1, turn.output_tokens),
                stretches,
                UNIT_TOKENS,
            )
        )
    return sorted(found, key=lambda request: request.arrival)


def _stretches(pieces: Iterable[Piece]) -> Iterable[tuple[Part, ...]]:
    """Yields the parts of each whole unit of a prompt."""
    parts: list[Part] = []
    room = UNIT_TOKENS
    for piece in pieces:
        at = 0
        while at < piece.tokens:
            taken = min(room, piece.tokens - at)
            parts.append((piece.key, at, at + taken))
            at += taken
            room -= taken
            if not room:
                yield tuple(parts)
                parts, room = [], UNIT_TOKENS


@dataclass(frozen=True, slots=True)
class Scale:
    """How to scale a trace. Raises InvalidArgument."""

    rate: float = 1.0
    """Factor of the trace's rate."""
    lengths: float = 1.0
    """Factor of the lengths of prompts and outputs."""
    copies: int = 1
    """Number of copies that run side by side and share nothing; each begins elsewhere in the
    trace."""
    seconds: float = 0.0
    """Duration of the trace to use; 0: all."""

    def __post_init__(self) -> None:
        if not 0.0 < self.rate < float("inf"):
            raise InvalidArgument("must be more than 0", field="rate")
        if self.copies < 1:
            raise InvalidArgument("must be at least 1", field="copies")
        if not 0.0 <= self.seconds < float("inf"):
            raise InvalidArgument("must not be below 0", field="seconds")
        if self.stretch < UNIT_TOKENS or self.stretch % UNIT_TOKENS:
            raise InvalidArgument(
                f"must be a multiple of {UNIT_TOKENS / BLOCK:g}: a part of a prompt that another "
                f"one shares stays a multiple of {UNIT_TOKENS} tokens",
                field="lengths",
            )

    @property
    def stretch(self) -> int:
        """The number of tokens for each of a trace's ids, after scaling."""
        whole = self.lengths * BLOCK
        return round(whole) if whole == round(whole) else -1


def traced_requests(trace: Sequence[Recorded], scale: Scale) -> list[Request]:
    """Returns requests in order of arrival, from 0 on. trace: not empty, in any order."""
    trace = sorted(trace, key=lambda one: one.at_s)
    began = trace[0].at_s
    if scale.seconds:
        trace = [one for one in trace if one.at_s - began < scale.seconds * scale.rate]
    # The trace ends with an average gap, so that copies do not begin directly at its end.
    length = (trace[-1].at_s - began) * len(trace) / max(1, len(trace) - 1) or 1.0
    apart = 1 + max((max(one.blocks, default=0) for one in trace), default=0)
    found = []
    for copy in range(scale.copies):
        shift = length * copy / scale.copies
        for one in trace:
            found.append(
                Request(
                    (one.at_s - began + shift) % length / scale.rate,
                    max(1, round(one.prompt_tokens * scale.lengths)),
                    max(1, round(one.output_tokens * scale.lengths)),
                    tuple(name + copy * apart for name in one.blocks) if copy else one.blocks,
                    scale.stretch,
                )
            )
    return sorted(found, key=lambda request: request.arrival)
