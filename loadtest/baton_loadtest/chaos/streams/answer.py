"""What one stream gave, and whether that is what another one gave; asks nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import grpc

from baton.v1 import inference_pb2

PARTS = ("tokens", "text", "log-probabilities", "ends")
"""What is compared: token ids; text by its bytes; log-probabilities with their tokens' bytes; and
finish reasons, stop strings and usage."""


@dataclass(slots=True)
class Answer:
    """By choice. times: when it was asked and when each event came, in seconds of one clock.

    ends: finish reason and stop string. usage: prompt and output tokens. failed: the code that
    ended the stream early, with gRPC's words for it.
    """

    times: list[float]
    request_id: str = ""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[bytes]] = field(default_factory=dict)
    ends: dict[int, tuple[int, str]] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    failed: grpc.StatusCode | None = None
    words: str = ""

    def take(self, event: inference_pb2.GenerationEvent, now: float) -> None:
        self.times.append(now)
        match event.WhichOneof("event"):
            case "accepted":
                self.request_id = event.accepted.request_id
            case "finished":
                self.usage = (event.finished.prompt_tokens, event.finished.completion_tokens)
            case "delta":
                self._take_delta(event.delta)

    def _take_delta(self, delta: inference_pb2.ChoiceDelta) -> None:
        choice = delta.choice
        self.tokens.setdefault(choice, []).extend(delta.token_ids)
        self.text[choice] = self.text.get(choice, "") + delta.text
        self.logprobs.setdefault(choice, []).extend(
            entry.SerializeToString(deterministic=True) for entry in delta.logprobs
        )
        if delta.finish_reason:
            self.ends[choice] = (delta.finish_reason, delta.stop_string)

    @property
    def finished(self) -> bool:
        return self.usage is not None and self.failed is None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    def silence(self, since: float) -> float:
        """The longest time without an event, of those that ended after a time."""
        gaps = [later - earlier for earlier, later in pairwise(self.times) if later > since]
        return max(gaps, default=0.0)

    def gaps(self) -> list[float]:
        """Between events with tokens: the first one, the acceptance, is none."""
        return [later - earlier for earlier, later in pairwise(self.times[2:])]


def differences(got: Answer, expected: Answer) -> set[str]:
    """The parts in which a stream differs from its reference."""
    found = {
        "tokens": got.tokens == expected.tokens,
        "text": _bytes(got.text) == _bytes(expected.text),
        "log-probabilities": got.logprobs == expected.logprobs,
        "ends": (got.ends, got.usage) == (expected.ends, expected.usage),
    }
    return {part for part in PARTS if not found[part]}


def is_shifted(got: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether tokens differ by a run that was left out, or told twice: all others are there."""
    short, long = sorted((got, expected), key=len)
    if len(short) == len(long):
        return False
    same = next(
        (i for i, pair in enumerate(zip(short, long, strict=False)) if len(set(pair)) > 1),
        len(short),
    )
    left = len(short) - same
    return list(short[same:]) == list(long[len(long) - left :])


def _bytes(text: dict[int, str]) -> dict[int, bytes]:
    return {choice: said.encode() for choice, said in text.items()}
