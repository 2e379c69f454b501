"""Requests that are under way, so that they can be aborted by name.

A name is its caller's own: nobody aborts what another tenant asked. It may be given to several
requests at a time; then all of them are meant.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager


class Aborted(Exception):
    """What was under way was called off."""


class Handle:
    """One request. aborted: it is to end."""

    def __init__(self) -> None:
        self.aborted = False
        self._call_off: Callable[[], None] = _nothing

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            self._call_off()

    def on_abort(self, call_off: Callable[[], None]) -> None:
        """call_off: called when it is to end, at once if it already is. Must not wait."""
        self._call_off = call_off
        if self.aborted:
            call_off()

    @asynccontextmanager
    async def interrupting(self) -> AsyncIterator[None]:
        """Whatever is awaited within is cancelled, and Aborted raised, when it is to end."""
        loop = asyncio.get_running_loop()
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self.on_abort(lambda: scope.reschedule(loop.time()))
                try:
                    yield
                finally:
                    self._call_off = _nothing
        except TimeoutError:
            if scope.expired():
                raise Aborted from None
            raise


class Running:
    """One per service."""

    def __init__(self) -> None:
        self._handles: dict[tuple[str, str], set[Handle]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._handles.values()))

    @contextmanager
    def entered(self, tenant: str, request_id: str) -> Iterator[Handle]:
        """A request is under way while the block runs."""
        key, handle = (tenant, request_id), Handle()
        self._handles.setdefault(key, set()).add(handle)
        try:
            yield handle
        finally:
            named = self._handles[key]
            named.discard(handle)
            if not named:
                del self._handles[key]

    def abort(self, tenant: str, request_ids: Iterable[str]) -> None:
        """Unknown names are those of requests that have ended."""
        for request_id in request_ids:
            for handle in list(self._handles.get((tenant, request_id), ())):
                handle.abort()


def _nothing() -> None:
    return
