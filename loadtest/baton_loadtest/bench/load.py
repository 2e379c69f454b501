"""A closed-loop gRPC load over token-id prompts."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

from baton.rpc.transport import open_channel
from baton.v1 import inference_pb2_grpc
from baton_loadtest.drive import greedy

REQUEST_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked: every prompt has its own random tokens, so that no prefix is shared."""

    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int
    concurrency: int

    @classmethod
    def random(
        cls, seed: int, requests: int, prompt_tokens: int, output_tokens: int, concurrency: int
    ) -> Load:
        draw = random.Random(seed)
        prompts = tuple(
            tuple(draw.randrange(64, 1900) for _ in range(prompt_tokens)) for _ in range(requests)
        )
        return cls(prompts, output_tokens, concurrency)


@dataclass(slots=True)
class Outcome:
    """What came back. Times in seconds."""

    seconds: float
    tokens: int
    first_token_s: list[float] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def first_token(self, share: float) -> float:
        """The time to first token that this share of requests stays below."""
        ordered = sorted(self.first_token_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def drive(address: str, load: Load) -> Outcome:
    """Runs the load to its end, `concurrency` requests at a time."""
    waiting = iter(enumerate(load.prompts))
    outcome = Outcome(0.0, 0, token_ids=[[] for _ in load.prompts])
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        began = time.perf_counter()

        async def worker() -> None:
            for index, prompt in waiting:
                asked = time.perf_counter()
                async for response in stub.Generate(
                    greedy(prompt, load.output_tokens), timeout=REQUEST_TIMEOUT_S
                ):
                    ids = response.event.delta.token_ids
                    if ids and not outcome.token_ids[index]:
                        outcome.first_token_s.append(time.perf_counter() - asked)
                    outcome.token_ids[index].extend(ids)

        await asyncio.gather(*(worker() for _ in range(load.concurrency)))
        outcome.seconds = time.perf_counter() - began
    outcome.tokens = sum(map(len, outcome.token_ids))
    return outcome
