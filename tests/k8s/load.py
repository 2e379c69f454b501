"""Continuous load of real clients over gRPC and HTTP, each answer compared with its reference.

A stream fails when it ends in any error, before its first token too: clients here ask once, unless
a test lets them do what clients of a leaving router do. Knows nothing of clusters.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import httpx

from baton.client import AsyncClient
from baton.client.requests import Options
from baton.client.tries import Retries
from baton.core.errors import BatonError
from baton.core.request import Delta, Finished

Face = Literal["grpc", "http"]
FACES: tuple[Face, ...] = get_args(Face)
TOKENS = (32, 64)
PROMPT_TOKENS = (40, 160)
TOKEN_IDS = (64, 1900)
"""Ordinary tokens of the bundled model."""
WORDS = [
    "a",
    "baton",
    "goes",
    "from",
    "hand",
    "to",
    "hand",
    "while",
    "the",
    "others",
    "run",
    "and",
    "nobody",
    "drops",
    "it",
    "on",
    "the",
    "way",
]
STREAM_S = 120.0
BEGIN_S = 60.0
ONCE = Retries(most=0)


@dataclass(frozen=True)
class Ask:
    """One request. face: how it is sent."""

    number: int
    face: Face
    prompt: str | tuple[int, ...]
    options: Options


@dataclass
class Tally:
    """failed, wrong: a sentence for each. retryable: those of the failed that a client may well ask
    again. served: by worker's address, when a first token was seen that came by it, in wall time.
    """

    answered: int = 0
    failed: list[str] = field(default_factory=list)
    retryable: int = 0
    wrong: list[str] = field(default_factory=list)
    served: dict[str, float] = field(default_factory=dict)

    def check(self, at_least: int = 1, *, may_fail: int = 0) -> None:
        """Raises AssertionError unless all were answered, with the tokens they should have.

        may_fail: so many may be told to try again.
        """
        told = "\n".join((self.failed + self.wrong)[:20])
        fine = self.retryable == len(self.failed) <= may_fail and not self.wrong
        assert fine, (
            f"{self.answered} answered, {len(self.failed)} failed, {len(self.wrong)} wrong:\n{told}"
        )
        assert self.answered >= at_least, f"only {self.answered} answered"


def asks(seed: int, count: int, faces: Sequence[Face] = FACES) -> list[Ask]:
    """Half of them greedy and half sampled by a seed, the faces in turn, the same for a seed."""
    draw = random.Random(f"k8s load {seed}")
    return [_ask(draw, number, faces[number // 2 % len(faces)]) for number in range(count)]


class Clients:
    """Those of one router Service: host:port of its gRPC and of its HTTP.

    Each gRPC client has a connection of its own, so that several spread over several routers.
    """

    def __init__(self, grpc: str, http: str, *, count: int = 1, retries: Retries = ONCE) -> None:
        self._grpc, self._http, self._count, self._retries = grpc, http, count, retries
        self._stack = AsyncExitStack()
        self._of_grpc: Iterator[AsyncClient] = iter(())
        self._of_http = httpx.AsyncClient()

    async def __aenter__(self) -> Clients:
        made = [
            await self._stack.enter_async_context(AsyncClient(self._grpc, retries=self._retries))
            for _ in range(self._count)
        ]
        self._of_grpc = itertools.cycle(made)
        self._of_http = await self._stack.enter_async_context(
            # Proxies of the environment lead elsewhere.
            httpx.AsyncClient(base_url=f"http://{self._http}", timeout=STREAM_S, trust_env=False)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def tokens(self, ask: Ask, tally: Tally | None = None) -> list[int]:
        """The answer's token ids. tally: told who served. Raises BatonError, httpx.HTTPError or
        Refused.
        """
        if ask.face == "http":
            return await self._over_http(ask)
        found: list[int] = []
        first = 0.0
        async for event in next(self._of_grpc).generate(
            ask.prompt, timeout_s=STREAM_S, **ask.options
        ):
            if isinstance(event, Delta):
                first = first or time.time()
                found.extend(event.token_ids)
            elif isinstance(event, Finished) and tally is not None and event.stages is not None:
                for worker in event.stages.workers:
                    tally.served.setdefault(worker.address, first)
        return found

    async def _over_http(self, ask: Ask) -> list[int]:
        body = {"model": "", "prompt": _for_json(ask.prompt), "stream": True, **ask.options}
        found: list[int] = []
        done = False
        async with self._of_http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                again = answer.status_code in (429, 503)
                said = (await answer.aread()).decode()
                raise Refused(f"{answer.status_code}: {said}", retryable=again)
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: "):
                    continue
                if data == "[DONE]":
                    done = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise Refused(data, retryable='"code":"unavailable"' in data)
                for choice in event["choices"]:
                    found.extend(choice.get("token_ids", ()))
        if not done:
            raise Refused("the stream broke off", retryable=True)
        return found


class Refused(Exception):
    """What HTTP said in place of an answer's end. retryable: to try again."""

    def __init__(self, said: str, *, retryable: bool = False) -> None:
        super().__init__(said)
        self.retryable = retryable


