"""Responses that clients may come back to: by id, and as the beginning of the next one.

A store belongs to one process (`MemoryStore`) or is a file that the processes of one machine share
(`SqliteStore`). Both have the same bounds, and forget first what was not used for longest: of the
tenant whose share is full, or of all. Whoever names another tenant's response finds nothing.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from batonlm.core.errors import InvalidArgument, Unavailable

MAX_OF_TENANT = 4096
"""Responses that are stored of one tenant."""

TENANT_SHARE = 4
"""One tenant has this part of the bytes at most, so that a few busy ones do not push out all
others."""

LOCKED_S = 5.0
"""Seconds that a process waits for another one that writes the file."""

ANSWER_S = 10.0
"""Seconds in which a call has an answer, with those that wait before it."""

MAX_WAITING = 1024
"""Calls that wait for the file at a time."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    max_bytes: int = 64 << 20
    """Of all responses, with their input. 0: nothing is stored."""
    max_idle_s: float = 86_400.0
    """Seconds since its last use after which a response is forgotten."""

    @property
    def max_tenant_bytes(self) -> int:
        return self.max_bytes // TENANT_SHARE


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response: bytes
    """The document that clients get."""
    items: bytes
    """The items of its own input, a JSON array."""
    previous: str = ""
    """The id of the response that it follows, or empty."""
    runs_until: int = 0
    """While it runs in the background: when it has ended at the latest, in seconds since 1970. 0:
    it is over."""

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items)


class Dropped(StrEnum):
    """Why a response is not stored any more, or never was, but for those that clients delete."""

    IDLE = "idle"
    """Nobody used it for so long."""
    TENANT_SHARE = "tenant_share"
    """Its tenant's share was full."""
    ALL_SHARES = "all_shares"
    """All tenants together had too much."""
    TOO_LARGE = "too_large"
    """It is larger than a tenant's share."""
    FAILED = "failed"
    """The store did not answer."""


