"""Streams that several calls may read: their events are kept while they run, and a little longer.

A request whose events have ids, or that has an idempotency key, runs in a task of its own, and its
client reads what is kept of its events. So another call of the same tenant that names the stream
reads it, too, from its beginning. A run that nobody reads ends after a while.

What does not fit into the bounds is not kept. Nothing depends on it: such a request can be run
again with the same seed, here or at another router (`core.request.resumption`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from batonlm.core.admission.admission import Holding
from batonlm.core.admission.tenants import ANYONE, Tenant
from batonlm.core.errors import BatonError, InvalidArgument, NotFound, Overloaded, Unavailable
from batonlm.core.observe.stages import UNTRACED
from batonlm.core.request.request import Accepted, Delta, Event, Request
from batonlm.router.request.admission import prompt_bounds

if TYPE_CHECKING:
    from batonlm.router.request.pipeline import EventStream

KEPT_S = 10.0
"""Seconds for which a stream runs on without a reader, and is kept after its end."""

MAX_OF_TENANT = 64
"""Streams that are kept of one tenant, running or ended."""

MAX_ENTRIES = 1 << 18
"""Tokens and log-probabilities that are kept of all streams: about 100 MB at most."""

ENTRY_BYTES = 256
"""So many bytes of a prompt count as one of these."""


class KeyReused(InvalidArgument):
    """An idempotency key was sent with another request than before."""


class StillRunning(Unavailable):
    """The request with this idempotency key runs, and its beginning is not kept any more."""


def not_kept(field: str) -> NotFound:
    """Returns the failure of a call for a stream that is not here. field: where a request has the
    id of the last event."""
    return NotFound(
        "This router does not have that stream. Send the request that began it again, to any "
        f"router, with the id of the last event in {field}: it goes on after that event."
    )


class KeptStream:
    """One run: its events so far, and who reads them."""

    def __init__(self, request: Request, view: object) -> None:
        """view: what the public entry that began the stream needs to show it again."""
        self.request = request
        self.view = view
        resumes = request.resumes
        self.created = int(time.time()) if resumes is None else resumes.created
        """In seconds since 1970."""
        self.stream_id = request.stream_id("")
        """Empty until the request is accepted, where it has no other id."""
        self.events: list[Event] | None = []
        """All so far; None: they were too many to keep."""
        self.num_entries = 0
        self.readers: set[StreamReader] = set()
        self.stream: EventStream | None = None
        """The run's own, once it has workers."""
        self.opened = asyncio.Event()
        """Set when it has workers, or has failed."""
        self.failure: BaseException | None = None
        self.over = False
        self.task: asyncio.Task[None]
        self.timer: asyncio.TimerHandle | None = None
        """Ends a run without readers, or forgets one that is over."""

    def is_of(self, request: Request) -> bool:
        """Whether a request would run the same."""
        return _as_run(self.request) == _as_run(request)

    def end(self, failure: BaseException | None) -> None:
        self.failure, self.over = failure, True
        self.opened.set()
        for reader in self.readers:
            reader.news.set()


def _as_run(request: Request) -> Request:
    """Returns the request without what makes no other answer of it."""
    return replace(
        request,
        deadline_s=None,
        tenant=ANYONE,
        trace=UNTRACED,
        resumable=False,
        resumes=None,
        keyed_stream_id="",
    )


