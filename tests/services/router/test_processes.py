"""A router of several processes is to its clients, its scrapers and its supervisor as one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from batonlm.core.admission.api_keys import TenantLimits
from batonlm.core.errors import InvalidArgument
from batonlm.router.config import RouterConfig
from batonlm.router.processes import SUMMED, Families, Merger, Written, own_folder
from batonlm.testing import language
from batonlm.v1 import inference_pb2 as pb
from batonlm.v1 import inference_pb2_grpc, types_pb2
from tests.services.router.conftest import PATIENCE_S, World
from tests.services.router.router_process import RouterProcess, router_process
from tests.services.router.test_keys import Kept
from tests.services.router.test_process import start

PROMPT = "the cat sat on the mat"
TOKENS = 40
ENDED = 'baton_requests_total{outcome="finished"}'

ALIKE = {
    "process_start_time_seconds",
    "baton_process_info",
    "baton_load_progress",
    "baton_startup_seconds",
    "baton_ready_seconds",
    "baton_api_keys",
    "baton_api_keys_stale",
    "baton_alias_gone_back",
    "baton_routers",
    "baton_stored_responses",
    "baton_stored_response_bytes",
    "baton_workers",
    "baton_model_workers",
    "baton_standbys",
    "baton_prefix_index_units",
    "baton_pool_target_workers",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
}
"""Gauges that are alike in all processes of a router, so that the largest counts."""


class Stream:
    """One answer, over a connection of its own."""

    def __init__(self, router: RouterProcess, seed: int) -> None:
        self.token_ids: list[int] = []
        self.expected, _ = language.answer(tuple(PROMPT.encode()), seed, 0, TOKENS, ignore_eos=True)
        self.begun = asyncio.Event()
        self.reading = asyncio.create_task(self._read(router.grpc, seed))

    async def _read(self, address: str, seed: int) -> grpc.StatusCode:
        options = pb.GenerationOptions(
            sampling=types_pb2.SamplingParams(seed=seed),
            stop=types_pb2.StopParams(max_tokens=TOKENS, ignore_eos=True),
            return_token_ids=True,
        )
        own = (("grpc.use_local_subchannel_pool", 1),)
        try:
            async with grpc.aio.insecure_channel(address, options=own) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                request = pb.GenerateRequest(text=PROMPT, options=options)
                async for answer in stub.Generate(request, timeout=PATIENCE_S):
                    self.token_ids += answer.event.delta.token_ids
                    if self.token_ids:
                        self.begun.set()
        except grpc.aio.AioRpcError as error:
            return error.code()
        assert tuple(self.token_ids) == self.expected
        return grpc.StatusCode.OK


async def ask(
    router: RouterProcess,
    path: str,
    key: str = "",
    headers: Mapping[str, str] | None = None,
    **body: Any,
) -> httpx.Response:
    """One request over a connection of its own."""
    shown = dict(headers or {}, **({"authorization": f"Bearer {key}"} if key else {}))
    # Reading the system's certificates would take most of the time.
    own = httpx.AsyncClient(trust_env=False, verify=False, headers=shown, timeout=PATIENCE_S)
    async with own as client:
        url = f"http://{router.http}{path}"
        return await (client.post(url, json=body) if body else client.get(url))


async def leaves(router: RouterProcess) -> bool:
    """Whether it says so. A connection whose request is on its way as it ends idle ones ends, too,
    or is reset, where no time is left for others to notice."""
    try:
        return (await ask(router, "/health")).status_code == 503
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
        return False


def children(router: RouterProcess) -> set[int]:
    return {child.pid for child in psutil.Process(router.process.pid).children()}


@pytest.mark.deep
async def test_requests_are_counted_and_remembered_whichever_process_ran_them(
    world: World, tmp_path: Path
) -> None:
    world.add()
    usage = tmp_path / "usage.jsonl"
    async with router_process(world, "--processes=2", f"--usage-log={usage}") as router:
        answers = [
            await ask(router, "/v1/completions", model="", prompt=PROMPT, max_tokens=3)
            for _ in range(24)
        ]
        assert {answer.status_code for answer in answers} == {200}
        told = await router.until(lambda told: told[ENDED] == 24)
        assert told["baton_time_to_first_token_seconds_count"] == 24
        assert told["baton_routers"] == 2
        assert (await router.metrics())[ENDED] == 24
        for answer in answers:
            path = f"/requests/{answer.json()['id']}"
            # Were it not for the other process, half of these would not be found.
            for _ in range(3):
                found = await ask(router, path)
                assert (found.status_code, found.json()["state"]) == (200, "finished")
            nothing = await ask(router, f"{path}?replay")
            assert (nothing.status_code, nothing.json()["error"]["param"]) == (404, "replay")
            wrong = await ask(router, f"{path}?replay=all")
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "replay")
        assert (await ask(router, "/requests/nobody")).status_code == 404
        text = (await ask(router, "/metrics")).text
        gauges = set(re.findall(r"^# TYPE (\S+) gauge$", text, re.MULTILINE))
        assert gauges <= SUMMED | ALIKE, "sums of all processes, or alike in each?"
    lines = [json.loads(line) for line in usage.read_text().splitlines()]
    assert len(lines) == 24 and len({line["router"] for line in lines}) == 2


@pytest.mark.deep
async def test_a_process_that_is_killed_takes_its_streams_along_and_is_replaced(
    world: World,
) -> None:
    world.add()
    (decode,) = world.decodes
    async with router_process(world, "--processes=2") as router:
        whole = await asyncio.gather(*(Stream(router, seed).reading for seed in range(12)))
        assert set(whole) == {grpc.StatusCode.OK}
        # What was counted after the last scrape of a process is lost with it.
        before = await router.until(lambda told: told[ENDED] == 12)
        streams = [Stream(router, seed) for seed in range(16)]
        decode.stepping.clear()
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        first = children(router)
        assert len(first) == 2
        os.kill(min(first), signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while not any(stream.reading.done() for stream in streams):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        decode.stepping.set()
        codes = Counter(await asyncio.gather(*(stream.reading for stream in streams)))
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
        whole_now = before[ENDED] + codes[grpc.StatusCode.OK]
        await router.until(lambda told: told[ENDED] >= whole_now and len(children(router)) == 2)
        assert children(router) != first
        # Nothing falls, also once the new process is asked.
        async with asyncio.timeout(PATIENCE_S):
            while len(decode.hellos) < 3:  # noqa: ASYNC110 (a process)
                await asyncio.sleep(0.01)
        last = await router.metrics()
        counted = {name for name in before if name.split("{")[0].endswith(("_total", "_count"))}
        assert not [name for name in counted if last[name] < before[name]]
        again = await asyncio.gather(*(Stream(router, seed).reading for seed in range(12)))
        assert set(again) == {grpc.StatusCode.OK}
        assert router.process.returncode is None


def events_of(answer: httpx.Response) -> list[tuple[str, str]]:
    """Id and text of each event but the last."""
    *events, last = answer.text.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    found = []
    for event in events:
        event_id, data = event.split("\n")
        (choice,) = json.loads(data.removeprefix("data: "))["choices"]
        found.append((event_id.removeprefix("id: "), choice["text"]))
    return found


@pytest.mark.deep
async def test_a_stream_goes_on_at_whichever_process_is_reached(world: World) -> None:
    """The one that has it reads it, and the other one runs it again."""
    world.add()
    # Without a seed, so that it is the event's id that brings it along. Many seeds end at once.
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"model": "", "stream": True}
    async with router_process(world, "--processes=2") as router:
        begun = await ask(router, "/v1/completions", headers={"x-baton-resume": "true"}, **body)
        events = events_of(begun)
        # However many tokens an event has: where it runs again, they may be others.
        (last, _), *later = events[(len(events) - 1) // 2 :]
        rest = "".join(text for _, text in later)
        assert rest
        known, codes = {"last-event-id": last}, []
        for _ in range(12):
            again = await ask(router, "/v1/completions", headers=known, **body)
            assert "".join(text for _, text in events_of(again)) == rest
            shown = await ask(router, f"/v1/streams/{last.partition('.')[0]}", headers=known)
            codes.append(shown.status_code)
            if shown.status_code == 200:
                assert "".join(text for _, text in events_of(shown)) == rest
            else:
                assert "Send the request" in shown.json()["error"]["message"]
        assert set(codes) <= {200, 404}


RESPONSES = "/v1/responses"


@pytest.mark.deep
async def test_a_response_is_found_and_continued_at_whichever_process_is_reached(
    world: World,
) -> None:
    world.add()
    async with router_process(world, "--processes=2") as router:
        first = (await ask(router, RESPONSES, input="a", max_output_tokens=3)).json()
        path = f"{RESPONSES}/{first['id']}"
        # Were they not shared, half of these would fail.
        for number in range(8):
            assert (await ask(router, path)).json() == first
            listed = await ask(router, f"{path}/input_items")
            assert listed.json()["data"][0]["content"][0]["text"] == "a"
            asked: Any = {"input": str(number), "previous_response_id": first["id"]}
            asked["max_output_tokens"] = 3
            assert (await ask(router, RESPONSES, **asked)).status_code == 200
            counted = await ask(router, f"{RESPONSES}/input_tokens", **asked)
            assert counted.json()["input_tokens"] > first["usage"]["total_tokens"]
        told = await router.metrics()
        assert told["baton_stored_responses"] == 9
        assert told["baton_stored_response_bytes"] > 9 * len(json.dumps(first))
        assert told['baton_responses_dropped_total{reason="failed"}'] == 0


@pytest.mark.deep
async def test_a_response_in_the_background_ends_at_whichever_process_is_reached(
    world: World,
) -> None:
    world.add()
    (decode,) = world.decodes
    async with router_process(world, "--processes=2") as router:
        # It goes no further, and so ends by nothing else.
        decode.last_position = 2
        body: dict[str, Any] = {"input": language.says("word " * 9), "background": True}
        begun = [(await ask(router, RESPONSES, **body)).json() for _ in range(6)]
        for response in begun:
            path = f"{RESPONSES}/{response['id']}"
            for _ in range(3):
                assert (await ask(router, path)).json()["status"] == "in_progress"
            ended = await ask(router, f"{path}/cancel", headers={}, ignored=True)
            assert ended.json()["status"] == "cancelled"
        # The process that runs one sees in the file that it is cancelled.
        await router.until(lambda told: told["baton_requests_open"] == 0)
        for response in begun:
            shown = await ask(router, f"{RESPONSES}/{response['id']}")
            assert shown.json()["status"] == "cancelled"


@pytest.mark.deep
async def test_a_tenants_quota_is_that_of_one_router(world: World, tmp_path: Path) -> None:
    world.add()
    kept = Kept(tmp_path / "keys.json")
    limited = kept.new("acme", limits=TenantLimits(requests_per_minute=120))
    staff = kept.new("staff", operator=True)
    flags = ("--processes=2", f"--keys={kept.path}")
    async with router_process(world, *flags, key=staff) as router:
        began = time.monotonic()
        body: dict[str, Any] = {"model": "", "prompt": "a", "max_tokens": 1}
        answers = [ask(router, "/v1/completions", limited, **body) for _ in range(60)]
        codes = Counter([answer.status_code for answer in await asyncio.gather(*answers)])
        refilled = 1 + 2 * 2 * (time.monotonic() - began)
        assert set(codes) == {200, 429} and 20 <= codes[200] <= 20 + refilled


@pytest.mark.deep
async def test_it_drains_all_processes_and_leaves_none(world: World) -> None:
    world.add()
    (decode,) = world.decodes
    async with router_process(world, "--processes=2") as router:
        streams = [Stream(router, seed) for seed in range(8)]
        decode.stepping.clear()
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        found = children(router)
        router.signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while not await leaves(router):  # noqa: ASYNC110 (a process)
                await asyncio.sleep(0.01)
        decode.stepping.set()
        codes = await asyncio.gather(*(stream.reading for stream in streams))
        assert set(codes) == {grpc.StatusCode.OK}
        async with asyncio.timeout(PATIENCE_S):
            assert await router.process.wait() == 0
    assert not [pid for pid in found if psutil.pid_exists(pid)]


@pytest.mark.deep
def test_processes_start_and_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with start("--processes=2", "--usage-log=/nowhere/usage.jsonl") as process:
        _, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "usage_log: /nowhere" in said) == (2, True)
    with start("--processes=2") as process:
        assert process.stdout is not None
        taken = json.loads(process.stdout.readline())["grpc"]
        with start("--processes=2", f"--http-listen={taken}") as second:
            _, said = second.communicate(timeout=PATIENCE_S)
        found = psutil.Process(process.pid).children()
        (folder,) = tmp_path.iterdir()
        with own_folder():
            assert folder.is_dir(), "the first process still runs"
        process.kill()
        gone, _ = psutil.wait_procs(found, PATIENCE_S)
        assert len(gone) == 2, "a process outlived the first one"
        assert process.wait(PATIENCE_S) and folder.is_dir(), "nobody was left to remove it"
        with own_folder() as own:
            assert [*tmp_path.iterdir()] == [Path(own)]
    assert (second.returncode, "http_listen" in said, "in use" in said) == (2, True, True)


def test_several_processes_are_refused_where_one_serves_all() -> None:
    with pytest.raises(InvalidArgument, match="vllm_engine"):
        RouterConfig(processes=2, vllm_engine=True)


def families(requests: float, opened: float, workers: float) -> Families:
    return [
        ["baton_requests", "", "counter", [["baton_requests_total", {"outcome": "ok"}, requests]]],
        ["baton_requests_open", "", "gauge", [["baton_requests_open", {}, opened]]],
        ["baton_workers", "", "gauge", [["baton_workers", {"role": "decode"}, workers]]],
    ]


def values(merged: Families) -> list[float]:
    return [sample.value for family in Written(merged).collect() for sample in family.samples]


def test_merged_counts_never_fall() -> None:
    merger = Merger()
    merger.began(1)
    merger.began(2)
    assert values(merger.merge({1: families(5, 1, 3), 2: families(7, 2, 4)})) == [12, 3, 4]
    # One that does not answer keeps its counts. Its gauges are unknown.
    assert values(merger.merge({1: families(6, 0, 3)})) == [13, 0, 3]
    merger.ended(2)
    merger.began(3)
    assert values(merger.merge({1: families(6, 0, 3), 2: families(9, 9, 9)})) == [13, 0, 3]
    assert values(merger.merge({1: families(6, 0, 3), 3: families(2, 1, 3)})) == [15, 1, 3]
    merger.ended(1)
    merger.ended(3)
    assert values(merger.merge({})) == [15]
