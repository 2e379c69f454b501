"""Adds up one prompt's events until all its choices are whole, for an answer in one document."""

from __future__ import annotations

from dataclasses import replace

from baton.core.request.request import Delta, Finished
from baton.router.api.http.frontend import EventStream
from baton.router.api.http.tools import joined
from baton.router.api.http.usage import Usage


class WholeAnswer:
    """Keeps what came of each choice; joins it once, at the end."""

    def __init__(self, n: int):
        self._parts: list[list[Delta]] = [[] for _ in range(n)]
        self.finished: list[Finished] = []
        """One, at the end."""

    async def collect(self, stream: EventStream, usage: Usage) -> None:
        async for event in stream:
            if isinstance(event, Delta):
                usage.add(event)
                self._parts[event.choice].append(event)
            elif isinstance(event, Finished):
                usage.add(event)
                self.finished.append(event)

    def choices(self) -> list[Delta]:
        return [_joined(choice, parts) for choice, parts in enumerate(self._parts)]


def _joined(choice: int, parts: list[Delta]) -> Delta:
    """One Delta that says all; how it ended is in the last part."""
    last = parts[-1] if parts else Delta(choice)
    return replace(
        last,
        text="".join(part.text for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=joined(parts),
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
    )