class StreamReader:
    """An EventStream of a kept one, from its beginning."""

    def __init__(self, kept: KeptStream, leave: Callable[[StreamReader], Awaitable[None]]) -> None:
        """leave: called when it is closed."""
        self.kept = kept
        self.pending: deque[Event] = deque(kept.events or ())
        self.news = asyncio.Event()
        self._leave = leave
        self._closed = False
        kept.readers.add(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self.pending:
            if self._closed:
                raise StopAsyncIteration
            if self.kept.over:
                self._closed = True
                if self.kept.failure is not None:
                    raise self.kept.failure
                raise StopAsyncIteration
            self.news.clear()
            await self.news.wait()
        return self.pending.popleft()

    @property
    def tried_tokens(self) -> int:
        return self.kept.stream.tried_tokens if self.kept.stream is not None else 0

    @tried_tokens.setter
    def tried_tokens(self, tokens: int) -> None:
        assert self.kept.stream is not None
        self.kept.stream.tried_tokens = tokens

    @property
    def cached_tokens(self) -> int:
        return self.kept.stream.cached_tokens if self.kept.stream is not None else 0

    def call_off(self) -> None:
        if self.kept.stream is not None:
            self.kept.stream.call_off()

    async def aclose(self) -> None:
        self._closed = True
        self.pending.clear()
        self.news.set()
        if self in self.kept.readers:
            self.kept.readers.discard(self)
            await self._leave(self)


class KeptStreams:
    """The kept streams of one router."""

    def __init__(
        self,
        start: Callable[[Request, Holding | None], Awaitable[EventStream]],
        background: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        left: Callable[[], BatonError],
        *,
        kept_s: float = KEPT_S,
        most_of_tenant: int = MAX_OF_TENANT,
        most_entries: int = MAX_ENTRIES,
    ) -> None:
        """start: `Pipeline.open`. background: runs a task that the pipeline's end cancels. left:
        the failure of a run that this ends. most_of_tenant: 0: nothing is kept."""
        self.kept_s = kept_s
        self._start = start
        self._background = background
        self._left = left
        self._most_of_tenant = most_of_tenant
        self._most_entries = most_entries
        self._num_entries = 0
        self._draining = False
        self._running: set[KeptStream] = set()
        self._of: dict[str, dict[str, KeptStream]] = {}
        """By tenant and stream, oldest first."""

    def find(self, tenant: Tenant, stream_id: str) -> KeptStream | None:
        """Returns a tenant's stream that can be read from its beginning."""
        kept = self._of.get(tenant.name, {}).get(stream_id)
        return kept if kept is not None and kept.events is not None else None

    async def open(
        self, request: Request, holding: Holding | None = None, view: object = None
    ) -> EventStream:
        """Starts a request, or reads the stream that it names and that is kept here; see
        `Pipeline.open`. view: see KeptStream. Raises KeyReused and StillRunning, too."""
        if not (request.resumable or request.keyed_stream_id):
            return await self._start(request, holding)
        name, stream_id = request.tenant.name, request.stream_id("")
        kept = self._of.get(name, {}).get(stream_id)
        if kept is not None:
            if kept.is_of(request) and kept.events is not None:
                return await self._read(kept)
            if not request.keyed_stream_id:
                return await self._start(request, holding)
            if kept.events is None:
                raise StillRunning(
                    "The request with this Idempotency-Key runs, and its answer has become too "
                    "long to be told twice.",
                    retry_after_s=self.kept_s,
                )
            raise KeyReused("Idempotency-Key was sent with another request before.")
        if not self._has_room(name):
            if request.keyed_stream_id and self._most_of_tenant:
                raise Overloaded("Too many requests with an Idempotency-Key run.")
            return await self._start(request, holding)
        kept = KeptStream(request, view)
        if stream_id:
            self._of.setdefault(name, {})[stream_id] = kept
        self._count(kept, prompt_bounds(request.prompt)[2] // ENTRY_BYTES)
        kept.task = self._background(self._run(kept, holding))
        self._running.add(kept)
        kept.task.add_done_callback(lambda _: self._running.discard(kept))
        return await self._read(kept)

    def drain(self) -> None:
        """From now on a run ends with its last reader, and those without one end at once: nobody
        can come back to a router that refuses requests."""
        self._draining = True
        for kept in self._running:
            if not kept.readers:
                kept.task.cancel()

    def close(self) -> None:
        """Forgets all streams. The pipeline cancels those that run."""
        for kept in [kept for streams in self._of.values() for kept in streams.values()]:
            self._forget(kept)

    async def _read(self, kept: KeptStream) -> EventStream:
        """Returns a reader when the run has workers. Raises BatonError when it fails earlier."""
        if not kept.over and kept.timer is not None:
            kept.timer.cancel()
        reader = StreamReader(kept, self._left_by)
        try:
            await kept.opened.wait()
            if kept.stream is None and kept.failure is not None:
                raise kept.failure
        except BaseException:
            await reader.aclose()
            raise
        return reader

    async def _run(self, kept: KeptStream, holding: Holding | None) -> None:
        failure: BaseException | None = None
        try:
            kept.stream = stream = await self._start(kept.request, holding)
            try:
                kept.opened.set()
                async for event in stream:
                    self._add(kept, event)
            finally:
                await stream.aclose()
        except asyncio.CancelledError:
            failure = self._left()
            raise
        except Exception as error:
            # Its readers raise it.
            failure = error
        finally:
            if failure is None:
                self._later(kept, lambda: self._forget(kept))
            else:
                self._forget(kept)
            kept.end(failure)

    def _add(self, kept: KeptStream, event: Event) -> None:
        if isinstance(event, Accepted) and not kept.stream_id:
            name = kept.request.tenant.name
            kept.stream_id = kept.request.stream_id(event.request_id)
            if self._has_room(name):
                self._of.setdefault(name, {}).setdefault(kept.stream_id, kept)
            else:
                # As many others have begun while this one waited for workers.
                self._drop_events(kept)
        if kept.events is not None:
            kept.events.append(event)
            if isinstance(event, Delta):
                logprobs = sum(1 + len(each.top) for each in event.logprobs)
                self._count(kept, len(event.token_ids) + logprobs)
        for reader in kept.readers:
            reader.pending.append(event)
            reader.news.set()

    def _count(self, kept: KeptStream, entries: int) -> None:
        """A running stream takes so many entries more."""
        kept.num_entries += entries
        self._num_entries += entries
        if self._num_entries > self._most_entries:
            self._make_room(kept)

    def _make_room(self, growing: KeptStream) -> None:
        """Forgets ended streams, the oldest of each tenant first, and if that does not help, the
        events of the one that grows."""
        for kept in [kept for name in self._of for kept in self._ended(name)]:
            self._forget(kept)
            if self._num_entries <= self._most_entries:
                return
        self._drop_events(growing)

    def _has_room(self, tenant: str) -> bool:
        """Whether one more stream of a tenant may be kept. Forgets an ended one for it."""
        if len(self._of.get(tenant, ())) >= self._most_of_tenant:
            for kept in self._ended(tenant):
                self._forget(kept)
                break
        return len(self._of.get(tenant, ())) < self._most_of_tenant

    def _ended(self, tenant: str) -> Iterator[KeptStream]:
        return (kept for kept in [*self._of.get(tenant, {}).values()] if kept.over)

    async def _left_by(self, reader: StreamReader) -> None:
        """A reader has left."""
        kept = reader.kept
        if kept.readers or kept.over:
            return
        if kept.events is not None and self.kept_s and not self._draining:
            self._later(kept, lambda: kept.task.cancel())
            return
        kept.task.cancel()
        await asyncio.wait([kept.task])

    def _later(self, kept: KeptStream, what: Callable[[], object]) -> None:
        if kept.timer is not None:
            kept.timer.cancel()
        kept.timer = asyncio.get_running_loop().call_later(self.kept_s, what)

    def _forget(self, kept: KeptStream) -> None:
        if kept.timer is not None:
            kept.timer.cancel()
        self._drop_events(kept)
        streams = self._of.get(kept.request.tenant.name, {})
        if streams.get(kept.stream_id) is kept:
            del streams[kept.stream_id]
            if not streams:
                del self._of[kept.request.tenant.name]

    def _drop_events(self, kept: KeptStream) -> None:
        self._num_entries -= kept.num_entries
        kept.num_entries, kept.events = 0, None
