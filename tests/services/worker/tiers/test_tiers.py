"""What the prefix cache evicts comes back from a tier: real worker processes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from batonlm.core.kvcache.prefix import Prefix, unit_names
from batonlm.core.request.attempt import Attempt
from batonlm.rpc.model_folder import tokenizer_digest
from batonlm.v1.decode_pb2_grpc import DecodeStub
from tests.services.worker.pair import PATIENCE_S, attempt, new_id, reference
from tests.services.worker.processes import LOOPBACK, Process, metrics_of, run_on, worker
from tests.services.worker.router_end import RouterEnd

SMALL_POOL = {"BATON_TEST_CONSTANTS": "__main__.FAKE_BLOCKS=64"}
"""1024 positions: two conversations do not fit."""
LARGE_POOL = {"BATON_TEST_CONSTANTS": ""}
"""Nothing is evicted, and all of it is written when the worker leaves."""
ALWAYS = ("--prefix-restore-tokens", "64")
"""A fake step takes no time, so nothing is slower to compute."""
SIZE, UNIT = 600, 64
WHOLE = (SIZE - 1) // UNIT * UNIT


def conversation(number: int, **options: object) -> Attempt:
    return attempt(f"{number}", size=SIZE, seed=number, max_tokens=4, **options)  # type: ignore[arg-type]


def on_disk(folder: Path) -> tuple[str, ...]:
    return ("--prefix-disk-mib", "8", "--prefix-disk-folder", str(folder))


@asynccontextmanager
async def decode(
    folder: Path,
    *flags: str,
    within: tuple[str, ...] = (),
    environment: Mapping[str, str] = {},
) -> AsyncIterator[tuple[Process, RouterEnd]]:
    """A worker, and a router at it."""
    async with worker(
        "batonlm.decode",
        folder,
        *LOOPBACK,
        *ALWAYS,
        *flags,
        environment={**SMALL_POOL, **environment},
        within=within,
    ) as process:
        end = RouterEnd(DecodeStub(process.channel), process.identity, process.identity)
        await end.connect()
        try:
            yield process, end
        finally:
            await end.break_off()


async def answer_of(end: RouterEnd, one: Attempt) -> list[int]:
    await end.start(one)
    return (await end.ended(one))[0]


async def answered(end: RouterEnd, one: Attempt) -> int:
    """Runs an attempt, compares, and returns its cached tokens."""
    assert await answer_of(end, one) == reference(one)[0]
    return end.started[one.key].cached_tokens


async def metric(process: Process, name: str, **labels: str) -> float:
    """The sum over all labels that are not given."""
    read = await asyncio.to_thread(metrics_of, process.metrics)
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for key, value in read.items()
        if key.split("{")[0] == name and all(each in key for each in wanted)
    )


async def until(process: Process, least: float, name: str, **labels: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await metric(process, name, **labels) < least:  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.02)


def again(one: Attempt, number: int = 0, **changes: bytes) -> Attempt:
    return replace(one, request_id=f"{one.request_id} again {number}", **changes)  # type: ignore[arg-type]


async def driven_out(process: Process, end: RouterEnd, first: Attempt, tier: str) -> None:
    """The first attempt is answered, and then others until none of it is in the pool."""
    assert await answered(end, first) == 0
    for number in range(2, 7):
        await answered(end, conversation(number))
        # A tier that cannot keep up is allowed to miss some.
        await until(process, number, "baton_prefix_tier_writes_total", tier=tier, outcome="written")


async def restored(process: Process, tier: str) -> float:
    return await metric(process, "baton_prefix_restored_tokens_total", tier=tier)


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_what_was_evicted_comes_back(tmp_path: Path, tier: str) -> None:
    flags = (f"--prefix-{tier}-mib", "8", "--prefix-disk-folder", str(tmp_path / "kv"))
    first = conversation(1)
    async with decode(tmp_path, *flags) as (process, end):
        await driven_out(process, end, first, tier)
        one = again(first)
        assert await answered(end, one) == await restored(process, tier) >= UNIT
        came = end.started[one.key].restored
        assert came.num_tokens == {tier: await restored(process, tier)} and came.wait_us
        computed = await metric(process, "baton_prefill_tokens_total")
        # What another tenant computed is not found.
        one = again(first, 1, cache_salt=b"another tenant")
        assert await answered(end, one) == 0
        assert not end.started[one.key].HasField("restored")
        assert await metric(process, "baton_prefill_tokens_total") == computed + SIZE
        await process.idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model, and in it, as `kv`, what a worker had on disk when it left: the first
    four conversations."""
    folder = tmp_path_factory.mktemp("left")
    flags = on_disk(folder / "kv")
    async with decode(folder, *flags, environment=LARGE_POOL) as (process, end):
        for number in range(1, 5):
            await answered(end, conversation(number))
        # An open session is given time to end.
        await end.break_off()
        process.process.terminate()
        assert await process.exit_code() == 0
    return folder


