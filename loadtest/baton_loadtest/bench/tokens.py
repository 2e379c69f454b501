"""`baton bench tokens`: tokenizer and detokenizer workers against the same library in one process.

Both sides of a figure are measured in this run, in turns, pinned to the same core, and compared by
processor time. Text is the source of Python's own library: prose and code, and everybody has it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from baton.cli.layout import resolve_model
from baton.v1.tokenizer_pb2 import EncodeInput, EncodeRequest
from baton_loadtest.bench import process
from baton_loadtest.bench.process import check_cpu_clock, say
from baton_loadtest.bench.tokens_hard import beside, growing
from baton_loadtest.bench.tokens_worker import Worker, detokenize, encode, serving
from baton_loadtest.report import Chart, Line, Report, Result, compared

TEXT_BYTES = 1 << 22
ITEM_BYTES = 1 << 10
"""A batch is of such texts, or of larger ones when more than 256 would be needed."""
MAX_ITEMS = 256
COMPARED_FROM = 1 << 16
GOAL = 0.8
STREAM_BYTES = 1 << 12
DIRECT_S = 120.0
TURNS = 3
"""Of both sides of a figure; their medians count."""

STOPS = ("\n\n\n\n", "</answer>", "User:")


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError when a worker fails."""
    check_cpu_clock()
    allowed = os.sched_getaffinity(0)
    try:
        return asyncio.run(_Bench(args).measure())
    finally:
        os.sched_setaffinity(0, allowed)


