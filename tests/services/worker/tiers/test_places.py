"""FolderTier and MemoryTier with real files."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from batonlm.core.kvcache.prefix import Prefix, UnitName, unit_names
from batonlm.core.request.model import KvLayout
from batonlm.worker.tiers.places import FolderTier, MemoryTier
from batonlm.worker.tiers.prefix_tiers import SealedUnits

LAYOUT = KvLayout("model", "float32", 2, 2, 4, 4)
KIND, OTHER = "0a" * 16, "0b" * 16
UNITS = SealedUnits(LAYOUT, 16, KIND)
SIZE = UNITS.num_bytes


def names(count: int, salt: bytes = b"") -> list[UnitName]:
    return unit_names(Prefix(range(64 * count), salt, ""), "tokenizer")


def sealed(name: UnitName, units: SealedUnits = UNITS) -> memoryview:
    out = memoryview(bytearray(os.urandom(units.num_bytes)))
    units.seal(name, out)
    return out


@asynccontextmanager
async def folder(
    path: Path, room: int = 100, kind: str = KIND, *, remote: bool = False
) -> AsyncIterator[FolderTier]:
    tier = FolderTier("disk", path, kind, room * SIZE, SIZE, remote=remote)
    await tier.scan()
    yield tier
    await tier.close()


def files(path: Path) -> list[Path]:
    return [found for found in path.rglob("*") if found.is_file()]


def everything(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


async def test_what_is_written_is_read_again_after_a_restart(tmp_path: Path) -> None:
    known = names(3)
    kept = {name: bytes(sealed(name)) for name in known}
    async with folder(tmp_path) as tier:
        for name in reversed(known):
            await tier.write(name, memoryview(kept[name]))
    async with folder(tmp_path) as tier:
        assert set(tier.index) == set(known)
        assert await tier.locate(known) == 3
        for name in known:
            found = await tier.read(name)
            assert found is not None and UNITS.mismatch(name, found) == ""
            assert bytes(found) == kept[name]
        assert all(not path.stat().st_mode & 0o077 for path in files(tmp_path))


@pytest.mark.parametrize("make", [lambda path: MemoryTier(2 * SIZE), None])
async def test_no_more_is_kept_than_there_is_room_for(tmp_path: Path, make: object) -> None:
    tier = MemoryTier(2 * SIZE) if make else FolderTier("disk", tmp_path, KIND, 2 * SIZE, SIZE)
    known = names(1, b"a") + names(1, b"b") + names(1, b"c")
    for name in known:
        await tier.write(name, sealed(name))
    assert [await tier.locate([name]) for name in known] == [0, 1, 1]
    assert await tier.read(known[0]) is None
    assert await tier.read(known[1]) is not None
    assert make or len(files(tmp_path)) == 2
    await tier.delete(known[1])
    assert tier.index.num_bytes == SIZE and await tier.read(known[1]) is None
    await tier.close()


async def test_files_of_other_workers_count_and_go_first(tmp_path: Path) -> None:
    async with folder(tmp_path, kind=OTHER) as tier:
        for name in names(3):
            await tier.write(name, sealed(name))
    async with folder(tmp_path, room=4) as tier:
        assert not len(tier.index)
        for name in names(3):
            await tier.write(name, sealed(name))
        assert len(tier.index) == 3 and len(files(tmp_path)) == 4


async def test_what_another_process_writes_is_found_where_it_is_looked_for(tmp_path: Path) -> None:
    known = names(3)
    async with folder(tmp_path, remote=True) as one, folder(tmp_path, remote=True) as other:
        for name in known[:2]:
            await one.write(name, sealed(name))
        assert await other.locate(known) == 2
        assert await other.read(known[1]) is not None
        assert known[1].unit in other.index


async def test_what_is_not_complete_is_never_found(tmp_path: Path) -> None:
    (name,) = names(1)
    async with folder(tmp_path) as tier:
        await tier.write(name, sealed(name))
        (path,) = files(tmp_path)
        path.rename(path.with_name(f".{path.stem}.1.part"))
        strange = path.with_name("0" * 32 + ".kv")
        strange.write_bytes(b"nothing of ours")
        await tier.scan()
        assert not len(tier.index) and await tier.read(name) is None
        assert not strange.exists() and len(files(tmp_path)) == 1
        os.utime(files(tmp_path)[0], (0, 0))
        await tier.scan()
        assert not files(tmp_path)


async def test_what_others_keep_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    path, outside = tmp_path / "kv", tmp_path / "outside"
    for kept in (
        path / "notes" / "2026" / ("0" * 32 + ".kv"),
        path / KIND / "notes" / "a.part",
        path / OTHER / KIND / "a.kv",
        path / OTHER / KIND / "a.part",
        outside / KIND / ("0" * 32 + ".kv"),
    ):
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(b"somebody's")
        os.utime(kept, (0, 0))
    (path / "empty" / "too").mkdir(parents=True)
    (outside / OTHER).mkdir()
    (path / ("0c" * 16)).symlink_to(outside)
    (path / KIND / OTHER).symlink_to(outside / KIND)
    before = everything(tmp_path)
    async with folder(path, room=1) as tier:
        for name in names(3):
            await tier.write(name, sealed(name))
            await tier.delete(name)
        await tier.scan()
    assert everything(tmp_path) == before


def a_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "make", [a_link, os.mkfifo, Path.mkdir, lambda path: path.write_bytes(b"")]
)
async def test_what_is_no_file_of_a_units_size_is_torn(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    (name,) = names(1)
    async with folder(tmp_path) as tier:
        await tier.write(name, sealed(name))
        (path,) = files(tmp_path)
        path.unlink()
        make(path)
        found = await tier.read(name)
        assert found is not None and UNITS.mismatch(name, found) == "torn"


async def test_two_writers_of_one_unit_leave_it_whole(tmp_path: Path) -> None:
    """As in two containers, where both may have the same process id."""
    known = names(40)
    kept = [sealed(name) for name in known]
    async with folder(tmp_path) as one, folder(tmp_path) as other:
        for name, data in zip(known, kept, strict=True):
            await asyncio.gather(one.write(name, data), other.write(name, data), one.scan())
            found = await one.read(name)
            assert found is not None and UNITS.mismatch(name, found) == ""
        assert len(files(tmp_path)) == 40


async def test_an_emptied_folder_is_used_again_and_a_missing_one_is_not_made(
    tmp_path: Path,
) -> None:
    path = tmp_path / "kv"
    first, second = names(2)
    async with folder(path) as tier:
        await tier.write(first, sealed(first))
        shutil.rmtree(path / KIND)
        await tier.write(second, sealed(second))
        assert await tier.read(first) is None and await tier.read(second) is not None
        # It may be where a file system was mounted.
        shutil.rmtree(path)
        with pytest.raises(FileNotFoundError):
            await tier.write(first, sealed(first))
        assert not path.exists()


def changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_whatever_is_wrong_with_a_unit_is_seen() -> None:
    first, second = names(2)
    data = bytes(sealed(first))

    def wrong(name: UnitName, data: bytes, units: SealedUnits = UNITS) -> str:
        return units.mismatch(name, memoryview(data))

    assert wrong(first, data) == ""
    assert wrong(first, data[:-1]) == wrong(first, data + b"x") == wrong(first, b"") == "torn"
    assert wrong(second, data) == wrong(first, data, SealedUnits(LAYOUT, 16, OTHER)) == "foreign"
    assert wrong(first, bytes(len(data))) == "foreign"
    for at in (0, 20, 30, 60, 111):
        assert wrong(first, changed(data, at)) == "foreign"
    for at in (112, 127, 128, 1000, len(data) - 1):
        assert wrong(first, changed(data, at)) == "corrupt"


async def test_what_cannot_be_written_whole_leaves_nothing(tmp_path: Path) -> None:
    known = names(2)
    async with folder(tmp_path) as tier:
        await tier.write(known[0], sealed(known[0]))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, limits[1]))
        try:
            with pytest.raises(OSError):
                await tier.write(known[1], sealed(known[1]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert await tier.locate(known) == 1 and tier.index.num_bytes == SIZE
        assert len(files(tmp_path)) == 1
