"""Where sealed units are kept: MemoryTier and FolderTier.

A tier knows names, sizes and bytes; whether bytes are worth anything is for whoever reads them to
find out. Its index belongs to the event loop, files to its own threads.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from batonlm.core.kvcache.cache_events import OnChange
from batonlm.core.kvcache.prefix import HASH_BYTES, UnitName
from batonlm.core.kvcache.tier_index import TierIndex, ignore
from batonlm.transfer.kv_chunk import HEADER_BYTES, header_in

T = TypeVar("T")

THREADS = 4
"""Of a tier: files that are read or written at once."""

RESCAN_S = 300.0
"""A folder is read again so often, for what other processes wrote into it or deleted."""

STALE_S = 3600.0
"""A file that is still not complete after so long never will be."""

SCANNED_AT_ONCE = 256
"""Files that are put into the index before the event loop does something else."""

SUFFIX = ".kv"
_PARTIAL = ".part"
_HASH = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")
"""A fingerprint, a namespace or a unit."""
_WRITTEN = re.compile(rf"{_HASH.pattern}{re.escape(SUFFIX)}")
_BEGUN = re.compile(rf"\.{_HASH.pattern}\.[0-9a-f]+{re.escape(_PARTIAL)}")

_NO_UNIT = memoryview(b"")
"""What is read where something else lies: it does not verify, as what is torn."""


class Tier(Protocol):
    """One place for sealed units."""

    name: str
    """As metrics and cache events call it."""
    lasts: bool
    """Whether what it keeps is there after the end of this process."""
    remote: bool
    """Whether units may be in it that this process has not seen."""
    index: TierIndex
    """What is known to be in it."""

    async def locate(self, names: Sequence[UnitName]) -> int:
        """How many of these units, from the first one on, are there without a gap. Raises
        OSError."""

    async def read(self, name: UnitName) -> memoryview | None:
        """A sealed unit; None when it is not there. Raises OSError."""

    async def write(self, name: UnitName, sealed: memoryview) -> None:
        """Keeps a sealed unit, unless it is there already, and deletes what has to go for it.
        Raises OSError."""

    async def delete(self, name: UnitName) -> None:
        """Nothing when it is not there. Raises OSError."""

    async def close(self) -> None: ...


def leading(names: Sequence[UnitName], index: TierIndex) -> int:
    """How many of these units, from the first one on, an index has."""
    return next((i for i, name in enumerate(names) if name.unit not in index), len(names))


class MemoryTier:
    """Host memory of this process."""

    name, lasts, remote = "host", False, False

    def __init__(self, max_bytes: int, report: OnChange = ignore) -> None:
        self.index = TierIndex(max_bytes, report=report)
        self._sealed: dict[bytes, memoryview] = {}

    async def locate(self, names: Sequence[UnitName]) -> int:
        return leading(names, self.index)

    async def read(self, name: UnitName) -> memoryview | None:
        return self._sealed.get(name.unit)

    async def write(self, name: UnitName, sealed: memoryview) -> None:
        if name.unit in self.index:
            return
        self._sealed[name.unit] = sealed
        for gone in self.index.add(name, len(sealed)):
            del self._sealed[gone.unit]

    async def delete(self, name: UnitName) -> None:
        self.index.remove(name.unit)
        self._sealed.pop(name.unit, None)

    async def close(self) -> None:
        self._sealed.clear()


@dataclass(slots=True)
class _Found:
    """What a folder has."""

    new: list[tuple[float, UnitName]] = field(default_factory=list)
    """By time of last use."""
    units: set[bytes] = field(default_factory=set)
    """All of this kind of worker."""
    others: list[tuple[float, Path, int]] = field(default_factory=list)
    """Files of other kinds of workers, with their sizes."""


class FolderTier:
    """A folder, of a local disk or of a file system that workers share.

    FOLDER/fingerprint/namespace/unit.kv, so that a worker only ever looks at KV that it could have
    computed itself. A file appears under its name when it is complete. Recency is the time of its
    last modification, which every use renews, so it outlives this process. Files of other
    fingerprints count, and go first when there is too much. Whatever else is in the folder, by its
    name, is left alone, and links are not followed.
    """

    lasts = True

    def __init__(
        self,
        name: str,
        folder: Path,
        fingerprint: str,
        max_bytes: int,
        file_bytes: int,
        *,
        remote: bool = False,
        report: OnChange = ignore,
    ) -> None:
        """file_bytes: of every file, all units are of one size. report: of its index. Raises
        OSError for a folder that cannot be made. `start` reads what is in it."""
        self.name, self.remote = name, remote
        self.index = TierIndex(max_bytes, report=report)
        self._root, self._folder = folder, folder / fingerprint
        self._file_bytes = file_bytes
        self._others: list[tuple[float, Path, int]] = []
        """Newest first."""
        self._other_bytes = 0
        self._writer = secrets.token_hex(8)
        """In names of incomplete files. Writers in other containers may have this process's id."""
        self._threads = ThreadPoolExecutor(THREADS, f"kv-{name}")
        self._scanning: asyncio.Task[None] | None = None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def start(self) -> None:
        """What is in the folder becomes known a little later, and again from time to time."""
        self._scanning = asyncio.create_task(self._scan_often())

    async def locate(self, names: Sequence[UnitName]) -> int:
        count = leading(names, self.index)
        if not self.remote or count == len(names):
            return count
        return count + await self._run(self._count_files, names[count:])

    async def read(self, name: UnitName) -> memoryview | None:
        sealed = await self._run(self._read, name)
        if sealed is None:
            self.index.remove(name.unit)
        elif name.unit not in self.index:
            await self._delete(self.index.add(name, self._file_bytes))
        return sealed

    async def write(self, name: UnitName, sealed: memoryview) -> None:
        if name.unit in self.index:
            return
        gone = self.index.add(name, len(sealed))
        await self._delete(gone)
        if name.unit in self.index:
            try:
                await self._run(self._write, name, sealed)
            except OSError:
                self.index.remove(name.unit)
                raise

    async def delete(self, name: UnitName) -> None:
        self.index.remove(name.unit)
        await self._run(self._unlink, [self._path(name)])

    async def close(self) -> None:
        if self._scanning is not None:
            self._scanning.cancel()
            await asyncio.wait({self._scanning})
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def scan(self) -> None:
        """Reads what is in the folder. Raises OSError."""
        known = {name.unit for name in self.index}
        found = await self._run(self._scan, known)
        for unit in known - found.units:
            self.index.remove(unit)
        gone: list[UnitName] = []
        for number, (_, name) in enumerate(sorted(found.new)):
            if name.unit not in self.index:
                gone += self.index.add(name, self._file_bytes)
            if number % SCANNED_AT_ONCE == SCANNED_AT_ONCE - 1:
                await asyncio.sleep(0)
        self._others = sorted(found.others, reverse=True)
        self._other_bytes = sum(size for *_, size in self._others)
        await self._delete(gone)

    async def _scan_often(self) -> None:
        while True:
            with suppress(OSError):
                await self.scan()
            await asyncio.sleep(RESCAN_S)

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        running = asyncio.get_running_loop()
        return await running.run_in_executor(self._threads, function, *arguments)

    async def _delete(self, gone: Iterable[UnitName]) -> None:
        """Deletes these, and others' files as long as there is too much."""
        paths = [self._path(name) for name in gone]
        while self._others and self.index.num_bytes + self._other_bytes > self.index.max_bytes:
            _, path, size = self._others.pop()
            self._other_bytes -= size
            paths.append(path)
        if paths:
            await self._run(self._unlink, paths)

    def _path(self, name: UnitName) -> Path:
        return self._folder / name.namespace.hex() / f"{name.unit.hex()}{SUFFIX}"

    # What follows runs on the tier's threads.

    def _count_files(self, names: Sequence[UnitName]) -> int:
        missing = (i for i, name in enumerate(names) if not self._path(name).is_file())
        return next(missing, len(names))

    def _read(self, name: UnitName) -> memoryview | None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            opened = os.open(self._path(name), flags)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return _NO_UNIT
            raise
        try:
            facts = os.fstat(opened)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size != self._file_bytes:
                return _NO_UNIT
            sealed = bytearray(self._file_bytes)
            with open(opened, "rb", closefd=False) as file:
                size = file.readinto(sealed)
            # Whoever may only read it cannot renew it.
            with suppress(OSError):
                os.utime(opened)
        finally:
            os.close(opened)
        return memoryview(sealed)[:size]

    def _write(self, name: UnitName, sealed: memoryview) -> None:
        try:
            self._try_to_write(name, sealed)
        except FileNotFoundError:
            # Another worker has just deleted the folder because it was empty.
            self._try_to_write(name, sealed)

    def _try_to_write(self, name: UnitName, sealed: memoryview) -> None:
        path = self._path(name)
        partial = path.with_name(f".{path.stem}.{self._writer}{_PARTIAL}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        # Not what is above them: without it, a file system that was mounted there is missing.
        for made in (self._folder, path.parent):
            made.mkdir(mode=0o700, exist_ok=True)
        try:
            with open(os.open(partial, flags, 0o600), "wb") as file:
                file.write(sealed)
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise

    def _unlink(self, paths: Iterable[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)

    def _scan(self, known: Collection[bytes]) -> _Found:
        found, now = _Found(), time.time()
        for kind in _folders(self._root):
            # It may be of another user, or be deleted now.
            with suppress(PermissionError, FileNotFoundError):
                for tenant in _folders(kind):
                    self._scan_tenant(tenant, kind == self._folder, known, now, found)
        return found

    def _scan_tenant(
        self, tenant: Path, own: bool, known: Collection[bytes], now: float, out: _Found
    ) -> None:
        # Other workers delete files and folders meanwhile.
        with suppress(OSError):
            for entry in os.scandir(tenant):
                with suppress(OSError):
                    self._look(entry, own, known, now, out)
            # Only where nothing is left in it.
            tenant.rmdir()

    def _look(
        self, entry: os.DirEntry[str], own: bool, known: Collection[bytes], now: float, out: _Found
    ) -> None:
        path, facts = Path(entry.path), entry.stat(follow_symlinks=False)
        if _BEGUN.fullmatch(entry.name):
            if now - facts.st_mtime > STALE_S:
                path.unlink()
            return
        if not _WRITTEN.fullmatch(entry.name):
            return
        if not own:
            out.others.append((facts.st_mtime, path, facts.st_size))
            return
        whole = stat.S_ISREG(facts.st_mode) and facts.st_size == self._file_bytes
        name = _name_of(path) if whole else None
        if name is None:
            path.unlink()
            return
        out.units.add(name.unit)
        if name.unit not in known:
            out.new.append((facts.st_mtime, name))


def _folders(path: Path) -> list[Path]:
    """The folders in another one that are of tiers."""
    with os.scandir(path) as found:
        return [
            Path(entry.path)
            for entry in found
            if _HASH.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]


def _name_of(path: Path) -> UnitName | None:
    """What a file says it is; the seal is verified when it is read."""
    unit, namespace = bytes.fromhex(path.stem), bytes.fromhex(path.parent.name)
    with path.open("rb") as file:
        header = header_in(file.read(HEADER_BYTES))
    if header is None:
        return None
    parent, first = bytes.fromhex(header.instance_id), header.first_position
    # Whatever else is in a header, no chain may lead back to its own beginning.
    if unit == namespace or (first == 0) != (parent == namespace):
        return None
    return UnitName(unit, parent, namespace, first)