class ResponseStore(Protocol):
    limits: StoreLimits
    shared: bool
    """Whether other processes use it, too."""
    dropped: Counter[Dropped]
    """By this process."""

    def held(self) -> tuple[int, int]:
        """Returns how many responses are stored, and their bytes. May be called on any thread."""

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None: ...

    async def chain(self, tenant: str, response_id: str) -> list[StoredResponse]:
        """Returns a response and those that it follows, newest first, as far as they are there."""

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Stores a new response, or nothing if it is larger than a tenant's share."""

    async def end(self, tenant: str, response_id: str, response: bytes) -> bool:
        """Ends a response that runs, unless it was deleted or has ended; returns whether it did.
        response: its last document."""

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Returns whether there was one."""

    async def close(self) -> None: ...


def _chain(get: Callable[[str], StoredResponse | None], response_id: str) -> list[StoredResponse]:
    found = list[StoredResponse]()
    while response_id and len(found) < MAX_OF_TENANT and (stored := get(response_id)) is not None:
        found.append(stored)
        response_id = stored.previous
    return found


class MemoryStore(ResponseStore):
    """Responses of this process, which are lost with it."""

    shared = False

    def __init__(
        self, limits: StoreLimits = StoreLimits(), now: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self.dropped = Counter()
        self._now = now
        self._all: OrderedDict[tuple[str, str], tuple[StoredResponse, float]] = OrderedDict()
        """With the time of the last use, which is also the order."""
        self._of: dict[str, OrderedDict[str, int]] = {}
        """Sizes by tenant, in the same order."""
        self._tenant_bytes: dict[str, int] = {}
        self._bytes = 0

    def held(self) -> tuple[int, int]:
        return len(self._all), self._bytes

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        return self._get(tenant, response_id)

    def _get(self, tenant: str, response_id: str) -> StoredResponse | None:
        self._forget_idle()
        found = self._all.get((tenant, response_id))
        if found is None:
            return None
        self._all[tenant, response_id] = found[0], self._now()
        self._all.move_to_end((tenant, response_id))
        self._of[tenant].move_to_end(response_id)
        return found[0]

    async def chain(self, tenant: str, response_id: str) -> list[StoredResponse]:
        return _chain(lambda each: self._get(tenant, each), response_id)

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        self._put(tenant, response_id, stored)

    async def end(self, tenant: str, response_id: str, response: bytes) -> bool:
        self._forget_idle()
        found = self._all.get((tenant, response_id))
        if found is None or not found[0].runs_until:
            return False
        self._put(tenant, response_id, replace(found[0], response=response, runs_until=0))
        return True

    async def delete(self, tenant: str, response_id: str) -> bool:
        self._forget_idle()
        return self._drop(tenant, response_id)

    async def close(self) -> None:
        return

    def _put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        self._drop(tenant, response_id)
        self._forget_idle()
        limits, size = self.limits, stored.size
        if size > limits.max_tenant_bytes:
            self.dropped[Dropped.TOO_LARGE] += 1
            return
        own: Mapping[str, int] = self._of.get(tenant, {})
        while own and (
            len(own) >= MAX_OF_TENANT or self._tenant_bytes[tenant] + size > limits.max_tenant_bytes
        ):
            self._drop(tenant, next(iter(own)))
            self.dropped[Dropped.TENANT_SHARE] += 1
        while self._bytes + size > limits.max_bytes:
            self._drop(*next(iter(self._all)))
            self.dropped[Dropped.ALL_SHARES] += 1
        self._all[tenant, response_id] = stored, self._now()
        self._of.setdefault(tenant, OrderedDict())[response_id] = size
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + size
        self._bytes += size

    def _forget_idle(self) -> None:
        last = self._now() - self.limits.max_idle_s
        while self._all and next(iter(self._all.values()))[1] < last:
            self._drop(*next(iter(self._all)))
            self.dropped[Dropped.IDLE] += 1

    def _drop(self, tenant: str, response_id: str) -> bool:
        if self._all.pop((tenant, response_id), None) is None:
            return False
        size = self._of[tenant].pop(response_id)
        self._bytes -= size
        self._tenant_bytes[tenant] -= size
        if not self._of[tenant]:
            del self._of[tenant], self._tenant_bytes[tenant]
        return True


P = ParamSpec("P")
T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    tenant TEXT NOT NULL, id TEXT NOT NULL, previous TEXT NOT NULL, runs_until INTEGER NOT NULL,
    used REAL NOT NULL, size INTEGER NOT NULL, response BLOB NOT NULL, items BLOB NOT NULL,
    PRIMARY KEY (tenant, id)
);
CREATE INDEX IF NOT EXISTS by_tenant ON responses (tenant, used, size);
CREATE INDEX IF NOT EXISTS by_use ON responses (used, size);
"""
_HELD = "count(*), coalesce(sum(size), 0)"


