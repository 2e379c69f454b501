"""Many streams at once, greedy and sampled, read as they come."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from batonlm.v1 import inference_pb2
from tests.e2e.relay import PATIENCE_S, Answer, Relay, options

TOKENS = 320
SETTLED = 5
"""Events of every stream before the worker is told to leave."""

Asked = tuple[list[int], inference_pb2.GenerationOptions]


def requests(stop: str = "") -> list[Asked]:
    """30 requests with 32 sequences, so that two workers get 16 each: every other one sampled, two
    of two choices, eight that stop at a text if one is given. No two have a prefix in common."""
    made = []
    for number in range(30):
        wanted = options(
            max_tokens=TOKENS,
            temperature=float(number % 2),
            seed=number,
            n=2 if number % 15 == 7 else 1,
            stop=[stop] if stop and number % 15 in (3, 4, 11, 12) else [],
        )
        made.append((list(range(60 + number, 260 + number)), wanted))
    return made


class Following:
    """Streams that are read as they come, each on a thread of its own."""

    def __init__(self, relay: Relay, asked: Sequence[Asked]) -> None:
        self._relay = relay
        self._settled = threading.Barrier(len(asked) + 1)
        self._pool = ThreadPoolExecutor(len(asked))
        self._answers = [self._pool.submit(self._follow, *one) for one in asked]

    def _follow(self, prompt: list[int], wanted: inference_pb2.GenerationOptions) -> Answer:
        answer, number = Answer(), 0
        try:
            for number, response in enumerate(self._relay.stream(prompt, wanted)):
                answer.take(response.event)
                if number == SETTLED:
                    self._settled.wait(PATIENCE_S)
            if number < SETTLED:
                self._settled.wait(PATIENCE_S)
        except BaseException:
            self._settled.abort()
            raise
        return answer

    def settled(self) -> None:
        """Returns when all are under way. Raises what a stream raised before it was."""
        try:
            self._settled.wait(PATIENCE_S)
        except threading.BrokenBarrierError:
            for answer in self._answers:
                raised = answer.exception(PATIENCE_S)
                if raised is not None and not isinstance(raised, threading.BrokenBarrierError):
                    raise raised from None
            raise

    def answers(self) -> list[Answer]:
        """Of streams that have settled, when they have ended."""
        with self._pool:
            return [answer.result(PATIENCE_S) for answer in self._answers]


def undisturbed(relay: Relay, asked: Sequence[Asked]) -> list[Answer]:
    """What comes of requests when nothing happens."""
    following = Following(relay, asked)
    following.settled()
    return following.answers()
