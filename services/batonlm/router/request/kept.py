"""Streams that several calls may read: their events are kept while they run, and a little longer.

A request whose events have ids, or that has an idempotency key, runs in a task of its own, and its
client reads what is kept of its events. So another call of the same tenant that names the stream
reads it, too, from its beginning. A run that nobody reads ends after a while.

What does not fit into the bounds is not kept, and the tenant that holds most is the first to lose
something. Nothing depends on it: such a request can be run again with the same seed, here or at
another router (`core.request.resumption`). A run whose events are not kept waits for its readers,
as one without ids of events waits for its client.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
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

MAX_READERS = 16
"""Calls that read one stream."""

MAX_READERS_OF_TENANT = 256
"""Calls that read one tenant's kept streams."""

MAX_BEHIND = 1024
"""Entries that a reader of a run whose events are not kept may have before it."""


class KeyReused(InvalidArgument):
    """An idempotency key was sent with another request than before."""


class StillRunning(Unavailable):
    """The request with this idempotency key runs, and its beginning is not kept any more."""


def _entries(event: Event) -> int:
    """Returns how much an event counts."""
    if not isinstance(event, Delta):
        return 0
    return len(event.token_ids) + sum(1 + len(each.top) for each in event.logprobs)


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
        self.read_on = asyncio.Event()
        """Set when a reader has read, or left."""
        self.stream: EventStream | None = None
        """The run's own, once it has workers."""
        self.opened = asyncio.Event()
        """Set when it has workers, or has failed."""
        self.failure: BaseException | None = None
        self.over = False
        self.left = False
        """Whether it ends with its last reader, at once."""
        self.task: asyncio.Task[None]
        self.timer: asyncio.TimerHandle | None = None
        """Ends a run without readers, or forgets one that is over and has none."""

    def is_of(self, request: Request) -> bool:
        """Whether a request would run the same."""
        return _as_run(self.request) == _as_run(request)

    def drop_events(self) -> None:
        """From now on each reader has what it has not read yet. One that has too much of it ends,
        because that would not be counted."""
        events, self.events, self.num_entries = self.events, None, 0
        for reader in self.readers if events is not None else ():
            reader.take_rest(events or ())

    @property
    def holds_up(self) -> bool:
        """Whether a reader has so much before it that the run should wait."""
        return any(reader.num_behind > MAX_BEHIND for reader in self.readers)

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

    def __init__(self, kept: KeptStream, leave: Callable[[KeptStream], Awaitable[None]]) -> None:
        """leave: called when it is closed."""
        self.kept = kept
        self.num_behind = 0
        """Entries of what it has before it and the kept stream does not have."""
        self.news = asyncio.Event()
        self._num_read = 0
        self._rest: deque[Event] = deque()
        """What it has before it, once that is not kept."""
        self._failure: BatonError | None = None
        self._leave = leave
        self._closed = False
        kept.readers.add(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while (event := self._next()) is None:
            if self._closed:
                raise StopAsyncIteration
            failure = self._failure or self.kept.failure
            if self.kept.over or failure is not None:
                self._closed = True
                raise failure or StopAsyncIteration
            self.news.clear()
            await self.news.wait()
        return event

    def _next(self) -> Event | None:
        if self._closed:
            return None
        if self.kept.events is None:
            if not self._rest:
                return None
            event = self._rest.popleft()
            self.num_behind -= _entries(event)
            self.kept.read_on.set()
            return event
        if self._num_read == len(self.kept.events):
            return None
        self._num_read += 1
        return self.kept.events[self._num_read - 1]

    def take_rest(self, events: Sequence[Event]) -> None:
        """The events are not kept any more."""
        rest = events[self._num_read :]
        self.num_behind = sum(map(_entries, rest))
        if self.num_behind <= MAX_BEHIND:
            self._rest.extend(rest)
            return
        self.num_behind = 0
        self._failure = Overloaded(
            "This stream is read too slowly to be kept. Send its request again, with the id of the "
            "last event where events have ids."
        )
        self.news.set()

    def add(self, event: Event) -> None:
        """An event that is not kept."""
        if self._failure is None:
            self._rest.append(event)
            self.num_behind += _entries(event)

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
        self._rest.clear()
        self.news.set()
        if self in self.kept.readers:
            self.kept.readers.discard(self)
            self.kept.read_on.set()
            await self._leave(self.kept)


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
        most_readers: int = MAX_READERS,
        most_readers_of_tenant: int = MAX_READERS_OF_TENANT,
    ) -> None:
        """start: `Pipeline.open`. background: see the attribute. left: the failure of a run that
        this ends. most_of_tenant: 0: nothing is kept."""
        self.kept_s = kept_s
        self._start = start
        self.background = background
        """Runs a task that the pipeline's end cancels."""
        self._left = left
        self._most_of_tenant = most_of_tenant
        self._most_entries = most_entries
        self._most_readers = most_readers
        self._most_readers_of_tenant = most_readers_of_tenant
        self._num_entries: Counter[str] = Counter()
        """By tenant."""
        self._draining = False
        self._running: set[KeptStream] = set()
        self._holding: dict[KeptStream, None] = {}
        """Those whose events are kept, oldest first. One that failed is among them while it has
        readers, but not in `_of`."""
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
                self._check_readers(kept)
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
                raise Overloaded(
                    "Too many requests in the background or with an Idempotency-Key run."
                )
            return await self._start(request, holding)
        kept = KeptStream(request, view)
        if stream_id:
            self._of.setdefault(name, {})[stream_id] = kept
        self._holding[kept] = None
        kept.task = self.background(self._run(kept, holding))
        self._running.add(kept)
        kept.task.add_done_callback(lambda _: self._running.discard(kept))
        self._count(kept, prompt_bounds(request.prompt)[2] // ENTRY_BYTES)
        return await self._read(kept)

    async def leave(self, tenant: Tenant, stream_id: str) -> None:
        """Nobody comes back to a stream, if it is here: it ends with its last reader, at once."""
        kept = self._of.get(tenant.name, {}).get(stream_id)
        if kept is not None:
            kept.left = True
            await self._read_by(kept)

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

    def _check_readers(self, kept: KeptStream) -> None:
        """Raises Overloaded where no more calls may read a stream."""
        if len(kept.readers) >= self._most_readers:
            raise Overloaded("Too many calls read this stream.")
        streams = self._of[kept.request.tenant.name].values()
        if sum(len(each.readers) for each in streams) >= self._most_readers_of_tenant:
            raise Overloaded("Too many calls read streams that are kept.")

    async def _read(self, kept: KeptStream) -> EventStream:
        """Returns a reader when the run has workers. Raises BatonError when it fails earlier."""
        if kept.timer is not None:
            kept.timer.cancel()
        reader = StreamReader(kept, self._read_by)
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
                    while kept.events is None and kept.holds_up:
                        kept.read_on.clear()
                        await kept.read_on.wait()
            finally:
                await stream.aclose()
        except asyncio.CancelledError:
            failure = self._left()
            raise
        except Exception as error:
            # Its readers raise it.
            failure = error
        finally:
            kept.end(failure)
            if failure is not None:
                self._take_out(kept)
            if not kept.readers:
                self._forget_later(kept)

    def _add(self, kept: KeptStream, event: Event) -> None:
        if isinstance(event, Accepted) and not kept.stream_id:
            name = kept.request.tenant.name
            kept.stream_id = kept.request.stream_id(event.request_id)
            if self._has_room(name):
                self._of.setdefault(name, {})[kept.stream_id] = kept
            else:
                # As many others have begun while this one waited for workers.
                self._drop_events(kept)
        if kept.events is not None:
            kept.events.append(event)
            self._count(kept, _entries(event))
        else:
            for reader in kept.readers:
                reader.add(event)
        for reader in kept.readers:
            reader.news.set()

    def _count(self, kept: KeptStream, entries: int) -> None:
        """A running stream takes so many entries more."""
        kept.num_entries += entries
        held = self._num_entries
        held[kept.request.tenant.name] += entries
        while held.total() > self._most_entries:
            self._take_from(max(held, key=held.__getitem__))

    def _take_from(self, tenant: str) -> None:
        """Forgets the tenant's oldest ended stream, at first one that nobody reads; where none has
        ended, the events of its largest one."""

        def order(kept: KeptStream) -> tuple[bool, bool, int]:
            if kept.over:
                return False, bool(kept.readers), 0
            return True, False, -kept.num_entries

        own = [kept for kept in self._holding if kept.request.tenant.name == tenant]
        first = min(own, key=order)
        if first.over:
            self._forget(first)
        else:
            self._drop_events(first)

    def _has_room(self, tenant: str) -> bool:
        """Whether one more stream of a tenant may be kept. Forgets an ended one for it."""
        if len(self._of.get(tenant, ())) >= self._most_of_tenant:
            for kept in self._ended(tenant):
                if not kept.readers:
                    self._forget(kept)
                    break
        return len(self._of.get(tenant, ())) < self._most_of_tenant

    def _ended(self, tenant: str) -> Iterator[KeptStream]:
        return (kept for kept in [*self._of.get(tenant, {}).values()] if kept.over)

    async def _read_by(self, kept: KeptStream) -> None:
        """Its readers have changed: one that nobody reads ends, or is forgotten, after a while."""
        if kept.readers:
            return
        if kept.over:
            self._forget_later(kept)
        elif kept.events is not None and self.kept_s and not (self._draining or kept.left):
            self._later(kept, lambda: kept.task.cancel())
        else:
            kept.task.cancel()
            await asyncio.wait([kept.task])

    def _forget_later(self, kept: KeptStream) -> None:
        """A stream that is over has no readers."""
        if kept.failure is not None or kept.left or kept.events is None:
            self._forget(kept)
        else:
            self._later(kept, lambda: self._forget(kept))

    def _later(self, kept: KeptStream, what: Callable[[], object]) -> None:
        if kept.timer is not None:
            kept.timer.cancel()
        kept.timer = asyncio.get_running_loop().call_later(self.kept_s, what)

    def _forget(self, kept: KeptStream) -> None:
        if kept.timer is not None:
            kept.timer.cancel()
        self._drop_events(kept)
        self._take_out(kept)

    def _take_out(self, kept: KeptStream) -> None:
        """Nobody finds the stream any more."""
        streams = self._of.get(kept.request.tenant.name, {})
        if streams.get(kept.stream_id) is kept:
            del streams[kept.stream_id]
            if not streams:
                del self._of[kept.request.tenant.name]

    def _drop_events(self, kept: KeptStream) -> None:
        held, tenant = self._num_entries, kept.request.tenant.name
        held[tenant] -= kept.num_entries
        if not held[tenant]:
            del held[tenant]
        self._holding.pop(kept, None)
        kept.drop_events()