class _Bench:
    """The measurements in order; each adds its figures and lines."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._model = resolve_model(args.model)[0]
        self._text = _text()
        self._ids = _ids(self._model, self._text)
        cores = sorted(os.sched_getaffinity(0))
        self._cores, self._core, self._other = cores, cores[0], cores[-1]
        self._batches = {size: _batches(self._text, size) for size in args.sizes}
        self.results: list[Result] = []

    async def measure(self) -> Report:
        decode_direct = self._direct({}, self._ids)["decode"]
        os.sched_setaffinity(0, {self._other})
        async with serving("tokenizer", self._model, self._core) as first:
            by_size, encode_direct = await self._sizes(first)
            by_streams = await self._streams(first)
            self.results += await beside(first)
            async with serving("tokenizer", self._model, self._other) as second:
                await self._two(first, second)
        self.results += await growing(self._model, self._core, self._text)
        decoded, with_stops = await self._decoding(decode_direct)
        sizes, streams = list(self._args.sizes), list(self._args.streams)
        return Report(
            self.results,
            (
                Chart(
                    "encoding, one request at a time",
                    "bytes of text in a request",
                    "MB a CPU-second",
                    (
                        Line("the library, called directly", sizes, _mb(encode_direct)),
                        Line("a tokenizer worker", sizes, _mb(by_size)),
                    ),
                    log=True,
                ),
                Chart(
                    f"encoding, {STREAM_BYTES >> 10} KiB a request",
                    "streams",
                    "MB a CPU-second",
                    (Line("a tokenizer worker", streams, _mb(by_streams)),),
                    log=True,
                ),
                Chart(
                    "detokenizing, a token of each stream at a time",
                    "streams",
                    "tokens a CPU-second",
                    (
                        Line("a detokenizer worker", streams, decoded),
                        Line("with stop strings", streams, with_stops),
                        Line(
                            "the library, called directly",
                            streams,
                            [decode_direct] * len(streams),
                        ),
                    ),
                    log=True,
                ),
            ),
        )

    def _direct(self, batches: dict[int, list[list[str]]], ids: list[int]) -> dict[str, Any]:
        """The library's rates. It has the core that the workers have."""
        job = {
            "tokenizer": str(self._model / "tokenizer.json"),
            "batches": batches,
            "ids": ids,
            "seconds": self._args.seconds,
        }
        os.sched_setaffinity(0, self._cores)
        try:
            return process.call("tokens_direct", job, threads=1, deadline_s=DIRECT_S)
        finally:
            os.sched_setaffinity(0, {self._other})

    async def _sizes(self, worker: Worker) -> tuple[list[float], list[float]]:
        """Bytes a CPU-second by the size of a request: the worker's, and the library's."""
        rates, direct = [], []
        for size, batches in self._batches.items():
            say(f"requests of {size} bytes")
            requests = [_request(batch) for batch in batches]
            ours, theirs = [], []
            for _ in range(TURNS):
                theirs.append(self._direct({size: batches}, [])["encode"][str(size)])
                load = await encode([worker], requests, streams=1, seconds=self._args.seconds)
                ours.append(load.per_core_s)
            rates.append(median(ours))
            direct.append(median(theirs))
            self.results.append(
                compared(
                    f"encoding, {_size(size)} a request, against the library called directly",
                    rates[-1] / 1e6,
                    "MB/CPU-s",
                    direct[-1] / 1e6,
                    GOAL if size >= COMPARED_FROM else None,
                )
            )
        enough = [
            size
            for size, rate, of_direct in zip(self._batches, rates, direct, strict=True)
            if rate >= GOAL * of_direct
        ]
        if enough:
            name = f"smallest request measured that reaches {GOAL:.0%} of the library"
            self.results.append(Result(name, min(enough), "bytes"))
        return rates, direct

    async def _streams(self, worker: Worker) -> list[float]:
        """Bytes a CPU-second by the number of streams that ask at once."""
        requests = [_request(batch) for batch in _batches(self._text, STREAM_BYTES)]
        rates = []
        for streams in self._args.streams:
            say(f"{streams} streams")
            load = await encode([worker], requests, streams=streams, seconds=self._args.seconds)
            rates.append(load.per_core_s)
            name = f"encoding, {_size(STREAM_BYTES)} a request, {_streams(streams)}"
            self.results.append(Result(name, load.per_core_s / 1e6, "MB/CPU-s"))
        return rates

    async def _two(self, first: Worker, second: Worker) -> None:
        say("one worker, then two")
        requests = [_request(batch) for batch in _batches(self._text, COMPARED_FROM)]
        loads = [
            await encode(workers, requests, streams=4, seconds=2 * self._args.seconds)
            for workers in ([first], [first, second])
        ]
        self.results.append(
            compared(
                f"encoding, {_size(COMPARED_FROM)} a request, two workers against one",
                loads[1].per_s / 1e6,
                "MB/s",
                loads[0].per_s / 1e6,
            )
        )

    async def _decoding(self, direct: float) -> tuple[list[float], list[float]]:
        """Tokens a CPU-second by the number of streams, without and with stop strings."""
        rates: dict[bool, list[float]] = {False: [], True: []}
        async with serving("detokenizer", self._model, self._core) as worker:
            for streams in self._args.streams:
                for stops in (False, True):
                    say(f"{streams} texts{', with stop strings' if stops else ''}")
                    load = await detokenize(
                        worker,
                        self._ids,
                        streams=streams,
                        seconds=self._args.seconds,
                        stop_strings=STOPS if stops else (),
                    )
                    rates[stops].append(load.per_core_s)
                    name = f"detokenizing, {_streams(streams)}"
                    name += ", with stop strings" if stops else ""
                    self.results.append(
                        Result(name, load.per_core_s, "tokens/CPU-s")
                        if stops
                        else compared(
                            f"{name}, against the library's own stream, called directly",
                            load.per_core_s,
                            "tokens/CPU-s",
                            direct,
                        )
                    )
        return rates[False], rates[True]


def _text() -> str:
    """About TEXT_BYTES."""
    pieces, size = [], 0
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        piece = path.read_text("utf-8", errors="replace")
        pieces.append(piece)
        size += len(piece)
        if size >= TEXT_BYTES:
            break
    return "".join(pieces)


def _batches(text: str, size: int) -> list[list[str]]:
    """Batches of about `size` characters, as many as the text has, at most a megabyte of them."""
    item = max(min(size, ITEM_BYTES), size // MAX_ITEMS)
    batches = []
    for start in range(0, min(len(text) - size, 1 << 20) + 1, size):
        batches.append([text[at : at + item] for at in range(start, start + size, item)])
    return batches


def _request(batch: Sequence[str]) -> EncodeRequest:
    return EncodeRequest(inputs=[EncodeInput(text=text, add_special_tokens=True) for text in batch])


def _ids(model: Path, text: str) -> list[int]:
    """Tokens of the text, none of which ends anything."""
    start = random.Random(0).randrange(len(text) // 2)
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(
        text[start : start + (1 << 15)], add_special_tokens=False
    )
    return list(ids.ids)


def _mb(rates: Any) -> list[float]:
    return [rate / 1e6 for rate in rates]


def _size(size: int) -> str:
    return f"{size} B" if size < 1024 else f"{size >> 10} KiB"


def _streams(count: int) -> str:
    return "one stream" if count == 1 else f"{count} streams"
