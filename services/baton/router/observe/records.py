"""Records, what a router remembers of its requests and tells of their use."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Protocol

from baton.core.admission.tenants import Tenant
from baton.core.errors import NotFound
from baton.core.observe.request_record import RequestRecord
from baton.core.request.request import ChatPrompt, Request, TextPrompt
from baton.router.config import RouterConfig
from baton.router.observe.stage_timer import StageTimer

# RequestHistory, what one router remembers of its requests.
#
# Running requests are bounded by whoever lets them in. Those that are over are kept in a ring, with
# a bound in count and in bytes: the oldest one goes first.


class RequestHistory:
    """max_requests: that are over; 0: none is remembered at all, not while it runs either."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._running: dict[str, RequestRecord] = {}
        self._over: OrderedDict[str, RequestRecord] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._over)

    @property
    def kept_bytes(self) -> int:
        """Of those that are over."""
        return self._bytes

    def begin(self, record: RequestRecord) -> None:
        if self._max_requests:
            self._running[record.request_id] = record

    def end(self, record: RequestRecord) -> None:
        """It is over, and will not change any more."""
        if self._running.pop(record.request_id, None) is None:
            return
        self._over[record.request_id] = record
        self._bytes += record.size
        while len(self._over) > self._max_requests or self._bytes > self._max_bytes:
            _, oldest = self._over.popitem(last=False)
            self._bytes -= oldest.size

    def find(self, request_id: str, tenant: str | None) -> RequestRecord:
        """tenant: whose it has to be; None: anybody's. Raises NotFound, of another tenant's request
        as of one that never was: nobody learns which ids others have."""
        record = self._running.get(request_id) or self._over.get(request_id)
        if record is None or tenant not in (None, record.tenant):
            raise NotFound("This router remembers no such request of yours.", field="request_id")
        return record


class UsageSink(Protocol):
    """Takes a record of each request that was let in and is over. Returns at once."""

    def over(self, record: RequestRecord) -> None: ...


class Records:
    """One per router. usage: None: nobody bills. Requests that are not let in leave no record."""

    def __init__(self, config: RouterConfig, usage: UsageSink | None = None) -> None:
        self._config = config
        self._usage = usage
        self.history = RequestHistory(config.num_remembered, config.request_history_bytes)

    def begin(self, request: Request, request_id: str, stages: StageTimer) -> None:
        """A request was let in; from now on its stages tell its record too."""
        if self._usage is None and not self._config.num_remembered:
            return
        stages.record = RequestRecord(
            request_id=request_id,
            tenant=request.tenant.name,
            arrived_at=time.time(),
            asked=_asked(request),
            priority=request.priority,
            policy=self._config.routing,
            split=bool(self._config.prefills),
            clock=stages,
            model=request.model,
        )
        self.history.begin(stages.record)

    def end(self, stages: StageTimer) -> None:
        """The request is over, and its stages know."""
        if stages.record is None:
            return
        self.history.end(stages.record)
        if self._usage is not None:
            self._usage.over(stages.record)

    def find(self, request_id: str, tenant: Tenant) -> RequestRecord:
        """A tenant's own request, or an operator's any. Raises NotFound."""
        return self.history.find(request_id, None if tenant.operator else tenant.name)


def _asked(request: Request) -> str:
    match request.prompt:
        case ChatPrompt():
            return "chat"
        case TextPrompt():
            return "text"
        case _:
            return "tokens"
