"""Requests of all kinds, and the one right answer to each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from random import Random

from batonlm.core.request.attempt import Attempt
from batonlm.core.request.request import Request, SamplingParams, StopParams, TokenPrompt
from batonlm.detokenizer.text import DetokenizeOptions, StreamedText
from batonlm.router.request.texts import PROMPT_TAIL
from tests.core.attempts import VOCAB_SIZE, expected
from tests.sim.workers import vocabulary

SHAPES = 24
"""Different requests: few, so that their right answers are made once."""


@dataclass(frozen=True)
class Asked:
    """A request, its tokens and texts by choice."""

    request: Request
    token_ids: dict[int, tuple[int, ...]]
    texts: dict[int, str]


@dataclass
class Got:
    """What a client read."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)


@cache
def asked(shape: int) -> Asked:
    """One of SHAPES: greedy or sampled, one or two choices, some with a stop string."""
    draw = Random(f"request {shape}")
    prompt = tuple(draw.randrange(4, VOCAB_SIZE) for _ in range(draw.choice((3, 9, 20, 40))))
    n = draw.choice((1, 1, 2))
    sampling = SamplingParams(temperature=float(draw.random() < 0.5), seed=shape)
    max_tokens = draw.choice((1, 4, 12, 30))
    stop = StopParams(max_tokens, ignore_eos=True)
    whole = expected(Attempt("r", 0, tuple(range(n)), prompt, len(prompt), sampling, stop))
    stop_string = _part(_text(prompt, whole[0], "")[1], draw) if draw.random() < 0.4 else ""
    said = {choice: _text(prompt, ids, stop_string) for choice, ids in whole.items()}
    request = Request(
        TokenPrompt(prompt),
        n=n,
        sampling=sampling,
        seed=shape,
        max_tokens=max_tokens,
        stop_strings=(stop_string,) if stop_string else (),
        ignore_eos=True,
    )
    return Asked(
        request,
        {choice: tuple(whole[choice][:count]) for choice, (count, _) in said.items()},
        {choice: text for choice, (_, text) in said.items()},
    )


def _text(prompt: tuple[int, ...], token_ids: list[int], stop_string: str) -> tuple[int, str]:
    """How many tokens there are up to a stop string, and their text."""
    stops = (stop_string,) if stop_string else ()
    options = DetokenizeOptions(stop_strings=stops, prompt_tail_ids=prompt[-PROMPT_TAIL:])
    text = StreamedText(vocabulary(), options)
    text.append(0, token_ids, last=True)
    news = text.take(1 << 20)
    return (news.stop.position + 1 if news.stop else len(token_ids)), news.text


def _part(text: str, draw: Random) -> str:
    """Three characters from the later half, if there are any."""
    start = draw.randrange(len(text) // 2, len(text)) if len(text) > 6 else len(text)
    return text[start : start + 3]
