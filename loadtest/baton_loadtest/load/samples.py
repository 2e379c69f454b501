"""What became of each request, as its client saw it.

All times are in seconds from the run's beginning.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

ANSWERED = "answered"
REFUSED = "refused"
NOT_SENT = "not sent"
UNENDED = "not ended"


@dataclass(slots=True)
class Sample:
    """One request. due_s: when it should have left; left_s: when it did. first_s and last_s: its
    tokens. gaps_s: between one token and the next; tokens that come together have nothing between
    them. end: ANSWERED in full, REFUSED, NOT_SENT, UNENDED, or the kind of error.
    """

    due_s: float
    prompt_tokens: int = 0
    turn: int = 0
    left_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = 0.0
    tokens: int = 0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    ids: list[int] = field(default_factory=list)
    """Of the answer, as long as a further turn needs them."""
    end: str = UNENDED

    def hear(self, at_s: float, count: int) -> None:
        """So many tokens more; at least one."""
        if self.tokens:
            self.gaps_s.append(at_s - self.last_s)
        else:
            self.first_s = at_s
        if count > 1:
            self.gaps_s.extend([0.0] * (count - 1))
        self.last_s = at_s
        self.tokens += count

    @property
    def sent(self) -> bool:
        return self.end != NOT_SENT

    @property
    def lag_s(self) -> float:
        """How much later it left than it was due."""
        return max(0.0, self.left_s - self.due_s)

    @property
    def between_s(self) -> float:
        """From one token to the next, on average."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0

    def meets(self, first_s: float, between_s: float) -> bool:
        """Whether it was answered in full and in time: the first token, counted from when the
        request was due, and the others after it on average."""
        return (
            self.end == ANSWERED
            and self.first_s - self.due_s <= first_s
            and self.between_s <= between_s
        )