async def test_a_folder_is_found_again_after_a_restart(left: Path, tmp_path: Path) -> None:
    shutil.copytree(left / "kv", tmp_path / "kv")
    flags, first = on_disk(tmp_path / "kv"), conversation(1)
    async with decode(left, *flags) as (process, end):
        await until(process, 1, "baton_prefix_tier_bytes", tier="disk")
        assert await answered(end, again(first)) == WHOLE == await restored(process, "disk")
        # It is in the cache now.
        assert await answered(end, again(first, 1)) >= WHOLE
        assert await restored(process, "disk") == WHOLE
        process.process.kill()
    async with decode(left, *flags) as (process, end):
        await until(process, 1, "baton_prefix_tier_bytes", tier="disk")
        assert await answered(end, again(first, 2)) == WHOLE


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[700] ^= 4
    path.write_bytes(data)


def swap(path: Path) -> None:
    other = next(each for each in path.parent.iterdir() if each != path)
    path.write_bytes(other.read_bytes())


HARMS: dict[str, Callable[[Path], None]] = {
    "torn": cut,
    "corrupt": damage,
    "foreign": swap,
    "gone": Path.unlink,
}
"""By the outcome of a read of such a file."""


async def test_a_file_that_is_not_right_is_a_miss(left: Path, tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    shutil.copytree(left / "kv", kv)
    async with decode(left, *on_disk(kv), environment=LARGE_POOL) as (process, end):
        await until(process, 1, "baton_prefix_tier_bytes", tier="disk")
        for number, (outcome, harm) in enumerate(HARMS.items(), 1):
            one = conversation(number)
            names = unit_names(Prefix(one.token_ids, b"", ""), tokenizer_digest(left))
            (path,) = kv.glob(f"*/*/{names[3].unit.hex()}.kv")
            harm(path)
            assert await answered(end, again(one)) == 3 * UNIT, outcome
            found = await metric(
                process, "baton_prefix_tier_reads_total", tier="disk", outcome=outcome
            )
            assert found == 1, outcome
            assert not path.exists(), outcome


async def test_the_folder_is_deleted_under_load(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    flags = on_disk(kv)
    async with decode(tmp_path, *flags) as (process, end):
        await driven_out(process, end, conversation(1), "disk")
        shutil.rmtree(kv)
        for number in (1, 2, 3, 8, 9, 10):
            await answered(end, again(conversation(number), number))
        assert await metric(
            process, "baton_prefix_tier_writes_total", tier="disk", outcome="failed"
        )


FULL = """
mount -t tmpfs -o size=16k tmpfs "$1" && shift && exec "$@"
"""


async def test_a_disk_that_is_full_stops_nothing(tmp_path: Path) -> None:
    """The worker's folder is a file system of its own, with room for a few units."""
    kv = tmp_path / "kv"
    kv.mkdir()
    namespace = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", FULL, "sh", str(kv))
    probe = await asyncio.create_subprocess_exec(*namespace, "true")
    if await probe.wait():
        pytest.skip("no file system can be mounted here")
    flags = on_disk(kv)
    async with decode(tmp_path, *flags, within=namespace) as (process, end):
        number = 0
        async with asyncio.timeout(PATIENCE_S):
            while not await metric(process, "baton_prefix_tier_writes_total", outcome="failed"):
                number += 1
                await answered(end, conversation(number))
        await answered(end, again(conversation(1)))


async def test_prefill_restores_and_hands_over(tmp_path: Path) -> None:
    flags = ("--prefix-host-mib", "8", *ALWAYS, *LOOPBACK)
    first = conversation(1)
    async with (
        worker("batonlm.prefill", tmp_path, *flags, environment=SMALL_POOL) as prefill,
        worker("batonlm.decode", tmp_path, *LOOPBACK) as needs_it,
    ):
        end = RouterEnd(DecodeStub(needs_it.channel), needs_it.identity, prefill.identity)
        await end.connect()
        came: dict[str, int] = {}

        async def handed_over(one: Attempt) -> int:
            handover_id = new_id()
            await end.start(one, handover_id)
            answer = await run_on(prefill, needs_it, one, handover_id)
            came.update(answer.restored.num_tokens)
            assert await end.ended(one) == reference(one)
            return int(answer.cached_tokens)

        assert await handed_over(first) == 0
        for number in range(2, 7):
            await handed_over(conversation(number))
            await until(
                prefill, number, "baton_prefix_tier_writes_total", tier="host", outcome="written"
            )
        assert not came
        assert await handed_over(again(first)) == await restored(prefill, "host") >= UNIT
        assert came == {"host": await restored(prefill, "host")}
        await end.break_off()
