"""Makes a load test's workload into requests for the simulator; draws nothing, reads no files."""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.errors import InvalidArgument
from baton.core.kvcache.prefix import UNIT_TOKENS
from baton_loadtest.drive import Piece, Workload
from baton_loadtest.simulator.requests import Request

Part = tuple[str, int, int]
"""Of a piece: its key, and the tokens of it from one to before another."""


def requests(workload: Workload) -> list[Request]:
    """In order of arrival. Pieces of one key have equal tokens, so stretches that are made of the
    same parts have one name.

    Raises InvalidArgument for sessions of several turns: when a further one comes depends on when
    the answer before it ends, and the simulator's requests come at times of their own.
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
    """What each whole unit of a prompt is made of."""
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
