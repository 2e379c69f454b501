"""StoreTier: sealed units in an object store that speaks the S3 protocol, shared by workers.

PREFIX/fingerprint/namespace/unit. What other workers wrote is found when it is looked for. Of all
such objects, whoever wrote them, the oldest goes when there is too much; each worker looks now and
then. Others below the prefix are left alone. An object's age counts from when it was written,
because the protocol has no later use of it. What is used and was deleted is written again when it
is next evicted from a pool.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from batonlm.core.kvcache.cache_events import OnChange
from batonlm.core.kvcache.prefix import UnitName
from batonlm.core.kvcache.tier_index import TierIndex, ignore
from batonlm.registry.object_store import client_of, place_of
from batonlm.worker.tiers.places import leading

T = TypeVar("T")

ASKED_AT_ONCE = 8
"""Units of one prefix."""

SWEEP_S = 600.0
"""A worker looks for what is too much half to one and a half times so often."""
SWEEP_TO = 0.9
"""A sweep leaves so much of what may be kept."""

MISS_S = 10.0
"""A unit that was not there is not asked for again for so long."""
MAX_MISSES = 4096


_OURS = re.compile(r"[0-9a-f]{32}/[0-9a-f]{32}/[0-9a-f]{32}")


class StoreTier:
    """See `places.Tier`."""

    lasts, remote = True, True

    def __init__(
        self,
        name: str,
        url: str,
        fingerprint: str,
        max_bytes: int,
        object_bytes: int,
        *,
        report: OnChange = ignore,
    ) -> None:
        """object_bytes: of every object. report: of its index. Raises InvalidArgument for what is
        no URL, and ModuleNotFoundError without the client."""
        self.name = name
        self.index = TierIndex(max_bytes, report=report)
        """What this process wrote or read, as far as it is still there."""
        self._fingerprint, self._object_bytes = fingerprint, object_bytes
        bucket, prefix = place_of(url, "prefix_store")
        # Whoever waits could compute instead, so nothing is tried for long.
        self._client = client_of(bucket, prefix, timeout_s=5, connect_s=2, retries=1)
        self._missing: OrderedDict[bytes, float] = OrderedDict()
        self._sweeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Looks for what is too much, from now on."""
        self._sweeping = asyncio.create_task(self._sweep_often())

    async def locate(self, names: Sequence[UnitName]) -> int:
        count = leading(names, self.index)
        at_once = 1
        while count < len(names) and not self._was_missing(names[count]):
            asked = names[count : count + at_once]
            there = await asyncio.gather(*map(self._is_there, asked))
            found = next((i for i, yes in enumerate(there) if not yes), len(asked))
            count += found
            if found < len(asked):
                self._missing[names[count].unit] = time.monotonic()
                while len(self._missing) > MAX_MISSES:
                    self._missing.popitem(last=False)
                break
            at_once = ASKED_AT_ONCE
        return count

    async def read(self, name: UnitName) -> memoryview | None:
        import obstore

        async def get() -> memoryview | None:
            found = await obstore.get_async(self._client, self._path(name))
            if found.meta["size"] != self._object_bytes:
                # As much of it as shows that it is torn.
                return memoryview(b"")
            return memoryview(await found.bytes_async())

        sealed = await _asked(get)
        if sealed is None:
            self.index.remove(name.unit)
        else:
            self._know(name)
        return sealed

    async def write(self, name: UnitName, sealed: memoryview) -> None:
        import obstore

        if name.unit in self.index:
            return
        if not await self._is_there(name):

            async def put() -> bool:
                await obstore.put_async(self._client, self._path(name), bytes(sealed))
                return True

            await _asked(put)
        self._missing.pop(name.unit, None)
        self._know(name)

    async def delete(self, name: UnitName) -> None:
        self.index.remove(name.unit)
        await self._delete([self._path(name)])

    async def sweep(self) -> None:
        """Deletes the oldest objects if there are too many bytes. Raises OSError."""
        import obstore

        def look() -> list[tuple[Any, str, int]]:
            return [
                (meta["last_modified"], meta["path"], meta["size"])
                for part in obstore.list(self._client)
                for meta in part
                if _OURS.fullmatch(meta["path"])
            ]

        async def listed() -> list[tuple[Any, str, int]]:
            return await asyncio.to_thread(look)

        known = list(self.index)
        found = sorted(await _asked(listed) or [])
        num_bytes = sum(size for *_, size in found)
        gone = []
        if num_bytes > self.index.max_bytes:
            for _, path, size in found:
                if num_bytes <= SWEEP_TO * self.index.max_bytes:
                    break
                gone.append(path)
                num_bytes -= size
        if gone:
            await self._delete(gone)
        left = {path for _, path, _ in found[len(gone) :]}
        for name in known:
            if self._path(name) not in left:
                self.index.remove(name.unit)

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait({self._sweeping})

    async def _sweep_often(self) -> None:
        while True:
            # Not all workers at once, nor one that starts again and again each time.
            await asyncio.sleep(SWEEP_S * random.uniform(0.5, 1.5))
            with suppress(OSError):
                await self.sweep()

    def _know(self, name: UnitName) -> None:
        if name.unit not in self.index:
            # What this process does not know of any more stays there until a sweep.
            self.index.add(name, self._object_bytes)

    def _was_missing(self, name: UnitName) -> bool:
        return time.monotonic() - self._missing.get(name.unit, -MISS_S) < MISS_S

    async def _is_there(self, name: UnitName) -> bool:
        import obstore

        async def head() -> bool:
            await obstore.head_async(self._client, self._path(name))
            return True

        return name.unit in self.index or bool(await _asked(head))

    async def _delete(self, paths: list[str]) -> None:
        import obstore

        async def delete() -> None:
            await obstore.delete_async(self._client, paths)

        await _asked(delete)

    def _path(self, name: UnitName) -> str:
        return f"{self._fingerprint}/{name.namespace.hex()}/{name.unit.hex()}"


async def _asked(ask: Callable[[], Awaitable[T]]) -> T | None:
    """What the store answers; None for what is not there. Raises OSError for all else."""
    from obstore.exceptions import BaseError

    try:
        return await ask()
    except FileNotFoundError:
        return None
    except (BaseError, ValueError) as error:
        raise OSError(f"the object store does not answer as it should: {error}") from error
