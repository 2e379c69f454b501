"""The requests that every contender of a benchmark gets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_TOKEN, LAST_TOKEN = 3, 7999
"""Drawn token ids: beyond the special ones, within any vocabulary of some size."""


@dataclass(frozen=True, slots=True)
class Workload:
    """prompts: token ids. outputs: how many tokens each is answered with, exactly."""

    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]

    @classmethod
    def draw(
        cls,
        seed: int,
        requests: int,
        prompt_tokens: tuple[int, int],
        output_tokens: tuple[int, int],
        vocab_size: int,
    ) -> Workload:
        """Lengths are uniform between two bounds, both included. No two prompts share a prefix."""
        draw = random.Random(seed)
        end = min(LAST_TOKEN + 1, vocab_size)
        prompts, outputs = [], []
        for _ in range(requests):
            length = draw.randint(*prompt_tokens)
            prompts.append(tuple(draw.randrange(FIRST_TOKEN, end) for _ in range(length)))
            outputs.append(draw.randint(*output_tokens))
        return cls(tuple(prompts), tuple(outputs))

    @classmethod
    def from_json(cls, said: dict[str, Sequence[Sequence[int]]]) -> Workload:
        prompts = tuple(tuple(prompt) for prompt in said["prompts"])
        return cls(prompts, tuple(said["outputs"]))  # type: ignore[arg-type]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.outputs)

    @property
    def longest(self) -> int:
        """Positions of the longest sequence."""
        lengths = zip(self.prompts, self.outputs, strict=True)
        return max(len(prompt) + output for prompt, output in lengths)
