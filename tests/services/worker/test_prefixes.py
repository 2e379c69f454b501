"""A worker collects the beginning of an input from another one's cache: real processes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from batonlm.core.errors import BatonError, Reason, Unavailable
from batonlm.core.kvcache.prefix import Prefix
from batonlm.core.request.attempt import Attempt
from batonlm.rpc.convert import identity_to_proto, prefix_to_proto
from batonlm.transfer import nixl
from batonlm.transfer.stream import TransferAborted
from batonlm.v1.decode_pb2_grpc import DecodeStub
from batonlm.v1.handover_pb2 import OpenHandover
from tests.services.worker.pair import BUFFER_BYTES, attempt, new_id, pair, reference
from tests.services.worker.processes import LOOPBACK, Process, metrics_of, run_on, worker
from tests.services.worker.router_end import RouterEnd

pytestmark = [
    pytest.mark.skipif(not nixl.available(), reason="no NIXL here"),
    pytest.mark.asyncio(loop_scope="module"),
]

SMALL_BUFFERS = {"BATON_TEST_CONSTANTS": "batonlm.worker.staging.BUFFER_BYTES=4096"}
"""So that a prefix takes several KV chunks."""


@asynccontextmanager
async def connected(process: Process) -> AsyncIterator[RouterEnd]:
    end = RouterEnd(DecodeStub(process.channel), process.identity, process.identity)
    await end.connect()
    try:
        yield end
    finally:
        await end.break_off()


@dataclass(frozen=True)
class Workers:
    """Of all tests, each of which has a conversation of its own."""

    folder: Path
    has_it: Process
    needs_it: Process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    folder = tmp_path_factory.mktemp("model")
    async with (
        worker("batonlm.decode", folder, environment=SMALL_BUFFERS) as has_it,
        worker(
            "batonlm.decode", folder, "--step-tokens", "4096", environment=SMALL_BUFFERS
        ) as needs_it,
    ):
        yield Workers(folder, has_it, needs_it)


async def read(process: Process) -> defaultdict[str, float]:
    """Its metrics, with 0 for those that are not there yet."""
    return defaultdict(float, await asyncio.to_thread(metrics_of, process.metrics))


def turns(seed: int) -> tuple[Attempt, Attempt]:
    """Of a conversation: the second one has the first one's output in its prompt."""
    first = attempt(f"first {seed}", size=500, seed=seed, max_tokens=120)
    prompt = (*first.token_ids, *reference(first)[0], *range(30, 90))
    second = replace(
        first, request_id=f"second {seed}", token_ids=prompt, num_prompt_tokens=len(prompt)
    )
    return first, replace(second, stop=replace(second.stop, max_tokens=20))


def counted(told: Mapping[str, float], name: str) -> float:
    return sum(value for key, value in told.items() if key.split("{")[0] == name)


async def test_turn_2_computes_only_what_no_worker_has(workers: Workers) -> None:
    first, second = turns(1)
    size = len(second.token_ids)
    async with connected(workers.has_it) as there, connected(workers.needs_it) as here:
        source = workers.has_it.identity
        await there.start(first)
        assert await there.ended(first) == reference(first)

        before = await read(workers.needs_it)
        await here.start(second, prefix_sender=source)
        assert await here.ended(second) == reference(second)
        # Whole blocks of prompt and output; the newest token has no KV.
        known = (500 + len(reference(first)[0]) - 1) // 16 * 16
        started = here.started[second.key]
        assert (started.prefix.outcome, started.prefix.num_tokens) == ("completed", known)
        assert started.prefix.received_bytes == 16 * known
        assert (started.cached_tokens, started.received_bytes) == (known, 0)

        again = replace(second, request_id="again")
        await here.start(again, prefix_sender=source)
        assert await here.ended(again) == reference(again)
        assert here.started[again.key].prefix.outcome == "cached"

        others = replace(second, request_id="others", cache_salt=b"another tenant")
        await here.start(others, prefix_sender=source)
        assert await here.ended(others) == reference(others)
        started = here.started[others.key]
        assert (started.prefix.outcome, started.cached_tokens) == ("gone", 0)

        after = await read(workers.needs_it)
        cached = size - here.started[again.key].cached_tokens
        name = "baton_prefill_tokens_total"
        computed = counted(after, name) - counted(before, name)
        assert computed == size - known + cached + size
        name = 'baton_prefix_collected_tokens_total{source="decode"}'
        assert after[name] - before[name] == known
        for outcome in ("completed", "cached", "gone"):
            name = f'baton_prefix_collects_total{{outcome="{outcome}"}}'
            assert after[name] - before[name] == 1
        await workers.has_it.idle()


