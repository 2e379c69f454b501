"""What the HTTP API needs from the router behind it. The real one is the router's Pipeline."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from baton.core.admission.admission import Holding
from baton.core.admission.tenants import Tenant
from baton.core.observe.request_record import RequestRecord
from baton.core.request.model import ModelDescription
from baton.core.request.request import Event, Request
from baton.router.workers.tokenizer_client import Encoded


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

    `receive` comes first, before a body is read: it raises BatonError when there is no room for it.
    `turn_away` comes next, while nothing was read but who asks: it raises BatonError when nothing
    as urgent as this request may be would be let in. What fails within `reading` counts as a
    request. `open` validates, encodes and admits; it raises BatonError while nothing is promised
    yet. The room for its bytes is its own from then on; of what is only encoded or decoded it stays
    the caller's, who holds the answer's bytes too.
    """

    def receive(self, tenant: Tenant, size: int) -> Holding: ...

    def turn_away(self, tenant: Tenant, priority: int) -> None: ...

    def reading(self, tenant: Tenant) -> AbstractContextManager[None]: ...

    async def open(self, request: Request, holding: Holding | None = None) -> EventStream: ...

    async def tokenize(
        self,
        request: Request,
        holding: Holding | None = None,
        on_names: Callable[[Sequence[str]], None] | None = None,
    ) -> tuple[Encoded, ModelDescription]:
        """A request's prompt as tokens. on_names: gets their names, some at a time."""

    async def detokenize(self, request: Request, holding: Holding | None = None) -> str:
        """The text of a request's TokenPrompt."""

    def explain(self, request_id: str, tenant: Tenant) -> RequestRecord:
        """What is remembered of a request that was let in: of a tenant's own, or for an operator of
        anybody's. Raises NotFound."""

    def models(self) -> list[ModelDescription]: ...

    def ready(self) -> bool: ...
