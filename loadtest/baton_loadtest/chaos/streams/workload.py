"""The streams of a run, all drawn from its seed; asks nobody."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from baton.v1 import inference_pb2, types_pb2

SHORTEST, LONGEST = 128, 256
"""Output tokens of a stream. Stop strings are looked for after the shortest."""

PROMPT_WORDS = (20, 90)
PROMPT_TOKENS = (60, 300)
TOKEN_IDS = (64, 1900)
"""Ordinary tokens of the bundled model."""

STOP_STRINGS = ("and", "ing", "ed", "ou", "ea", "th", "al", "is")
"""Two of them end nearly every text between the shortest and the longest."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Kind(Enum):
    """What sort of stream it is; the value is its name in tables."""

    GREEDY = "greedy"
    SAMPLED = "sampled, with penalties"
    STOPPED = "with stop strings"
    LOGPROBS = "with log-probabilities"
    CHOICES = "with n = 2"


KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One stream: what is asked, and how many choices come of it."""

    number: int
    kind: Kind
    request: inference_pb2.GenerateRequest


def streams(seed: int, count: int) -> list[Wanted]:
    """As many streams of all kinds, half of texts and half of token ids, the same for a seed."""
    draw = random.Random(f"streams {seed}")
    return [_stream(draw, number) for number in range(count)]


def short(draw: random.Random) -> Wanted:
    """A stream of two tokens after a prompt that nobody asked before."""
    ids = [draw.randrange(*TOKEN_IDS) for _ in range(PROMPT_TOKENS[0])]
    options = inference_pb2.GenerationOptions(
        stop=types_pb2.StopParams(max_tokens=2, ignore_eos=True)
    )
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=ids), options=options
    )
    return Wanted(-1, Kind.GREEDY, request)


def _stream(draw: random.Random, number: int) -> Wanted:
    kind = KINDS[number % len(KINDS)]
    request = inference_pb2.GenerateRequest(
        options=inference_pb2.GenerationOptions(
            sampling=types_pb2.SamplingParams(temperature=0.0, seed=draw.getrandbits(53)),
            stop=types_pb2.StopParams(max_tokens=draw.randint(SHORTEST, LONGEST), ignore_eos=True),
            return_token_ids=True,
        )
    )
    if draw.random() < 0.5:
        request.text = " ".join(_word(draw) for _ in range(draw.randint(*PROMPT_WORDS)))
    else:
        length = draw.randint(*PROMPT_TOKENS)
        request.token_ids.ids.extend(draw.randrange(*TOKEN_IDS) for _ in range(length))
    _OF_KIND[kind](request.options, draw)
    return Wanted(number, kind, request)


def _word(draw: random.Random) -> str:
    return "".join(draw.choice(LETTERS) for _ in range(draw.randint(1, 8)))


def _greedy(options: inference_pb2.GenerationOptions, draw: random.Random) -> None:
    pass


def _sampled(options: inference_pb2.GenerationOptions, draw: random.Random) -> None:
    options.sampling.temperature = draw.choice((0.7, 1.0, 1.3))
    options.sampling.top_p = 0.95
    options.sampling.repetition_penalty = 1.1
    options.sampling.frequency_penalty = 0.1


def _stopped(options: inference_pb2.GenerationOptions, draw: random.Random) -> None:
    options.sampling.temperature = draw.choice((0.0, 1.0))
    options.stop.min_tokens = SHORTEST
    options.stop.max_tokens = LONGEST
    options.stop.stop_strings.extend(draw.sample(STOP_STRINGS, 2))
    options.stop.include_stop_string = draw.random() < 0.5


def _logprobs(options: inference_pb2.GenerationOptions, draw: random.Random) -> None:
    options.sampling.temperature = draw.choice((0.0, 1.0))
    options.sampling.top_logprobs = 3


def _choices(options: inference_pb2.GenerationOptions, draw: random.Random) -> None:
    options.sampling.temperature = 1.0
    options.n = 2


_OF_KIND: dict[Kind, Callable[[inference_pb2.GenerationOptions, random.Random], None]] = {
    Kind.GREEDY: _greedy,
    Kind.SAMPLED: _sampled,
    Kind.STOPPED: _stopped,
    Kind.LOGPROBS: _logprobs,
    Kind.CHOICES: _choices,
}