class SqliteStore(ResponseStore):
    """Responses in a file, which outlives its processes. They run on one machine: SQLite's log of
    writes is in memory that they share.

    One thread of its own reads and writes; a call that finds the file locked for LOCKED_S, or has
    no answer within ANSWER_S, raises Unavailable.
    """

    shared = True

    def __init__(
        self, path: str, limits: StoreLimits = StoreLimits(), now: Callable[[], float] = time.time
    ) -> None:
        """Raises InvalidArgument naming the option `responses_file`."""
        self.limits = limits
        self.dropped = Counter()
        self._now = now
        self._num_waiting = 0
        self._held = 0, 0
        self._looking = threading.Lock()
        """Of `held`, which threads may call at once."""
        try:
            # Conversations are nobody else's to read.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._base = self._opened(path)
            self._view = sqlite3.connect(path, timeout=0.0, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise InvalidArgument(f"{path}: {error}", field="responses_file") from None
        self._thread = ThreadPoolExecutor(1, "responses")

    @staticmethod
    def _opened(path: str) -> sqlite3.Connection:
        base = sqlite3.connect(
            path, timeout=LOCKED_S, isolation_level=None, check_same_thread=False
        )
        # Before the first table, else it has no effect.
        base.execute("PRAGMA auto_vacuum=INCREMENTAL")
        base.execute("PRAGMA journal_mode=WAL")
        # A crash of the machine may lose the newest responses, and no older ones.
        base.execute("PRAGMA synchronous=NORMAL")
        base.executescript(_SCHEMA)
        return base

    def held(self) -> tuple[int, int]:
        with self._looking, suppress(sqlite3.Error):
            self._held = self._view.execute(f"SELECT {_HELD} FROM responses").fetchone()
        return self._held

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        return await self._run(SqliteStore._get, tenant, response_id)

    async def chain(self, tenant: str, response_id: str) -> list[StoredResponse]:
        return await self._run(SqliteStore._chain, tenant, response_id)

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        await self._run(SqliteStore._put, tenant, response_id, stored)

    async def end(self, tenant: str, response_id: str, response: bytes) -> bool:
        return await self._run(SqliteStore._end, tenant, response_id, response)

    async def delete(self, tenant: str, response_id: str) -> bool:
        return await self._run(SqliteStore._delete, tenant, response_id)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        self._base.close()
        with self._looking:
            self._view.close()

    async def _run(
        self,
        work: Callable[Concatenate[SqliteStore, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        def run() -> T:
            base = self._base
            base.execute("BEGIN IMMEDIATE")
            try:
                idle = (self._now() - self.limits.max_idle_s,)
                gone = base.execute("DELETE FROM responses WHERE used < ?", idle).rowcount
                found = work(self, *args, **kwargs)
                base.execute("COMMIT")
            except BaseException:
                # SQLite may have ended the transaction itself. One that stayed open, as when the
                # disk is full at its end, would let no other one begin.
                if base.in_transaction:
                    base.execute("ROLLBACK")
                raise
            self.dropped[Dropped.IDLE] += gone
            return found

        if self._num_waiting >= MAX_WAITING:
            raise _unusable("too many calls wait for them")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except TimeoutError:
            raise _unusable("they do not answer") from None
        except sqlite3.Error as error:
            raise _unusable(str(error)) from error
        finally:
            self._num_waiting -= 1

    def _get(self, tenant: str, response_id: str) -> StoredResponse | None:
        where, now = (tenant, response_id), self._now()
        row = self._base.execute(
            "SELECT response, items, previous, runs_until FROM responses"
            " WHERE tenant = ? AND id = ?",
            where,
        ).fetchone()
        if row is None:
            return None
        self._base.execute(
            "UPDATE responses SET used = ? WHERE tenant = ? AND id = ?", (now, *where)
        )
        return StoredResponse(*row)

    def _chain(self, tenant: str, response_id: str) -> list[StoredResponse]:
        return _chain(lambda each: self._get(tenant, each), response_id)

    def _put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        self._delete(tenant, response_id)
        limits, now = self.limits, self._now()
        if stored.size > limits.max_tenant_bytes:
            self.dropped[Dropped.TOO_LARGE] += 1
            return
        most_bytes = limits.max_tenant_bytes - stored.size
        gone = self._make_room("tenant = ?", (tenant,), most_bytes)
        self.dropped[Dropped.TENANT_SHARE] += gone
        gone = self._make_room("TRUE", (), limits.max_bytes - stored.size)
        self.dropped[Dropped.ALL_SHARES] += gone
        self._base.execute(
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(tenant, response_id, stored.previous, stored.runs_until),
                *(now, stored.size, stored.response, stored.items),
            ),
        )
        self._base.execute("PRAGMA incremental_vacuum").fetchall()

    def _make_room(self, where: str, given: tuple[str, ...], most_bytes: int) -> int:
        """Forgets those that were not used for longest, of a tenant or of all. Returns how many."""
        query = f"SELECT {_HELD} FROM responses WHERE {where}"
        count, size = self._base.execute(query, given).fetchone()
        query = f"SELECT rowid, size FROM responses WHERE {where} ORDER BY used"
        gone = []
        for row, freed in self._base.execute(query, given):
            if size <= most_bytes and (not given or count < MAX_OF_TENANT):
                break
            gone.append((row,))
            count, size = count - 1, size - freed
        self._base.executemany("DELETE FROM responses WHERE rowid = ?", gone)
        return len(gone)

    def _end(self, tenant: str, response_id: str, response: bytes) -> bool:
        query = (
            "SELECT items, previous FROM responses WHERE tenant = ? AND id = ? AND runs_until > 0"
        )
        row = self._base.execute(query, (tenant, response_id)).fetchone()
        if row is not None:
            self._put(tenant, response_id, StoredResponse(response, *row))
        return row is not None

    def _delete(self, tenant: str, response_id: str) -> bool:
        query = "DELETE FROM responses WHERE tenant = ? AND id = ?"
        return self._base.execute(query, (tenant, response_id)).rowcount > 0


def _unusable(why: str) -> Unavailable:
    return Unavailable(f"The stored responses cannot be used now: {why}.", retry_after_s=1.0)
