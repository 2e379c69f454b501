"""The history of a router's requests, and the usage log for billing."""

from __future__ import annotations

import logging
import os
import queue
import select
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from datetime import UTC, datetime
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import InvalidArgument, NotFound
from batonlm.core.observe.request_record import RequestRecord
from batonlm.core.request.request import ChatPrompt, Request, TextPrompt, VectorPrompt
from batonlm.router.config import RouterConfig
from batonlm.router.observe.stage_timer import StageTimer
from batonlm.rpc.metrics import REGISTRY, Spec, counter

MAX_HISTORY = 1024
"""Most records of requests that are over. They fill MAX_HISTORY_BYTES in fleets of many workers."""

MAX_HISTORY_BYTES = 32 << 20
"""Most bytes of all kept records together."""


class RequestHistory:
    """The records of one router's requests.

    Admission bounds the running requests. Records of finished requests are kept in a ring that is
    bounded in count and in bytes, oldest dropped first.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        """max_requests: finished requests to keep; 0: no record is kept, not even while a request
        runs."""
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._running: dict[str, RequestRecord] = {}
        self._over: OrderedDict[str, RequestRecord] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._over)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the records of finished requests."""
        return self._bytes

    def begin(self, record: RequestRecord) -> None:
        if self._max_requests:
            self._running[record.request_id] = record

    def end(self, record: RequestRecord) -> None:
        """The request is over, and its record final."""
        if self._running.pop(record.request_id, None) is None:
            return
        self._over[record.request_id] = record
        self._bytes += record.size
        while len(self._over) > self._max_requests or self._bytes > self._max_bytes:
            _, oldest = self._over.popitem(last=False)
            self._bytes -= oldest.size

    def find(self, request_id: str, tenant: str | None) -> RequestRecord:
        """Returns a record. tenant: its required tenant; None: any. Raises NotFound, in the same
        way for another tenant's request as for an unknown one, so that ids of others cannot be
        probed."""
        record = self._running.get(request_id) or self._over.get(request_id)
        if record is None or tenant not in (None, record.tenant):
            raise NotFound("This router remembers no such request of yours.", field="request_id")
        return record


class UsageSink(Protocol):
    """Takes the record of each finished request that was admitted. Does not block."""

    def over(self, record: RequestRecord) -> None: ...


class Records:
    """The history of one router and its usage log. Requests that are not admitted leave no
    record."""

    def __init__(self, config: RouterConfig, usage: UsageSink | None = None) -> None:
        """usage: None: no usage log."""
        self._config = config
        self._usage = usage
        self.history = RequestHistory(MAX_HISTORY if config.timings else 0, MAX_HISTORY_BYTES)

    def begin(self, request: Request, request_id: str, stages: StageTimer) -> None:
        """A request was admitted. From now on its stages update its record."""
        # An explanation reveals more than timings do.
        if self._usage is None and not self._config.timings:
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
        """The request and its stages are over."""
        if stages.record is None:
            return
        self.history.end(stages.record)
        if self._usage is not None:
            self._usage.over(stages.record)

    def find(self, request_id: str, tenant: Tenant) -> RequestRecord:
        """Returns a tenant's own request, or any for an operator. Raises NotFound."""
        return self.history.find(request_id, None if tenant.operator else tenant.name)


def _asked(request: Request) -> str:
    match request.prompt:
        case ChatPrompt():
            return "chat"
        case TextPrompt():
            return "text"
        case VectorPrompt() as vectors:
            return "scores" if vectors.scores else "vectors"
        case _:
            return "tokens"


_encoder = msgspec.json.Encoder()


def usage_line(record: RequestRecord, router: str) -> bytes:
    """Returns the line of a finished request, with its newline. router: the instance id that served
    it.

    Times are seconds. first_token_s is null without any token, error is null on success;
    finish_reasons has one entry per choice, null for one that was cut off.
    """
    times = record.so_far(0.0)
    ended = datetime.fromtimestamp(record.arrived_at + times.total_s, UTC)
    ends = [choice.finish_reason for choice in record.choices]
    failure = record.failure
    return (
        _encoder.encode(
            {
                "time": ended.isoformat(timespec="milliseconds"),
                "request_id": record.request_id,
                "tenant": record.tenant,
                "model": record.model,
                "asked": record.asked,
                "priority": record.priority,
                "input_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "output_tokens": record.output_tokens,
                "choices": len(ends),
                "finish_reasons": [None if end is None else end.name.lower() for end in ends],
                "error": None if failure is None else failure.reason.name.lower(),
                "duration_s": round(times.total_s, 6),
                "first_token_s": round(times.first_token_s, 6) if record.output_tokens else None,
                "router": router,
            }
        )
        + b"\n"
    )


log = logging.getLogger(__name__)

