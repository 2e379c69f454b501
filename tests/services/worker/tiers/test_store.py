"""A store that workers share: a real server of the S3 protocol, and a folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.core.kvcache.prefix import UnitName
from batonlm.worker.tiers.store import StoreTier
from tests.registry import seaweed
from tests.registry.seaweed import BUCKET, ObjectStore
from tests.services.worker.tiers.test_places import KIND, OTHER, SIZE, UNITS, names, sealed
from tests.services.worker.tiers.test_tiers import (
    UNIT,
    again,
    answered,
    conversation,
    decode,
    metric,
    restored,
    until,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with seaweed.serving(tmp_path_factory.mktemp("store")) as found:
        yield found


@pytest.fixture
def reached(store: ObjectStore) -> Iterator[ObjectStore]:
    with seaweed.known(store):
        yield store


def tier(prefix: str, kind: str = KIND, room: int = 100) -> StoreTier:
    return StoreTier("store", f"s3://{BUCKET}/{prefix}", kind, room * SIZE, SIZE)


def objects(store: ObjectStore, prefix: str) -> list[str]:
    return [meta["path"] for part in obstore.list(store.store(), prefix) for meta in part]


async def test_what_one_worker_writes_another_one_reads(reached: ObjectStore) -> None:
    one, other, third = tier("shared"), tier("shared"), tier("shared", OTHER)
    known = names(12)
    assert await one.read(known[0]) is None
    kept: dict[UnitName, bytes] = {}
    for name in known[:11]:
        kept[name] = bytes(sealed(name))
        await one.write(name, memoryview(kept[name]))
    assert await one.locate(known) == 11 == await other.locate(known)
    assert await third.locate(known) == 0, "it computes other KV"
    for name in kept:
        found = await other.read(name)
        assert found is not None and bytes(found) == kept[name]
        assert UNITS.mismatch(name, found) == ""
    await other.write(known[0], sealed(known[0]))
    assert len(await asyncio.to_thread(objects, reached, "shared")) == 11
    await one.delete(known[3])
    assert await other.read(known[3]) is None
    assert await other.locate(known) == 3


async def test_what_is_missing_is_not_asked_for_each_time(reached: ObjectStore) -> None:
    one, other = tier("missing"), tier("missing")
    (name,) = names(1)
    assert await one.locate([name]) == 0
    await other.write(name, sealed(name))
    assert await one.locate([name]) == 0
    await one.write(name, sealed(name))
    assert await one.locate([name]) == 1


async def test_a_torn_object_does_not_verify(reached: ObjectStore) -> None:
    one = tier("torn")
    (name,) = names(1)
    await one.write(name, sealed(name))
    (path,) = await asyncio.to_thread(objects, reached, "torn")
    await obstore.put_async(reached.store(), path, os.urandom(SIZE - 1))
    found = await one.read(name)
    assert found is not None and UNITS.mismatch(name, found) == "torn"


async def test_the_oldest_go_when_there_is_too_much(reached: ObjectStore) -> None:
    other, one = tier("sweep", OTHER), tier("sweep", room=10)
    known = names(11)
    await other.write(known[0], sealed(known[0]))
    # Times of the store have whole seconds.
    await asyncio.sleep(1.1)
    for name in known[:10]:
        await one.write(name, sealed(name))
    strange = {f"sweep/{path}" for path in ("model/weights", f"{OTHER}/{KIND}/notes")}
    for path in strange:
        await obstore.put_async(reached.store(), path, bytes(SIZE * 20))
    await one.sweep()
    left = set(await asyncio.to_thread(objects, reached, "sweep"))
    assert strange <= left, "others' objects are left alone"
    left -= strange
    assert len(left) == 9 and all(KIND in path for path in left)
    assert len(one.index) == 9, "what it deleted it will write again"


async def test_a_store_that_refuses_is_an_error_of_the_system(
    reached: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another one")
    one = tier("refused")
    (name,) = names(1)
    for failing in (one.locate([name]), one.read(name), one.write(name, sealed(name)), one.sweep()):
        with pytest.raises(OSError):
            await failing
    assert not len(one.index)


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        StoreTier("store", "s3://Bucket", KIND, 1, 1)
    assert caught.value.field == "prefix_store"


@pytest.mark.parametrize("place", ["s3", pytest.param("folder", marks=pytest.mark.deep)])
async def test_a_worker_begins_with_what_another_one_left(
    tmp_path: Path, store: ObjectStore, place: str
) -> None:
    where = f"s3://{BUCKET}/left" if place == "s3" else str(tmp_path / "shared")
    flags = ("--prefix-store", where)
    first = conversation(1)
    async with (
        decode(tmp_path, *flags, environment=store.environment) as (one, at_one),
        decode(tmp_path, *flags, environment=store.environment) as (other, at_other),
    ):
        await answered(at_one, first)
        for number in range(2, 6):
            await answered(at_one, conversation(number))
            await until(one, number, "baton_prefix_tier_writes_total", outcome="written")
        # An open session is given time to end.
        await at_one.break_off()
        one.process.terminate()
        assert await one.exit_code() == 0
        assert await answered(at_other, again(first)) == await restored(other, "store") >= UNIT
        stranger = again(conversation(5), 1, cache_salt=b"another tenant")
        assert await answered(at_other, stranger) == 0


@pytest.mark.deep
async def test_the_store_is_gone_under_load(tmp_path: Path) -> None:
    folder = tmp_path / "seaweed"
    folder.mkdir()
    with seaweed.serving(folder) as store:
        flags = ("--prefix-store", f"s3://{BUCKET}/gone")
        async with decode(tmp_path, *flags, environment=store.environment) as (process, end):
            for number in range(1, 5):
                await answered(end, conversation(number))
                await until(process, number, "baton_prefix_tier_writes_total", outcome="written")
            store.kill()
            for number in range(1, 12):
                await answered(end, again(conversation(number), 1))
            failed = [
                await metric(process, f"baton_prefix_tier_{what}_total", outcome="failed")
                for what in ("reads", "writes")
            ]
            assert sum(failed)
