"""What clients ask under load: the same requests for a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from batonlm.client import Options

Face = Literal["grpc", "http"]
FACES: tuple[Face, ...] = get_args(Face)
TOKENS = (32, 64)
PROMPT_TOKENS = (40, 160)
TOKEN_IDS = (64, 1900)
"""Ordinary tokens of the bundled model."""
WORDS = ("a", "baton", "goes", "from", "hand", "to", "another", "and", "nobody", "drops", "it")


@dataclass(frozen=True)
class Ask:
    """One request. face: how it is sent."""

    number: int
    face: Face
    prompt: str | tuple[int, ...]
    options: Options


def asks(seed: int, count: int, faces: Sequence[Face] = FACES) -> list[Ask]:
    """Half of them greedy and half sampled by a seed, the faces in turn, the same for a seed."""
    draw = random.Random(f"k8s load {seed}")
    return [_ask(draw, number, faces[number // 2 % len(faces)]) for number in range(count)]


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
