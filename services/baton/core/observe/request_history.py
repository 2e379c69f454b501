"""RequestHistory, what one router remembers of its requests; knows no clock and no wire.

Running requests are bounded by whoever lets them in. Those that are over are kept in a ring, with a
bound in count and in bytes: the oldest one goes first.
"""

from __future__ import annotations

from collections import OrderedDict

from baton.core.errors import NotFound
from baton.core.observe.request_record import RequestRecord


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
