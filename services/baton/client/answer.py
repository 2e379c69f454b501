"""A whole answer, gathered from a stream's events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from baton.core.errors import Unavailable
from baton.core.request.request import Accepted, Delta, Event, Finished, ToolCallDelta


@dataclass(frozen=True, slots=True)
class Answer:
    """choices: one Delta each that says all of it."""

    accepted: Accepted
    choices: tuple[Delta, ...]
    finished: Finished

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


@dataclass(slots=True)
class Gathered:
    """What came of a stream so far."""

    accepted: Accepted | None = None
    finished: Finished | None = None
    parts: dict[int, list[Delta]] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        match event:
            case Delta():
                self.parts.setdefault(event.choice, []).append(event)
            case Accepted():
                self.accepted = event
            case Finished():
                self.finished = event

    @property
    def text(self) -> str:
        """Of the first choice."""
        return "".join(part.text for part in self.parts.get(0, ()))

    def answer(self) -> Answer:
        """Raises Unavailable when the stream ended before its end."""
        if self.accepted is None or self.finished is None:
            raise Unavailable("The answer broke off.")
        choices = tuple(_joined(self.parts[choice]) for choice in sorted(self.parts))
        return Answer(self.accepted, choices, self.finished)


def _joined(parts: Sequence[Delta]) -> Delta:
    """How it ended is in the last part."""
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=_calls(call for part in parts for call in part.tool_calls),
    )


def _calls(parts: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    calls: dict[int, ToolCallDelta] = {}
    for part in parts:
        known = calls.get(part.index)
        calls[part.index] = part if known is None else _call(known, part)
    return tuple(calls[index] for index in sorted(calls))


def _call(known: ToolCallDelta, more: ToolCallDelta) -> ToolCallDelta:
    return replace(
        known,
        id=known.id or more.id,
        name=known.name or more.name,
        arguments=known.arguments + more.arguments,
    )
