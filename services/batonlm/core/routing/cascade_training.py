"""Makes a cascade's policy of data: fits a classifier, chooses a threshold, and draws the curve.

Examples are divided by a hash of their prompt: classifiers are fitted to one part, the threshold is
chosen on the second, and what it costs and yields is measured on the third. The other kinds have
nothing to fit, and choose on the first part as well.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

from batonlm.core.errors import InvalidArgument
from batonlm.core.routing.cascade import MAX_THRESHOLD, Policy, PolicyKind, features, probability

FEATURES = 1 << 11
EPOCHS = 60
RATE = 0.5
DECAY = 1e-3
"""The penalty of large weights, for each example."""
FEWEST = 20
"""Examples of each part; with fewer, nothing is made."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt that both models were asked."""

    prompt: str
    small: float
    """How good the small model's answer is, from 0 to 1."""
    large: float
    confidence: float | None = None
    """Of the small model's answer; None: not known, which is right for classifiers only."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Examples by what they are for."""

    fit: list[Example]
    choose: list[Example]
    test: list[Example]


@dataclass(frozen=True, slots=True)
class Point:
    """What one threshold costs and yields."""

    threshold: float
    highest: float
    """The highest confidence here with which the large model is asked; below 0: it never is."""
    share: float
    """Of requests that the large model answers."""
    score: float
    """The mean of how good the answers are."""


@dataclass(frozen=True, slots=True)
class Curve:
    """What each threshold costs and yields on some examples, from always small to always large."""

    points: list[Point]

    @property
    def small(self) -> float:
        """The score of the small model alone."""
        return self.points[0].score

    @property
    def large(self) -> float:
        return self.points[-1].score

    def random(self, share: float) -> float:
        """Returns the score where so large a share, drawn by chance, asks the large model."""
        return self.small + share * (self.large - self.small)

    def score(self, share: float) -> float:
        """Returns the score of a share, drawn by chance between the thresholds on its two sides."""
        after = next(point for point in self.points if point.share >= share)
        before = [point for point in self.points if point.share <= share][-1]
        if after.share == before.share:
            return before.score
        part = (share - before.share) / (after.share - before.share)
        return before.score + part * (after.score - before.score)

    def recovered(self) -> float | None:
        """Returns the part of the large model's advantage that is kept, as a mean over all shares:
        0.5 by chance. None where there is no advantage."""
        advantage = self.large - self.small
        if advantage <= 0:
            return None
        pairs = zip(self.points, self.points[1:], strict=False)
        area = sum((b.share - a.share) * (a.score + b.score) / 2 for a, b in pairs)
        return (area - self.small) / advantage

    def at(self, threshold: float) -> Point:
        """Returns what the threshold costs and yields here."""
        return [point for point in self.points if point.highest < threshold][-1]


def divided(examples: Sequence[Example]) -> Parts:
    """Raises InvalidArgument for too few."""
    parts = Parts([], [], [])
    for example in examples:
        place = blake2b(example.prompt.encode(errors="replace"), digest_size=8).digest()
        number = int.from_bytes(place, "big") % 5
        (parts.fit if number < 2 else parts.choose if number < 3 else parts.test).append(example)
    if min(map(len, (parts.fit, parts.choose, parts.test))) < FEWEST:
        raise InvalidArgument(f"must have more examples: about {8 * FEWEST} at least", field="data")
    return parts


def fit(examples: Sequence[Example], seed: int = 0) -> tuple[float, tuple[float, ...]]:
    """Returns the bias and weights of a logistic regression that says whether the small model's
    answer is as good as the large one's: by stochastic gradient descent with steps that shrink for
    each weight (Adagrad). Equal data and seed give equal numbers."""
    bias, weights = 0.0, [0.0] * FEATURES
    bias_seen, seen = 1e-8, [1e-8] * FEATURES
    rows = [(features(each.prompt, FEATURES), each.small >= each.large) for each in examples]
    order = random.Random(seed)
    for _ in range(EPOCHS):
        order.shuffle(rows)
        for found, label in rows:
            total = bias + sum(weights[place] * x for place, x in found.items())
            error = 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, total)))) - label
            bias_seen += error * error
            bias -= RATE * error / math.sqrt(bias_seen)
            for place, x in found.items():
                slope = error * x + DECAY * weights[place]
                seen[place] += slope * slope
                weights[place] -= RATE * slope / math.sqrt(seen[place])
    return round(bias, 6), tuple(round(weight, 6) for weight in weights)


def curve(examples: Sequence[Example], confidence: Callable[[Example], float]) -> Curve:
    """Returns the curve of the examples. Thresholds lie halfway between two confidences."""
    ordered = sorted(((confidence(each), each) for each in examples), key=lambda pair: pair[0])
    score = sum(each.small for each in examples)
    count, total = 0, len(examples)
    points = [Point(0.0, -1.0, 0.0, score / total)]
    groups = [(value, list(group)) for value, group in groupby(ordered, key=lambda pair: pair[0])]
    for (value, group), following in zip(groups, [*groups[1:], None], strict=True):
        score += sum(each.large - each.small for _, each in group)
        count += len(group)
        threshold = MAX_THRESHOLD if following is None else (value + following[0]) / 2
        points.append(Point(threshold, value, count / total, score / total))
    return Curve(points)


def chosen(found: Curve, *, quality: float | None = None, share: float | None = None) -> Point:
    """Returns the point that asks the large model least and still keeps this part of its score
    (quality), or the best one that asks it for no larger share of requests. Give one of both."""
    if quality is not None:
        return next(p for p in found.points if p.score >= quality * found.large or p.share == 1.0)
    assert share is not None
    allowed = [point for point in found.points if point.share <= share]
    return max(allowed, key=lambda point: (point.score, -point.share))


def trained(
    kind: PolicyKind,
    examples: Sequence[Example],
    *,
    tokens: int,
    quality: float | None = None,
    share: float | None = None,
) -> tuple[Policy, Curve]:
    """Returns the policy, and the curve of the examples that nothing was chosen on. tokens: what
    the examples' confidences are of. quality, share: see `chosen`. Raises InvalidArgument."""
    parts = divided(examples)
    bias, weights = 0.0, tuple[float, ...]()
    if kind is PolicyKind.CLASSIFIER:
        bias, weights = fit(parts.fit)
        choose = parts.choose
    else:
        choose = parts.fit + parts.choose
        if any(each.confidence is None for each in examples):
            raise InvalidArgument(f"has no {kind.value} for some prompts", field="data")

    def confidence(example: Example) -> float:
        if kind is PolicyKind.CLASSIFIER:
            return probability(bias, weights, example.prompt)
        assert example.confidence is not None
        return example.confidence

    point = chosen(curve(choose, confidence), quality=quality, share=share)
    threshold = round(point.threshold, 9)
    if kind is PolicyKind.CLASSIFIER:
        policy = Policy(kind, threshold, bias=bias, weights=weights)
    else:
        policy = Policy(kind, threshold, tokens)
    return policy, curve(parts.test, confidence)
