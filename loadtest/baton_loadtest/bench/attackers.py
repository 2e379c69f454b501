"""Connections of one tenant that ask for more than their share, again as soon as they are answered.

A process of its own, so that what it costs is not the measuring client's, and of the lowest
priority: it stands for other machines. Until the end of its input it asks, whatever the answers
say of coming back later; then it says how many there were of each status.

    prompts   the longest prompts that a body can hold
    faults    half of them too long for the model, half with a grammar that is none, another each
              time
    texts     the longest texts, to /tokenize
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

from baton.cli.http_client import ConnectionLost
from baton.core.errors import BatonError
from baton.rpc.address import split
from baton_loadtest.drive import HttpConnection

LONGEST_BYTES = (1 << 20) - 1024
"""Of a text that a body has room for."""

TOO_LONG_BYTES = 1 << 16
PAUSE_S = 0.05
"""Before a lost connection is made again."""

ATTACKS = {"prompts": 14, "faults": 14, "texts": 60}
"""How many connections each has: what was once enough to starve everybody else."""

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "so", "on")


def _text(draw: random.Random, size: int) -> str:
    """No text like another: nothing of it was encoded before."""
    start = " ".join(draw.choices(_WORDS, k=512))
    return (start * (size // len(start) + 1))[:size]


def _request(attack: str, draw: random.Random, header: str) -> bytes:
    asked: dict[str, Any]
    match attack:
        case "prompts":
            path, asked = "/v1/completions", {"prompt": _text(draw, LONGEST_BYTES)}
        case "texts":
            path, asked = "/tokenize", {"prompt": _text(draw, LONGEST_BYTES)}
        case _ if draw.random() < 0.5:
            path, asked = "/v1/completions", {"prompt": _text(draw, TOO_LONG_BYTES)}
        case _:
            pattern = f"({draw.getrandbits(64)}"
            path, asked = (
                "/v1/completions",
                {"prompt": "x", "structured_outputs": {"regex": pattern}},
            )
    body = json.dumps(asked).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{header}content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _one(
    target: str, attack: str, header: str, draw: random.Random, statuses: Counter[int]
) -> None:
    """For ever."""
    connection: HttpConnection | None = None
    try:
        while True:
            try:
                if connection is None or not connection.usable:
                    connection = await HttpConnection.open(*split(target, "targets"))
                request = _request(attack, draw, header)
                statuses[(await connection.ask(request, lambda _: None)).status] += 1
            except (OSError, BatonError, ConnectionLost):
                statuses[0] += 1
                await asyncio.sleep(PAUSE_S)
    finally:
        if connection is not None:
            connection.close()


async def main(args: argparse.Namespace) -> None:
    os.nice(19)
    statuses: Counter[int] = Counter()
    targets = args.targets.split(",")
    header = f"authorization: Bearer {args.key}\r\n" if args.key else ""
    asking = [
        asyncio.create_task(
            _one(targets[n % len(targets)], args.attack, header, random.Random(n), statuses)
        )
        for n in range(ATTACKS[args.attack])
    ]
    try:
        await asyncio.to_thread(sys.stdin.read)
    finally:
        for task in asking:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*asking, return_exceptions=True)
    print(json.dumps({"statuses": statuses}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", required=True, help="host:port,host:port")
    parser.add_argument("--attack", required=True, choices=tuple(ATTACKS))
    parser.add_argument("--key", default="")
    asyncio.run(main(parser.parse_args()))
