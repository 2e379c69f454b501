"""Usage lines: what they say, where they go when the file is rotated, and what is lost when."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import InvalidArgument, ModelNotFound
from batonlm.core.observe.request_record import ChoiceEnd
from batonlm.core.request.request import FinishReason
from batonlm.router.observe import records
from batonlm.router.observe.records import UsageLog
from tests.core.test_request_history import over, record
from tests.services.router.conftest import World, until
from tests.services.router.disturbed import PROMPT, REQUEST, begin


class Kept:
    """A log and the file it goes to."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.registry = CollectorRegistry()
        self.log = UsageLog(str(path), "r1", registry=self.registry, retry_s=0.01, **options)

    def add(self, name: str) -> None:
        self.log.over(over(record(name)))

    def ids(self, path: Path | None = None) -> list[str]:
        return [line["request_id"] for line in lines(path or self.path)]

    def counted(self, outcome: str) -> float:
        labels = {"outcome": outcome}
        return self.registry.get_sample_value("baton_usage_lines_total", labels) or 0.0

    @property
    def failures(self) -> float:
        return self.registry.get_sample_value("baton_usage_write_failures_total") or 0.0


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    found: list[Kept] = []

    def make(**options: Any) -> Kept:
        found.append(Kept(tmp_path / "usage.jsonl", **options))
        return found[-1]

    yield make
    for one in found:
        one.log.close()


async def test_a_line_says_what_billing_needs(made: Callable[..., Kept]) -> None:
    kept = made()
    told = over(record("abc", "acme"))
    told.model, told.prompt_tokens = "m", 9
    told.choices = (ChoiceEnd(4, FinishReason.STOP), ChoiceEnd(3, None))
    kept.log.over(told)
    await until(lambda: kept.counted("written") == 1)
    (line,) = lines(kept.path)
    assert line == {
        "time": "1970-01-01T00:00:02.000+00:00",
        "request_id": "abc",
        "tenant": "acme",
        "model": "m",
        "asked": "text",
        "priority": 0,
        "input_tokens": 9,
        "cached_tokens": 2,
        "output_tokens": 7,
        "choices": 2,
        "finish_reasons": ["stop", None],
        "error": None,
        "duration_s": 2.0,
        "first_token_s": 2.0,
        "router": "r1",
    }


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="pipes that keep writes apart are Linux's")
def test_lines_on_a_pipe_do_not_mix_with_other_processes_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe2(os.O_DIRECT)
    with open(writing, "wb") as out, open(reading, "rb", buffering=0) as pipe:
        monkeypatch.setattr("sys.stdout", out)
        log = UsageLog("-", "r1", registry=CollectorRegistry())
        try:
            # More than the pipe takes one by one, so that the rest is written in parts.
            for name in range(200):
                log.over(over(record(str(name))))
            received: list[bytes] = []
            while sum(one.count(b"\n") for one in received) < 200:
                received.append(pipe.read(1 << 16))
        finally:
            log.close()
    assert max(one.count(b"\n") for one in received) > 1
    assert all(one.endswith(b"\n") for one in received), "a line was torn"
    assert [json.loads(line)["request_id"] for line in b"".join(received).splitlines()] == [
        str(name) for name in range(200)
    ]


async def test_a_renamed_file_is_left_and_a_truncated_one_goes_on(
    made: Callable[..., Kept],
) -> None:
    kept = made()
    kept.add("a")
    await until(lambda: kept.counted("written") == 1)
    rotated = kept.path.with_suffix(".1")
    kept.path.rename(rotated)
    kept.add("b")
    await until(lambda: kept.counted("written") == 2)
    assert (kept.ids(rotated), kept.ids()) == (["a"], ["b"])
    os.truncate(kept.path, 0)
    kept.add("c")
    await until(lambda: kept.counted("written") == 3)
    assert kept.ids() == ["c"]


async def test_what_cannot_be_written_waits_and_what_is_too_much_is_dropped(
    made: Callable[..., Kept], caplog: pytest.LogCaptureFixture
) -> None:
    kept = made(max_waiting=2)
    folder = kept.path.parent / "gone"
    kept.path.unlink()
    kept.path.symlink_to(folder / "usage.jsonl")
    kept.add("a")
    await until(lambda: kept.failures > 2)
    for name in "bcd":
        kept.add(name)
    assert kept.counted("dropped") == 1
    folder.mkdir()
    await until(lambda: kept.counted("written") == 3)
    assert kept.ids() == ["a", "b", "c"]
    waits = [entry for entry in caplog.records if "usage lines wait" in entry.message]
    assert len(waits) == 1


async def test_a_reader_that_takes_nothing_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "CLOSE_S", 0.2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    kept = Kept(pipe, max_waiting=4)
    done = threading.Event()

    def flood() -> None:
        for number in range(2000):
            kept.add(str(number))
        done.set()

    await asyncio.to_thread(flood)
    assert done.is_set() and kept.counted("dropped") > 0
    await asyncio.to_thread(kept.log.close)
    os.close(reader)


def test_closing_writes_what_waits(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "usage.jsonl")
    for number in range(100):
        kept.add(str(number))
    kept.log.close()
    assert kept.ids() == [str(number) for number in range(100)]


def test_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    log = UsageLog("-", "r1", registry=CollectorRegistry())
    log.over(over(record("abc")))
    log.close()
    assert json.loads(capfd.readouterr().out)["request_id"] == "abc"


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file") as refused:
        UsageLog(str(tmp_path / "no" / "usage.jsonl"), "r1", registry=CollectorRegistry())
    assert refused.value.field == "usage_log"


async def test_one_line_a_request_however_it_ends(world: World, made: Callable[..., Kept]) -> None:
    kept = made()
    world.usage = kept.log
    await world.start()
    answer = await world.ask(REQUEST.of(Tenant("acme")))
    stream, left = await begin(world, REQUEST, 5)
    await stream.aclose()
    with pytest.raises(ModelNotFound):
        await (await world.pipeline.open(type(REQUEST)(REQUEST.prompt, model="other"))).aclose()
    await until(lambda: kept.counted("written") == 3)
    well, cut, failed = lines(kept.path)
    assert well["request_id"] == answer.accepted.request_id
    assert (well["tenant"], well["input_tokens"], well["output_tokens"]) == (
        "acme",
        len(PROMPT),
        120,
    )
    assert well["finish_reasons"] == ["length"] and well["error"] is None
    assert 0 < well["first_token_s"] <= well["duration_s"]
    assert cut["request_id"] == left.accepted.request_id
    assert cut["error"] == "cancelled" and cut["output_tokens"] >= 5
    assert cut["finish_reasons"] == [None]
    assert failed["error"] == "model_not_found" and failed["output_tokens"] == 0
    assert not any(PROMPT in line for line in kept.path.read_text().splitlines())
