"""Stored responses: what a store keeps, for whom, and for how long."""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
import stat
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.router.request import response_store
from batonlm.router.request.response_store import (
    TENANT_SHARE,
    MemoryStore,
    ResponseStore,
    SqliteStore,
    StoredResponse,
    StoreLimits,
)

LIMITS = StoreLimits(max_bytes=100 * TENANT_SHARE, max_idle_s=60.0)
"""One tenant has 100 bytes."""


class Clock:
    """No two uses have one time."""

    now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "file"])
async def store(
    request: pytest.FixtureRequest, clock: Clock, tmp_path: Path
) -> AsyncIterator[ResponseStore]:
    made: ResponseStore = MemoryStore(LIMITS, clock)
    if request.param == "file":
        made = SqliteStore(str(tmp_path / "responses"), LIMITS, clock)
    yield made
    await made.close()


def stored(size: int, **fields: Any) -> StoredResponse:
    return StoredResponse(b"r" * (size - 2), b"[]", **fields)


async def there(store: ResponseStore, tenant: str, *ids: str) -> list[str]:
    return [each for each in ids if await store.get(tenant, each)]


async def test_a_response_is_its_tenants(store: ResponseStore) -> None:
    kept = stored(10, previous="p")
    await store.put("a", "1", kept)
    assert await store.get("a", "1") == kept
    assert await store.get("b", "1") is None
    assert not await store.delete("b", "1") and not await store.end("b", "1", b"")
    assert await store.get("a", "1") == kept
    assert await store.delete("a", "1") and not await store.delete("a", "1")
    assert await store.get("a", "1") is None


async def test_a_tenants_share_is_full(store: ResponseStore) -> None:
    await store.put("b", "other", stored(100))
    for number in range(5):
        await store.put("a", str(number), stored(20))
    assert await store.get("a", "0")
    await store.put("a", "new", stored(40))
    assert await there(store, "a", *"01234", "new") == ["0", "3", "4", "new"]
    assert await store.get("b", "other")
    await store.put("a", "large", stored(101))
    assert await store.get("a", "large") is None
    # The same id takes no room twice.
    for _ in range(3):
        await store.put("a", "new", stored(40))
    assert await there(store, "a", "0", "3", "4") == ["0", "3", "4"]


async def test_all_shares_together_are_full(store: ResponseStore) -> None:
    for tenant in "abcd":
        await store.put(tenant, "1", stored(100))
    await store.put("e", "1", stored(50))
    assert [tenant for tenant in "abcde" if await store.get(tenant, "1")] == list("bcde")


async def test_a_tenant_has_so_many(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_OF_TENANT", 3)
    for number in range(5):
        await store.put("a", str(number), stored(3))
    assert await there(store, "a", *"01234") == ["2", "3", "4"]


async def test_what_nobody_uses_is_forgotten(store: ResponseStore, clock: Clock) -> None:
    await store.put("a", "1", stored(10))
    await store.put("a", "2", stored(10))
    clock.now += 50
    assert await store.get("a", "1")
    clock.now += 50
    assert await there(store, "a", "1", "2") == ["1"]
    clock.now += 61
    assert await there(store, "a", "1", "2") == []


async def test_a_run_ends_once(store: ResponseStore) -> None:
    await store.put("a", "1", stored(10, runs_until=5, previous="p"))
    assert await store.end("a", "1", b"end")
    assert await store.get("a", "1") == StoredResponse(b"end", b"[]", "p")
    assert not await store.end("a", "1", b"again")
    await store.put("a", "2", stored(10, runs_until=5))
    await store.delete("a", "2")
    assert not await store.end("a", "2", b"end") and not await store.get("a", "2")


async def test_a_chain_is_read_as_far_as_it_goes(store: ResponseStore) -> None:
    one, two, three = stored(10), stored(11, previous="1"), stored(12, previous="2")
    for name, each in (("1", one), ("2", two), ("3", three), ("turn", stored(9, previous="turn"))):
        await store.put("a", name, each)
    assert await store.chain("a", "3") == [three, two, one]
    assert await store.chain("b", "3") == await store.chain("a", "none") == []
    assert len(await store.chain("a", "turn")) == response_store.MAX_OF_TENANT
    await store.delete("a", "1")
    assert await store.chain("a", "3") == [three, two]


async def test_what_is_held_and_dropped_is_counted(store: ResponseStore, clock: Clock) -> None:
    assert store.held() == (0, 0)
    for number in range(6):
        await store.put("a", str(number), stored(20))
    await store.put("a", "large", stored(101))
    assert store.held() == (5, 100)
    for tenant in "bcde":
        await store.put(tenant, "1", stored(80))
    assert store.held() == (8, 400)
    clock.now += 61
    await store.delete("b", "1")
    assert store.held() == (0, 0)
    counted = {reason.value: number for reason, number in store.dropped.items() if number}
    assert counted == {"tenant_share": 1, "too_large": 1, "all_shares": 1, "idle": 8}


async def test_nothing_is_stored_without_room(tmp_path: Path) -> None:
    for store in (MemoryStore(StoreLimits(0)), SqliteStore(str(tmp_path / "r"), StoreLimits(0))):
        await store.put("a", "1", stored(10))
        assert await store.get("a", "1") is None
        await store.close()


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "chain", "end", "delete", "wait"]),
            st.sampled_from("abcdef"),
            st.sampled_from("123"),
            st.integers(2, 110),
        ),
        max_size=40,
    )
)
def test_both_stores_do_the_same(
    steps: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def step(
        store: ResponseStore, what: str, tenant: str, response_id: str, one: StoredResponse
    ) -> object:
        match what:
            case "put":
                await store.put(tenant, response_id, one)
                return None
            case "end":
                return await store.end(tenant, response_id, one.response)
            case "chain":
                return await store.chain(tenant, response_id)
            case "delete":
                return await store.delete(tenant, response_id)
            case _:
                return await store.get(tenant, response_id)

    async def run() -> None:
        clock = Clock()
        file = tmp_path_factory.mktemp("store") / "responses"
        stores = MemoryStore(LIMITS, clock), SqliteStore(str(file), LIMITS, clock)
        for what, tenant, response_id, size in steps:
            clock.now += size if what == "wait" else 0
            one = stored(size, runs_until=size % 2, previous=("", "1", "2")[size % 3])
            done = [await step(store, what, tenant, response_id, one) for store in stores]
            assert done[0] == done[1]
        for store in stores:
            await store.close()

    asyncio.run(run())


async def test_a_file_outlives_its_process_and_is_shared(tmp_path: Path) -> None:
    path = str(tmp_path / "responses")
    first, second = SqliteStore(path), SqliteStore(path)
    await asyncio.gather(*(first.put("a", str(n), stored(10)) for n in range(20)))
    assert await there(second, "a", *map(str, range(20))) == [*map(str, range(20))]
    await first.close()
    await second.close()
    third = SqliteStore(path)
    assert await third.get("a", "7")
    await third.close()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


async def test_a_locked_file_is_a_failure_that_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "LOCKED_S", 0.01)
    path = str(tmp_path / "responses")
    store = SqliteStore(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable):
        await store.put("a", "1", stored(10))
    other.execute("COMMIT")
    other.close()
    await store.put("a", "1", stored(10))
    assert await store.get("a", "1")
    await store.close()


