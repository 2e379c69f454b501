"""Request, what comes in, and Record, what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_loadtest.simulator.gaps import Counts, class_of


@dataclass(frozen=True, slots=True)
class Request:
    """arrival: seconds from the start. input_tokens, output_tokens: at least 1. names: of the
    input's stretches of `stretch` tokens, see `Prompt`; empty: shares nothing with others."""

    arrival: float
    input_tokens: int
    output_tokens: int
    names: tuple[int, ...] = ()
    stretch: int = 512


@dataclass(slots=True, eq=False)
class Record:
    """One request's fate. Times are virtual seconds, None: never.

    placed: when it first got workers. prefill, decode: numbers of its last workers in their roles;
    prefill None: decode computed its prompt itself. cached_tokens: of its prompt, where it was
    computed. moved_tokens: whose KV was handed over. refused: why it got no answer, or "". gaps:
    times between its tokens, by class. last: of its newest token.
    """

    number: int
    request: Request
    placed: float | None = None
    first_token: float | None = None
    ended: float | None = None
    prefill: int | None = None
    decode: int | None = None
    cached_tokens: int = 0
    moved_tokens: int = 0
    attempts: int = 0
    tokens: int = 0
    refused: str = ""
    last: float = 0.0
    gaps: Counts = field(default_factory=dict)

    @property
    def first_token_s(self) -> float | None:
        """From arrival."""
        return None if self.first_token is None else self.first_token - self.request.arrival

    def token(self, now: float) -> None:
        """One more; of an attempt that had to begin again only what is new counts."""
        if self.first_token is None:
            self.first_token = now
        else:
            which = class_of(now - self.last)
            self.gaps[which] = self.gaps.get(which, 0) + 1
        self.last = now
        self.tokens += 1

    def many(self, first: float, last: float, count: int, between: list[tuple[int, int]]) -> None:
        """So many tokens more, the first and the last of them at these times, and what lies between
        them by class."""
        self.token(first)
        for which, number in between:
            self.gaps[which] = self.gaps.get(which, 0) + number
        self.last = last
        self.tokens += count - 1