async def test_of_two_attempts_with_one_prefix_the_second_finds_it(workers: Workers) -> None:
    first, second = turns(2)
    twins = [replace(second, request_id=name) for name in ("twin", "other twin")]
    # It has most of theirs in common with them, and nothing more of it is cached anywhere.
    cousin = replace(second, request_id="cousin", token_ids=(*second.token_ids[:-30], *range(30)))
    async with connected(workers.has_it) as there, connected(workers.needs_it) as here:
        await there.start(first)
        assert await there.ended(first) == reference(first)
        known = (500 + len(reference(first)[0]) - 1) // 16 * 16

        before = await read(workers.needs_it)
        attempts = (*twins, cousin)
        for one in attempts:
            await here.start(one, prefix_sender=workers.has_it.identity)
        for one in attempts:
            assert await here.ended(one) == reference(one)
        started = [here.started[one.key] for one in attempts]
        assert [one.prefix.outcome for one in started] == ["completed", "cached", "cached"]
        assert started[0].cached_tokens == known
        assert all(one.cached_tokens >= known for one in started)
        name = 'baton_prefix_collected_tokens_total{source="decode"}'
        assert (await read(workers.needs_it))[name] - before[name] == known


async def test_a_worker_whose_queue_is_full_collects_nothing(workers: Workers) -> None:
    first, second = turns(3)
    full = {"BATON_TEST_CONSTANTS": "batonlm.worker.options.MAX_WAITING=0"}
    async with (
        worker("batonlm.decode", workers.folder, *LOOPBACK, environment=full) as needs_it,
        connected(workers.has_it) as there,
        connected(needs_it) as here,
    ):
        await there.start(first)
        assert await there.ended(first) == reference(first)
        await here.start(second, prefix_sender=workers.has_it.identity)
        assert (await here.failed(second)).reason is Reason.OVERLOADED
        assert not counted(await read(needs_it), "baton_prefix_collects_total")


async def test_a_worker_that_leaves_ends_what_was_asked_for_a_moment_ago() -> None:
    one = attempt(max_tokens=1)
    async with pair() as world:
        await world.run(one)
        opening = OpenHandover(
            handover_id=new_id(),
            receiver=identity_to_proto(world.decode.identity),
            sender_instance_id=world.prefill.identity.instance_id,
            max_kv_chunk_bytes=BUFFER_BYTES,
            prefix=prefix_to_proto(Prefix(one.token_ids, b"", "")),
        )
        offer = await world.sender.claim(opening)

        async def stream() -> BatonError:
            with pytest.raises(TransferAborted) as aborted:
                await offer.given_up()
            offer.end(aborted.value)
            return aborted.value.error

        ended = asyncio.create_task(stream())
        # Nothing else has run meanwhile.
        await world.prefilling.close()
        assert isinstance(await ended, Unavailable), "it is not kept until its time is over"


async def test_prefill_collects_what_decode_has_and_hands_all_over(workers: Workers) -> None:
    first, second = turns(4)
    size = len(second.token_ids)
    has_it, needs_it = workers.has_it, workers.needs_it
    async with (
        worker("batonlm.prefill", workers.folder, environment=SMALL_BUFFERS) as prefill,
        connected(has_it) as there,
    ):
        here = RouterEnd(DecodeStub(needs_it.channel), needs_it.identity, prefill.identity)
        await here.connect()
        await there.start(first)
        assert await there.ended(first) == reference(first)
        known = (500 + len(reference(first)[0]) - 1) // 16 * 16

        handover_id = new_id()
        await here.start(second, handover_id)
        answer = await run_on(prefill, needs_it, second, handover_id, has_it.identity)
        assert await here.ended(second) == reference(second)
        assert (answer.prefix.outcome, answer.prefix.num_tokens) == ("completed", known)
        assert answer.cached_tokens == known
        assert here.started[second.key].received_bytes == 16 * size

        told = await read(prefill)
        assert counted(told, "baton_prefill_tokens_total") == size - known
        assert told['baton_prefix_collected_tokens_total{source="decode"}'] == known
        assert told['baton_handover_bytes_total{side="receiver"}'] == 16 * known

        # And the other way round: a decode worker that computes collects from prefill.
        last = replace(second, request_id="last")
        await there.start(last, prefix_sender=prefill.identity)
        assert await there.ended(last) == reference(last)
        assert there.started[last.key].prefix.outcome == "completed"
        await here.break_off()


@pytest.mark.parametrize(
    ("seed", "point"),
    [pytest.param(5, "sender.announced", marks=pytest.mark.deep), (6, "sender.sealed")],
)
async def test_the_giver_dies_half_way(workers: Workers, seed: int, point: str) -> None:
    """What was verified stays, and the rest is computed."""
    first, second = turns(seed)
    size = len(second.token_ids)
    # The first announcement, or KV chunk, is that of the probe with which the two meet.
    faults = f"kill@{point}:at={2 if point == 'sender.announced' else 3}"
    flags = ("--kv-faults", faults)
    async with (
        worker("batonlm.decode", workers.folder, *flags, environment=SMALL_BUFFERS) as has_it,
        connected(workers.needs_it) as here,
        connected(has_it) as there,
    ):
        await there.start(first)
        assert await there.ended(first) == reference(first)

        before = await read(workers.needs_it)
        await here.start(second, prefix_sender=has_it.identity)
        assert await here.ended(second) == reference(second)
        assert await has_it.exit_code() < 0
        started = here.started[second.key]
        assert started.prefix.outcome == "failed"
        assert started.cached_tokens == started.prefix.num_tokens // 16 * 16
        name = "baton_prefill_tokens_total"
        computed = counted(await read(workers.needs_it), name) - counted(before, name)
        assert computed == size - started.cached_tokens
