"""What the HTTP API needs from the router behind it. The real one is the router's Pipeline."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from baton.core.model import ModelDescription
from baton.core.request import Event, Request


class EventStream(Protocol):
    """One Accepted at once, then Deltas, then Finished; or a BatonError in between.

    Reading slowly is fine: what is new comes as one event. `aclose` frees all that the request
    holds; it is always called, also when the client is gone. An async generator is one.
    """

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def __anext__(self) -> Event: ...

    async def aclose(self) -> None: ...


class Frontend(Protocol):
    """Answers requests.

    `open` validates, encodes and admits; it raises BatonError while nothing is promised yet.
    """

    async def open(self, request: Request) -> EventStream: ...

    def models(self) -> list[ModelDescription]: ...

    def ready(self) -> bool: ...