async def references(clients: Clients, wanted: Sequence[Ask]) -> list[list[int]]:
    """Their answers one at a time, while nothing else happens."""
    found = [await clients.tokens(ask) for ask in wanted]
    for ask, tokens in zip(wanted, found, strict=True):
        assert len(tokens) == ask.options["max_tokens"], (ask.number, len(tokens))
    return found


class Load:
    """The same requests over and over, so many at a time."""

    def __init__(
        self, clients: Clients, wanted: Sequence[Ask], expected: Sequence[list[int]], streams: int
    ) -> None:
        self.tally = Tally()
        self._clients, self._streams = clients, streams
        self._pairs = itertools.cycle(list(zip(wanted, expected, strict=True)))
        self._enough = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Tally]:
        """Streams run while the block does; those that run when it ends are followed to their end.

        The block begins when as many streams have ended as run at a time.
        """
        workers = [asyncio.create_task(self._work()) for _ in range(self._streams)]
        try:
            await self.more(self._streams, BEGIN_S)
            yield self.tally
        finally:
            self._enough = True
            await asyncio.gather(*workers)

    async def more(self, count: int, within_s: float = 120.0) -> None:
        """Returns when this many more streams have ended, well or badly."""
        until = time.monotonic() + within_s
        aim = self._ended + count
        while self._ended < aim:
            assert time.monotonic() < until, f"{aim - self._ended} of {count} streams did not end"
            await asyncio.sleep(0.05)

    @property
    def _ended(self) -> int:
        return self.tally.answered + len(self.tally.failed) + len(self.tally.wrong)

    async def _work(self) -> None:
        while not self._enough:
            ask, expected = next(self._pairs)
            try:
                async with asyncio.timeout(STREAM_S):
                    got = await self._clients.tokens(ask, self.tally)
            except (BatonError, httpx.HTTPError, Refused, TimeoutError) as error:
                self.tally.retryable += _retryable(error)
                self.tally.failed.append(f"{ask.face} {ask.number}: {type(error).__name__} {error}")
                # A client that is refused at once does not ask in a circle.
                await asyncio.sleep(0.2)
                continue
            if got == expected:
                self.tally.answered += 1
            else:
                self.tally.wrong.append(f"{ask.face} {ask.number}: {_differs(got, expected)}")


def _ask(draw: random.Random, number: int, face: Face) -> Ask:
    options: Options = {
        "max_tokens": draw.randint(*TOKENS),
        "temperature": 1.0 if number % 2 else 0.0,
        "seed": draw.getrandbits(31),
        "ignore_eos": True,
        "return_token_ids": True,
    }
    # A text in every second pair, so that tokenizers have work; a word of it is some tokens.
    if number // 4 % 2:
        words = (draw.choice(WORDS) for _ in range(draw.randint(*PROMPT_TOKENS) // 3))
        return Ask(number, face, " ".join(words), options)
    length = draw.randint(*PROMPT_TOKENS)
    prompt = tuple(draw.randrange(*TOKEN_IDS) for _ in range(length))
    return Ask(number, face, prompt, options)


def _for_json(prompt: str | tuple[int, ...]) -> str | list[int]:
    return prompt if isinstance(prompt, str) else list(prompt)


def _retryable(error: Exception) -> bool:
    """What an ordinary client would ask again elsewhere: told to, or the connection broke."""
    if isinstance(error, BatonError):
        return error.retryable
    if isinstance(error, Refused):
        return error.retryable
    return isinstance(error, httpx.TransportError)


def _differs(got: Sequence[int], expected: Sequence[int]) -> str:
    same = next(
        (i for i, pair in enumerate(zip(got, expected, strict=False)) if len(set(pair)) > 1),
        min(len(got), len(expected)),
    )
    return f"{len(got)} tokens of {len(expected)}, equal up to {same}"