async def test_a_full_disk_is_a_failure_that_passes(tmp_path: Path) -> None:
    """Wherever it is full: at a write, or only at the end of a transaction."""
    path = tmp_path / "responses"
    store = SqliteStore(str(path))
    await store.put("a", "1", stored(10))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    failures = 0
    for room in range(0, 200_000, 10_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            await store.put("a", f"large {room}", stored(100_000))
        except Unavailable:
            failures += 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert await store.get("a", "1")
        await store.put("a", "2", stored(10))
    assert failures
    await store.close()


async def test_a_file_that_breaks_while_it_is_used_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "responses"
    store = SqliteStore(str(path))
    await store.put("a", "1", stored(10))
    for name in ("responses", "responses-wal", "responses-shm"):
        with open(tmp_path / name, "r+b") as opened:  # noqa: ASYNC230 (a few bytes)
            opened.write(b"\xff" * 100_000)
    for _ in range(2):
        with suppress(Unavailable):
            await store.put("a", "2", stored(100_000))
        with suppress(Unavailable):
            await store.get("a", "1")
    assert store.held()[0] >= 0
    await store.close()


async def test_calls_do_not_wait_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "ANSWER_S", 0.2)
    monkeypatch.setattr(response_store, "MAX_WAITING", 3)
    path = str(tmp_path / "responses")
    store = SqliteStore(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    calls = (store.get("a", str(number)) for number in range(5))
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, Unavailable) for each in found)
    assert sum("too many" in str(each) for each in found) == 2
    # Readers are not held up.
    assert store.held() == (0, 0)
    other.execute("COMMIT")
    other.close()
    await store.close()
    assert store.held() == (0, 0)


@pytest.mark.parametrize("text", ["\0", "ä" * 100_000, "' OR 1 --", "%"])
async def test_any_id_is_looked_for(store: ResponseStore, text: str) -> None:
    await store.put("a", "1", stored(10))
    assert await store.get("a", text) is None
    assert not await store.delete("a", text) and not await store.end("a", text, b"")
    assert await store.get("a", "1")


async def test_processes_open_one_file_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "responses")
    stores = await asyncio.gather(*(asyncio.to_thread(SqliteStore, path) for _ in range(8)))
    await asyncio.gather(*(each.put("a", str(n), stored(10)) for n, each in enumerate(stores)))
    assert stores[0].held() == (8, 80)
    for each in stores:
        await each.close()


def test_a_file_that_cannot_be_used_names_the_option(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("no database" * 100)
    for path in (tmp_path / "no" / "where", other, tmp_path):
        with pytest.raises(InvalidArgument) as refused:
            SqliteStore(str(path))
        assert refused.value.field == "responses_file" and str(path) in refused.value.message
