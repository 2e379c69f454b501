"""Workers refuse, fail and leave; a request waits, goes elsewhere, or ends with the right error."""

from __future__ import annotations

import pytest

from batonlm.core.errors import (
    HandoverFailed,
    Incompatible,
    Internal,
    InvalidArgument,
    Overloaded,
    Unavailable,
)
from batonlm.core.routing.load import WorkerState
from batonlm.router.config import RouterConfig
from batonlm.testing.scripted import ScriptedDecode, ScriptedPrefill
from tests.services.router.conftest import World, until
from tests.services.router.disturbed import EXPECTED, REQUEST, begin_and_pause, check, finish


async def test_another_tokenizer_is_asked(world: World) -> None:
    await world.start(tokenizers=2)
    for tokenizer in world.tokenizers:
        tokenizer.refusals = [Unavailable("leaving")]
    check(await world.ask(REQUEST))


async def test_a_prompt_at_fault_is_not_tried_again(world: World) -> None:
    await world.start()
    world.tokenizers[0].refusals = [InvalidArgument("no", field="prompt"), Internal("not reached")]
    with pytest.raises(InvalidArgument):
        await world.pipeline.open(REQUEST)
    assert len(world.tokenizers[0].refusals) == 1


@pytest.mark.deep
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_overloaded_worker_is_waited_for(world: World, role: str) -> None:
    """However often it refuses: that is no failure, and prefill's load is not decode's."""
    await world.start()
    worker: ScriptedPrefill | ScriptedDecode = (
        world.prefills[0] if role == "prefill" else world.decodes[0]
    )
    worker.refusals = [Overloaded("full", retry_after_s=0.01) for _ in range(6)]
    check(await world.ask(REQUEST))
    assert worker.refusals == []
    runs = world.prefills[0].runs if role == "prefill" else world.decodes[0].starts
    assert [run.attempt for run in runs] == list(range(7))
    await until(world.nothing_left)


async def test_an_overloaded_worker_is_passed_over(world: World) -> None:
    await world.start(prefills=2)
    for prefill in world.prefills:
        prefill.refusals = [Overloaded("full", retry_after_s=60.0)]
    world.prefills[0].refusals = []
    for _ in range(4):
        check(await world.ask(REQUEST))


async def test_a_failed_handover_is_repeated_elsewhere(world: World) -> None:
    await world.start(prefills=2)
    world.decodes[0].refusals = [HandoverFailed("no KV came")]
    check(await world.ask(REQUEST))
    ran = [{run.attempt for run in prefill.runs} for prefill in world.prefills]
    assert {1} in ran, "the second attempt's sender did not run the first"


async def test_two_that_do_not_fit_when_they_meet_are_parted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Decode, which is not at fault, prefills at once; the log says what differs."""
    caplog.set_level("INFO")
    await world.start()
    world.decodes[0].refusals = [Incompatible("KV does not fit between a and b: digest")]
    check(await world.ask(REQUEST))
    # The call to prefill may be called off before it has arrived there.
    assert len(world.prefills[0].runs) <= 1 and len(world.decodes[0].starts) == 2
    assert any("between a and b: digest" in record.getMessage() for record in caplog.records)
    await until(world.nothing_left)


async def test_a_request_gives_up_after_failures_without_progress(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=0, max_attempts=3))
    world.decodes[0].refusals = [Internal("broken") for _ in range(9)]
    with pytest.raises(Internal, match="broken"):
        await world.ask(REQUEST)
    assert len(world.decodes[0].starts) == 3
    await until(world.nothing_left)


async def test_a_failure_of_the_request_itself_is_not_repeated(world: World) -> None:
    await world.start()
    world.prefills[0].refusals = [InvalidArgument("no such thing", field="logit_bias")]
    with pytest.raises(InvalidArgument):
        await world.ask(REQUEST)
    assert len(world.prefills[0].runs) == 1
    await until(world.nothing_left)


@pytest.mark.deep
async def test_draining_workers_get_nothing_new(world: World) -> None:
    await world.start(decodes=2)
    world.decodes[0].state = WorkerState.DRAINING
    fleet = world.fleet
    assert fleet is not None
    await until(
        lambda: any(s.load.state is WorkerState.DRAINING for s in fleet.decodes.snapshots())
    )
    for _ in range(4):
        check(await world.ask(REQUEST))
    assert world.decodes[0].starts == []


async def test_with_no_worker_for_too_long_a_request_is_refused(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=0, wait_timeout_s=0.3))
    await world.decodes[0].kill()
    await until(lambda: world.met()["decode"] == 0)
    with pytest.raises(Unavailable):
        await world.pipeline.open(REQUEST)
    assert world.pipeline.num_requests == 0


async def test_decode_workers_that_die_in_mid_stream_for_good_end_it(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=0, wait_timeout_s=0.3))
    stream, answer, victim = await begin_and_pause(world, REQUEST)
    await victim.kill()
    with pytest.raises(Unavailable):
        await finish(stream, answer)
    await stream.aclose()
    assert tuple(answer.token_ids[0]) == EXPECTED[: len(answer.token_ids[0])]
    await until(world.nothing_left)