USAGE_LINES = Spec(
    "baton_usage_lines_total", "Usage records of requests, by what became of them.", ("outcome",)
)
USAGE_FAILURES = Spec(
    "baton_usage_write_failures_total", "Tries to write usage records that failed."
)

STDOUT = "-"
MAX_WAITING = 8192
"""In lines of about 400 bytes each."""

MAX_AT_ONCE = 512
RETRY_S = 1.0
CLOSE_S = 2.0
_MODE = 0o640


class UsageLog:
    """Writes a JSON line for each finished request, and never waits for the disk. It must be
    closed.

    Lines go through a bounded queue to a thread that appends them. While the file cannot be
    written, the thread retries every RETRY_S with the lines it has; when the queue is full, lines
    are dropped and counted. The file may be renamed, removed, or copied and truncated to rotate it:
    before each write the thread checks whether the path still refers to the open file, so no signal
    is needed.
    """

    def __init__(
        self,
        path: str,
        router: str,
        *,
        max_waiting: int = MAX_WAITING,
        retry_s: float = RETRY_S,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """path: a file to append to, or "-" for standard output. router: written in each line.
        Raises InvalidArgument naming the option `usage_log` when the file cannot be opened."""
        self._path = path
        self._router = router
        self._retry_s = retry_s
        self._lines = counter(USAGE_LINES, registry)
        for outcome in ("written", "dropped"):
            # So that the first increment already shows in a rate.
            self._lines.labels(outcome)
        self._failures = counter(USAGE_FAILURES, registry)
        self._waiting: queue.Queue[bytes | None] = queue.Queue(max_waiting)
        self._failing = self._dropping = False
        self._closing = threading.Event()
        try:
            self._file = self._open()
        except OSError as error:
            raise InvalidArgument(f"{path}: {error.strerror}", field="usage_log") from None
        self._thread = threading.Thread(target=self._run, name="usage-log", daemon=True)
        self._thread.start()

    def over(self, record: RequestRecord) -> None:
        """Queues the line of a finished request; does not block."""
        try:
            self._waiting.put_nowait(usage_line(record, self._router))
        except queue.Full:
            self._lines.labels("dropped").inc()
            if not self._dropping:
                log.error("usage lines are dropped: %s takes them too slowly", self._path)
            self._dropping = True
        else:
            self._dropping = False

    def close(self) -> None:
        """Writes what is queued, for at most CLOSE_S; drops and counts the rest. Accepts no more
        lines."""
        self._closing.set()
        with suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        self._drop_rest()
        if not self._thread.is_alive() and self._path != STDOUT:
            os.close(self._file)

    def _run(self) -> None:
        while True:
            lines, last = self._take()
            if lines and not self._write(b"".join(lines)):
                self._lines.labels("dropped").inc(len(lines))
                log.error("%d usage lines could not be written before the end", len(lines))
                return
            self._lines.labels("written").inc(len(lines))
            if last:
                return

    def _drop_rest(self) -> None:
        left = 0
        with suppress(queue.Empty):
            while True:
                left += self._waiting.get_nowait() is not None
        if left:
            self._lines.labels("dropped").inc(left)
            log.error("%d usage lines could not be written before the end", left)

    def _take(self) -> tuple[list[bytes], bool]:
        """Returns at least one line, unless no more will follow, and whether these are the last."""
        found = [self._waiting.get()]
        while len(found) < MAX_AT_ONCE:
            try:
                found.append(self._waiting.get_nowait())
            except queue.Empty:
                break
        return [line for line in found if line is not None], None in found

    def _write(self, text: bytes) -> bool:
        """Retries until all is written; returns False when the log is closed meanwhile."""
        done = 0
        while done < len(text):
            try:
                if self._moved():
                    fresh = self._open()
                    os.close(self._file)
                    self._file = fresh
                    # The rest of a line would make no sense in another file.
                    done = text.rfind(b"\n", 0, done) + 1
                done += os.write(self._file, memoryview(text)[done : self._until(text, done)])
            except OSError as error:
                self._failures.inc()
                if not self._failing:
                    log.error("usage lines wait: %s: %s", self._path, error.strerror)
                self._failing = True
                if self._closing.wait(self._retry_s):
                    return False
        if self._failing:
            log.info("usage lines are written again")
        self._failing = False
        return True

    def _until(self, text: bytes, start: int) -> int:
        """Returns where a write from `start` ends. A pipe takes PIPE_BUF bytes at once; parts of
        longer writes would mix with those of other processes that write to it."""
        if self._path != STDOUT:
            return len(text)
        return text.rfind(b"\n", start, start + select.PIPE_BUF) + 1 or len(text)

    def _open(self) -> int:
        if self._path == STDOUT:
            return sys.stdout.fileno()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._path, flags, _MODE)

    def _moved(self) -> bool:
        """Whether the path refers to another file by now, or to none."""
        if self._path == STDOUT:
            return False
        here = os.fstat(self._file)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return True
        return (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)
