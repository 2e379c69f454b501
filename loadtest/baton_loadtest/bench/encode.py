"""`baton bench encode`: what a large job of vectors does to chats on the same machine.

A Baton with an encode worker answers chats at a part of its capacity, in turns alone and beside a
client that wants the vectors of many texts. What is left of the texts then runs by itself. The
model of vectors has random weights: only its shape decides how long it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from baton_loadtest.bench.options import option
from baton_loadtest.bench.overload import LOAD_OPTIONS, FleetLoad, Phase, Stream
from baton_loadtest.child import answer
from baton_loadtest.drive import ANSWERED, HttpLoadClient
from baton_loadtest.launch import call, fleet, peer, say
from baton_loadtest.report import Report, Result, at_most, ms
from batonlm.cli.access import Access
from batonlm.cli.layout import UpOptions, resolve_model

PLOTS = False
OPTIONS = (
    *LOAD_OPTIONS,
    option("--load", 0.4, "chats, as a share of the capacity"),
    option("--texts", 10_000, "of which vectors are wanted"),
    option("--words", 24, "of each text"),
    option("--layers", 4, "of the model of vectors"),
    option("--size", 256, "of its vectors"),
)

NOTICED = 1.1
"""Most that the p99 of chats beside texts may be of that alone."""

NAME = "vectors"
TEXTS_A_REQUEST, AT_ONCE = 64, 4
ROUNDS = 2
MAKE_S, REST_S = 120.0, 900.0
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "so", "on")


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if the fleet answers nothing."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"folder": str(Path(folder, NAME)), "layers": args.layers, "size": args.size}
        call(make_model, job, threads=1, deadline_s=MAKE_S)
        return Report(asyncio.run(_measure(args, job["folder"])))


async def _measure(args: argparse.Namespace, model: str) -> list[Result]:
    options = UpOptions(
        model=args.model,
        transport=args.transport,
        router_flags=("--max-queue-s", str(args.queue_s)),
        embed_model=(model,),
    )
    async with fleet(options) as running, peer(sender) as texts:
        load = FleetLoad(args, running)
        capacity = await load.capacity()
        chats = [Stream(args.load * capacity)]
        alone, beside, jobs = [], [], []
        for _ in range(ROUNDS):
            alone.append(await load.phase("chats alone", args.seconds, streams=chats))
            half = args.texts // ROUNDS
            await texts.ask(router=running.routers[0], texts=half, words=args.words)
            beside.append(await load.phase("chats beside texts", args.seconds, streams=chats))
            jobs.append((await texts.ask(), await texts.ask(wait_s=REST_S)))
            say(f"{jobs[-1][0]['done']} texts beside chats, {jobs[-1][1]['done']} in all")
    # The shortest time of each counts, so that other load on the machine neither hides what texts
    # do nor looks like it.
    first, whole = (
        [min(time_of(phase) for phase in phases) for phases in (beside, alone)]
        for time_of in (_first_ms, _whole_ms)
    )
    together = [then["done"] / then["seconds"] for then, _ in jobs]
    by_itself = [
        (end["done"] - then["done"]) / (end["seconds"] - then["seconds"])
        for then, end in jobs
        if end["done"] > then["done"]
    ]
    return [
        Result("capacity", capacity, "requests/s"),
        Result("chats", args.load * capacity, "requests/s"),
        at_most("chats' first token, p99, beside texts / alone", first[0], "ms", NOTICED, first[1]),
        at_most(
            "chats' whole answer, p99, beside texts / alone", whole[0], "ms", NOTICED, whole[1]
        ),
        at_most(
            "chats refused or failed beside texts",
            min(phase.whole.refused + phase.whole.failed for phase in beside),
            "",
            0,
        ),
        Result("texts beside chats", max(together), "texts/s"),
        Result("texts alone", max(by_itself, default=0.0), "texts/s"),
        Result(
            "the encode worker's CPU beside chats", max(p.cores("encode") for p in beside), "cores"
        ),
        at_most("texts without a vector", sum(end["failed"] for _, end in jobs), "", 0),
    ]


def _first_ms(phase: Phase) -> float:
    return phase.whole.first_token_ms(0.99)


def _whole_ms(phase: Phase) -> float:
    """The p99 of answered requests' time from when they were sent to their end."""
    samples = phase.whole.samples
    return ms([one.ended_s - one.left_s for one in samples if one.end == ANSWERED], 0.99)


def make_model(job: dict[str, Any]) -> dict[str, Any]:
    """Saves a BERT with random weights and the bundled model's tokenizer. job: folder, layers,
    size."""
    import transformers

    folder, size = Path(job["folder"]), job["size"]
    bundled, _ = resolve_model("")
    config = transformers.BertConfig(
        vocab_size=json.loads((bundled / "config.json").read_text())["vocab_size"],
        hidden_size=size,
        intermediate_size=4 * size,
        num_hidden_layers=job["layers"],
        num_attention_heads=max(1, size // 64),
    )
    transformers.BertModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, folder)
    return {}


async def sender() -> None:
    """A client that wants vectors, several requests at a time, at the lowest CPU priority: it
    stands for another machine.

    A command with router (host:port), texts and words starts a job; any other one is answered with
    its texts done and failed, and its seconds, after at most wait_s seconds.
    """
    os.nice(19)
    job = _Job()

    async def handle(command: dict[str, Any]) -> dict[str, Any]:
        nonlocal job
        if "router" in command:
            job = _Job()
            job.start(**command)
            return {}
        if job.running:
            await asyncio.wait(job.running, timeout=command.get("wait_s", 0.0))
        return {"done": job.done, "failed": job.failed, "seconds": job.seconds}

    try:
        await answer(handle)
    finally:
        for task in job.running:
            task.cancel()
        await asyncio.gather(*job.running, return_exceptions=True)


class _Job:
    """Texts whose vectors are wanted."""

    def __init__(self) -> None:
        self.done = self.failed = 0
        self.seconds = 0.0
        """From its start until the newest answer."""
        self.running: list[asyncio.Task[None]] = []

    def start(self, router: str, texts: int, words: int) -> None:
        draw, began = random.Random(5), time.perf_counter()
        waiting = [
            [" ".join(draw.choices(WORDS, k=words)) for _ in range(TEXTS_A_REQUEST)]
            for _ in range(texts // TEXTS_A_REQUEST)
        ]

        async def send() -> None:
            client = HttpLoadClient(Access(router))
            while waiting:
                some = waiting.pop()
                body = {"model": NAME, "input": some, "encoding_format": "base64"}
                got = await client.send(client.post("/v1/embeddings", body), lambda _: None)
                well = got.status == 200
                self.done += len(some) * well
                self.failed += len(some) * (not well)
                self.seconds = time.perf_counter() - began

        self.running = [asyncio.create_task(send()) for _ in range(AT_ONCE)]
