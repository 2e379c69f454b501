"""What the HTTP API needs from the router behind it. The real one is the router's Pipeline."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from baton.core.model import ModelDescription
from baton.core.request import Event, Request
from baton.core.request_record import RequestRecord
from baton.core.tenants import Tenant
from baton.router.tokenizer_client import Encoded


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

    `turn_away` comes first, while nothing was read but who asks: it raises BatonError when nothing
    as urgent as this request may be would be let in. `open` validates, encodes and admits; it
    raises BatonError while nothing is promised yet.
    """

    def turn_away(self, tenant: Tenant, priority: int) -> None: ...

    async def open(self, request: Request) -> EventStream: ...

    async def tokenize(self, request: Request) -> tuple[Encoded, ModelDescription]:
        """A request's prompt as tokens, with their names."""

    async def detokenize(self, request: Request) -> str:
        """The text of a request's TokenPrompt."""

    def explain(self, request_id: str, tenant: Tenant) -> RequestRecord:
        """What is remembered of a request that was let in: of a tenant's own, or for an operator of
        anybody's. Raises NotFound."""

    def models(self) -> list[ModelDescription]: ...

    def ready(self) -> bool: ...
