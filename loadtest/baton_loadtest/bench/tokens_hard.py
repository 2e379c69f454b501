"""What texts meant to be hard cost a tokenizer and its neighbours; what growing chats do not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from baton.v1.tokenizer_pb2 import Chat, ChatMessage, EncodeInput, EncodeRequest
from baton.v1.tokenizer_pb2_grpc import TokenizerStub
from baton_loadtest.bench.process import say
from baton_loadtest.bench.tokens_worker import Worker, encoded_bytes, serving
from baton_loadtest.report import Result, at_most, compared

LARGEST = 1 << 20
"""Bytes, as many as a tokenizer takes if it is not told otherwise."""
HARD_CPU_S = 4.0
BESIDE_MS = 250.0
BESIDE_PAUSE_S = 0.02

HARD = {
    "one letter": "a",
    "spaces": " ",
    "line ends": "\n",
    "digits": "1",
    "NUL": "\0",
    "one word": "thequickbrownfox",
    "combining marks": "e" + "\u0301\u0302\u0303" * 8,
    "joined emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "half-open tokens": "<|",
}
TURNS = 40
TURN_CHARACTERS = 2000


async def beside(worker: Worker) -> list[Result]:
    """A megabyte of each kind, with short requests beside it."""
    stub = TokenizerStub(worker.channel)
    short = EncodeRequest(inputs=[EncodeInput(text="What is the weather like today?")])
    results, waits = [], []
    for name, unit in HARD.items():
        say(f"a megabyte of {name}")
        text = unit * (LARGEST // len(unit.encode()))
        spent = worker.spent_s()
        hard = asyncio.ensure_future(
            encoded_bytes(stub, EncodeRequest(inputs=[EncodeInput(text=text)]))
        )
        while not hard.done():
            began = time.perf_counter()
            await encoded_bytes(stub, short)
            waits.append(time.perf_counter() - began)
            await asyncio.sleep(BESIDE_PAUSE_S)
        await hard
        cost = worker.spent_s() - spent
        results.append(at_most(f"1 MiB of {name}", cost, "CPU-s", HARD_CPU_S))
    slowest = 1000 * max(waits)
    return [*results, at_most("a short request beside them, slowest", slowest, "ms", BESIDE_MS)]


async def growing(model: Path, core: int, text: str) -> list[Result]:
    """A conversation that is encoded again with each turn, with the cache and without."""
    costs = []
    for flags in ((), ("--max-cache-mib", "0")):
        say(f"a growing chat{', without the cache' if flags else ''}")
        async with serving("tokenizer", model, core, *flags) as worker:
            spent = worker.spent_s()
            await _converse(worker, text)
            costs.append(worker.spent_s() - spent)
    name = f"chat of {TURNS} turns, {TURN_CHARACTERS} characters each: cached against not"
    return [compared(name, TURNS / costs[0], "turns/CPU-s", TURNS / costs[1])]


async def _converse(worker: Worker, text: str) -> None:
    stub = TokenizerStub(worker.channel)
    messages: list[ChatMessage] = []
    for turn in range(TURNS):
        said = text[turn * TURN_CHARACTERS : (turn + 1) * TURN_CHARACTERS]
        messages.append(ChatMessage(role=("user", "assistant")[turn % 2], content=said))
        chat = Chat(messages=messages, add_generation_prompt=True)
        await encoded_bytes(stub, EncodeRequest(inputs=[EncodeInput(chat=chat)]))
