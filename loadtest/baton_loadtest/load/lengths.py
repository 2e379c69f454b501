"""How long prompts and answers are: quantile tables of real traffic under a name; draws from them,
and knows no prompt.

Where the numbers come from (facts about published traces; the traces are no part of Baton):

chat   all 19 366 requests of the conversation part of the Azure LLM inference trace 2023 (of the
       Splitwise paper, CC-BY 4.0)
code   all 8 819 requests of its code part
rag    the 7 373 requests of Mooncake's conversation trace (12 031 requests, FAST 2025, Apache-2.0)
       whose blocks, but for the first, no earlier request had: somebody asks something about a long
       text. A stand-in: the trace does not say which of them were retrieval
agent  the other 4 658, which go on from an earlier request: what a turn adds to the prompt (the
       3 780 where that is more than nothing), and what it is answered. A stand-in likewise

Prompt and answer are drawn independently: that they hang together in real traffic is in the traces
only.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass

from baton.core.errors import InvalidArgument

SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """tokens: the length that each of SHARES stays at or below; straight lines in between."""

    tokens: tuple[float, ...]

    def at(self, share: float) -> float:
        """share: from 0 to 1."""
        place = min(bisect_right(SHARES, share), len(SHARES) - 1)
        low, high = SHARES[place - 1], SHARES[place]
        here, there = self.tokens[place - 1], self.tokens[place]
        return here + (there - here) * (share - low) / (high - low)

    def draw(self, draw: random.Random, scale: float) -> int:
        """At least one token."""
        return max(1, round(self.at(draw.random()) * scale))


@dataclass(frozen=True, slots=True)
class Lengths:
    prompt: Quantiles
    output: Quantiles


def _quantiles(*tokens: float) -> Quantiles:
    return Quantiles(tokens)


NAMED = {
    "chat": Lengths(
        _quantiles(2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2735, 4083, 4142, 14050),
        _quantiles(7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 1000),
    ),
    "code": Lengths(
        _quantiles(3, 17, 75, 147, 385, 770, 1075, 1469, 1909, 2433, 3193, 5194, 7315, 7436, 7437),
        _quantiles(6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 252, 1899),
    ),
    "rag": Lengths(
        _quantiles(
            *(891, 894, 897, 905, 1092, 1756, 3914, 5264, 7417, 10775),
            *(15871, 25561, 38538, 89869, 126195),
        ),
        _quantiles(1, 3, 9, 22, 97, 214, 293, 351, 398, 445, 499, 585, 674, 1019, 2000),
    ),
    "agent": Lengths(
        _quantiles(1, 4, 6, 8, 11, 16, 25, 46, 135, 463, 2218, 5059, 7907, 19077, 91467),
        _quantiles(1, 3, 13, 29, 104, 212, 287, 349, 401, 453, 513, 618, 739, 1338, 2000),
    ),
}


def named(name: str) -> Lengths:
    """Raises InvalidArgument."""
    if name not in NAMED:
        raise InvalidArgument(f"{name!r} is none of {', '.join(NAMED)}", field="lengths.of")
    return NAMED[name]


def fixed(prompt_tokens: int, output_tokens: int) -> Lengths:
    """All the same."""
    each = len(SHARES)
    return Lengths(Quantiles((prompt_tokens,) * each), Quantiles((output_tokens,) * each))
