"""What becomes of a batch's lines when the server answers, refuses, fails, or is not there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from batonlm.cli import batch
from batonlm.cli.access import Access
from batonlm.cli.batch import BatchClient, Limits, LineOutcome, Task
from batonlm.cli.http_client import HttpClient
from batonlm.core.errors import BatonError, Unauthenticated, Unavailable
from batonlm.rpc.address import claimed, split
from tests.cli.batch.servers import CUT, answer, serving
from tests.nobody import nobody
from tests.services.router.conftest import until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(batch, "KNOCK_S", 0.01)


async def asked(where: Access, count: int, **limits: Any) -> tuple[list[LineOutcome], BatchClient]:
    outcomes: list[LineOutcome] = []
    client = HttpClient(where)
    made = BatchClient(client, Limits(**limits), outcomes.append)
    tasks = (Task(i, str(i), "/v1/completions", b'{"n": %d}' % i) for i in range(count))
    try:
        await made.run(tasks)
    finally:
        await client.close()
    return sorted(outcomes, key=lambda one: one.task.number), made


async def test_every_line_is_answered_by_its_own_answer_and_so_many_at_a_time() -> None:
    most = [0]
    async with serving(lambda _, body: answer(200, body, "X-Request-Id: r"), most) as where:
        outcomes, _ = await asked(where, 200, concurrency=6)
    assert [one.response for one in outcomes] == [
        {"status_code": 200, "request_id": "r", "body": {"n": i}} for i in range(200)
    ]
    assert 1 < most[0] <= 6


@pytest.mark.deep
async def test_refusals_are_no_failures_however_many_there_are() -> None:
    def say(number: int, body: dict[str, Any]) -> bytes:
        wait = "retry-after-ms: 1" if number % 2 else "retry-after: 0"
        return answer(200, body) if number % 3 == 2 else answer(429, {}, wait)

    async with serving(say) as where:
        outcomes, made = await asked(where, 6, attempts=1)
    assert [one.response and one.response["status_code"] for one in outcomes] == [200] * 6
    assert made.num_refused == 12, "two of three, and 6 answers"


async def test_a_line_that_is_refused_for_all_its_time_expires() -> None:
    async with serving(lambda *_: answer(429, {}, "retry-after: 100")) as where:
        (outcome,), _ = await asked(where, 1, line_s=5.0)
    assert outcome.response is None and outcome.error is not None
    assert outcome.error["code"] == "batch_expired"


@pytest.mark.parametrize("status", [500, 503])
async def test_failures_are_tried_again_a_few_times(status: int) -> None:
    seen: list[int] = []

    def say(_: int, body: dict[str, Any]) -> bytes:
        seen.append(body["n"])
        return answer(200 if body["n"] and seen.count(body["n"]) == 3 else status, body)

    async with serving(say) as where:
        (bad, good), _ = await asked(where, 2, attempts=3)
    assert seen.count(0) == seen.count(1) == 3
    assert bad.response == {"status_code": status, "request_id": "", "body": {"n": 0}}
    assert good.response is not None and good.response["status_code"] == 200


async def test_a_connection_that_is_lost_is_a_failure_of_the_line() -> None:
    halves = {0: CUT, 1: answer(200, {})[:-1] + CUT, 2: b"nonsense\r\n\r\n"}
    async with serving(lambda number, body: halves.get(number, answer(200, body))) as where:
        (good,), _ = await asked(where, 1, attempts=4)
    assert good.response is not None
    async with serving(lambda *_: CUT) as where:
        (bad,), _ = await asked(where, 1, attempts=2)
    assert bad.error == {"code": "connection_lost", "message": "The connection was lost."}


async def test_what_would_come_again_is_the_lines_result() -> None:
    said = {"error": {"message": "no", "param": "prompt"}}
    async with serving(lambda *_: answer(400, said)) as where:
        (outcome,), _ = await asked(where, 1)
    assert outcome.error is None
    assert outcome.response == {"status_code": 400, "request_id": "", "body": said}


async def test_a_server_that_is_not_there_is_no_lines_fault() -> None:
    with nobody() as gone, pytest.raises(Unavailable):
        await asked(Access(gone), 3, away_s=0.05, attempts=1)


async def test_a_server_that_comes_back_is_waited_for() -> None:
    outcomes: list[LineOutcome] = []
    with claimed("127.0.0.1:0", "listen") as (address, _):
        port = split(address, "listen")[1]
        client = HttpClient(Access(address))
        made = BatchClient(client, Limits(attempts=1, away_s=60.0), outcomes.append)
        async with serving(lambda _, body: answer(200, body, "connection: close"), port=port):
            await made.run(iter([Task(0, "0", "/v1/completions", b"{}")]))
        running = asyncio.create_task(made.run(iter([Task(1, "1", "/v1/completions", b"{}")])))
        await until(lambda: made.away_since is not None)
        async with serving(lambda _, body: answer(200, body), port=port):
            await running
        await client.close()
    assert len(outcomes) == 2


async def test_a_key_that_is_not_known_ends_the_batch_without_results() -> None:
    async with serving(lambda *_: answer(401, {})) as where:
        with pytest.raises(Unauthenticated) as refused:
            await asked(where, 30)
    assert refused.value.field == "api_key"


async def test_what_cannot_be_kept_ends_the_batch() -> None:
    def done(_: LineOutcome) -> None:
        raise BatonError("no room")

    async with serving(lambda _, body: answer(200, body)) as where:
        client = HttpClient(where)
        with pytest.raises(BatonError, match="no room"):
            tasks = iter([Task(i, str(i), "/v1/completions", b"{}") for i in range(30)])
            await BatchClient(client, Limits(), done).run(tasks)
        await client.close()


async def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    seen: list[bytes] = []

    def say(_: int, body: dict[str, Any]) -> bytes:
        seen.append(json.dumps(body).encode())
        return answer(200, body, "connection: close")

    async with serving(say) as where:
        outcomes, _ = await asked(where, 10, concurrency=1, attempts=1)
    assert len(seen) == 10 and all(one.response is not None for one in outcomes)
