"""A name that asks a small model first, and a large one where the small one is not confident.

A policy says how confident, from the log-probabilities of the small model's answer or from the
prompt alone, and from which confidence on the small model answers. `cascade_training` makes one of
data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from zlib import crc32

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.attempt import Logprobs
from batonlm.core.request.request import ChatPrompt, Prompt, TextPrompt
from batonlm.core.routing.documents import checked_name, checked_number, checked_object

MOST_TOKENS = 1024
DEFAULT_TOKENS = 32
MAX_FEATURES = 1 << 14
"""Numbers of a classifier."""
MAX_THRESHOLD = 2.0
"""Above the highest confidence, so that the large model always answers."""
MAX_NUMBER = 1e6
"""Magnitude of a classifier's number."""
PROMPT_CHARACTERS = 4096
"""How much of the end of a prompt a classifier looks at."""
MAX_PATH = 4096


class PolicyKind(Enum):
    """What a confidence, a number from 0 to 1, is."""

    LOGPROB = "logprob"
    """Of the small model's first tokens: e to the power of their mean log-probability."""
    MARGIN = "margin"
    """Of the same tokens: the mean difference between the likeliest token's probability and that of
    the next one."""
    CLASSIFIER = "classifier"
    """The probability, by a linear classifier over the words of the prompt, that the small model's
    answer is as good as the large one's."""


@dataclass(frozen=True, slots=True)
class Policy:
    """When the small model's answer is good enough."""

    kind: PolicyKind
    threshold: float
    """The least confidence with which it is."""
    tokens: int = DEFAULT_TOKENS
    """How many tokens of each choice are looked at: the answer is held so long. Not for
    classifiers."""
    bias: float = 0.0
    weights: tuple[float, ...] = ()
    """Of a classifier: one for each feature."""

    @property
    def asks_first(self) -> bool:
        """Whether the small model has to begin its answer."""
        return self.kind is not PolicyKind.CLASSIFIER

    @property
    def top_logprobs(self) -> int:
        """Alternatives that each token's log-probability needs."""
        return 2 if self.kind is PolicyKind.MARGIN else 0

    def suffices(self, confidence: float) -> bool:
        return confidence >= self.threshold

    def of_answers(self, answers: Sequence[Sequence[Logprobs]]) -> float | None:
        """Returns the confidence of the first tokens of all choices together; None without any."""
        found = [entry for answer in answers for entry in answer[: self.tokens]]
        if not found:
            return None
        if self.kind is PolicyKind.LOGPROB:
            return math.exp(min(0.0, sum(entry.logprob for entry in found) / len(found)))
        return sum(map(_margin, found)) / len(found)

    def of_prompt(self, prompt: Prompt) -> float | None:
        """Returns a classifier's confidence; None for a prompt of token ids."""
        text = prompt_text(prompt)
        return None if text is None else probability(self.bias, self.weights, text)


def _margin(entry: Logprobs) -> float:
    best = [math.exp(min(0.0, logprob)) for _, logprob in entry.top[:2]]
    return max(0.0, best[0] - sum(best[1:])) if best else math.exp(min(0.0, entry.logprob))


@dataclass(frozen=True, slots=True)
class Upstream:
    """Another Baton, which serves the large model."""

    address: str
    """host:port of its gRPC API."""
    key_file: str = ""
    """A file with the API key alone; empty: it asks for none."""
    ca_file: str = ""
    """A PEM file of the CA to trust; empty: plain text, which keys are only sent to loopback in."""


@dataclass(frozen=True, slots=True)
class Cascade:
    """The second stage of a name."""

    model: str
    """The large model. The name's own models are the small ones."""
    policy: Policy
    upstream: Upstream | None = None
    """Where the large model is; None: at this router."""


def prompt_text(prompt: Prompt) -> str | None:
    """Returns the text that says how hard a prompt is: the newest message of its user, or the end
    of a text; None for token ids."""
    match prompt:
        case ChatPrompt(messages=messages):
            texts = [message.content for message in messages if message.role == "user"]
            return texts[-1][-PROMPT_CHARACTERS:] if texts else ""
        case TextPrompt(text=text):
            return text[-PROMPT_CHARACTERS:]
    return None


_WORD = re.compile(r"\w+|[^\w\s]")


def features(text: str, size: int) -> dict[int, float]:
    """Returns the features of a text by their place below `size`, with a length of 1 in all: its
    words, pairs of words, how long its numbers are, and how long it is."""
    found: dict[int, float] = {}
    for gram in _grams(text[-PROMPT_CHARACTERS:].lower()):
        code = crc32(gram.encode(errors="replace"))
        place = code % size
        # Grams that share a place cancel out as often as they add up.
        found[place] = found.get(place, 0.0) + (1.0 if code >> 31 else -1.0)
    length = math.sqrt(sum(value * value for value in found.values()))
    return {place: value / length for place, value in found.items() if value} if length else {}


def _grams(text: str) -> Iterator[str]:
    words = _WORD.findall(text)
    yield f"\0length {len(words).bit_length()}"
    before = "\0start"
    for word in words:
        yield word
        yield f"{before} {word}"
        if word.isdecimal():
            word = f"\0number {len(word)}"
            yield word
            yield f"{before} {word}"
        before = word


def probability(bias: float, weights: Sequence[float], text: str) -> float:
    """Returns what a linear classifier says of a text, from 0 to 1."""
    total = bias + sum(weights[place] * x for place, x in features(text, len(weights)).items())
    return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, total))))


def policy_from(document: object, where: str) -> Policy:
    """Returns the policy of a JSON document. Raises InvalidArgument whose field is the place in
    it."""
    table = checked_object(
        document, where, ("kind", "threshold", "tokens", "bias", "weights", "trained")
    )
    try:
        kind = PolicyKind(table.get("kind"))
    except ValueError:
        kinds = ", ".join(each.value for each in PolicyKind)
        raise InvalidArgument(f"must be one of {kinds}", field=f"{where}.kind") from None
    threshold = checked_number(table.get("threshold"), f"{where}.threshold", 0.0, MAX_THRESHOLD)
    if kind is not PolicyKind.CLASSIFIER:
        for name in ("bias", "weights"):
            if name in table:
                raise InvalidArgument("is for classifiers only", field=f"{where}.{name}")
        tokens = table.get("tokens", DEFAULT_TOKENS)
        if not isinstance(tokens, int) or isinstance(tokens, bool):
            raise InvalidArgument("must be a whole number", field=f"{where}.tokens")
        checked_number(tokens, f"{where}.tokens", 1, MOST_TOKENS)
        return Policy(kind, threshold, tokens)
    if "tokens" in table:
        raise InvalidArgument("is not for classifiers", field=f"{where}.tokens")
    bias = checked_number(table.get("bias"), f"{where}.bias", -MAX_NUMBER, MAX_NUMBER)
    weights = table.get("weights")
    if not isinstance(weights, list) or not 1 <= len(weights) <= MAX_FEATURES:
        text = f"must be a list of 1 to {MAX_FEATURES} numbers"
        raise InvalidArgument(text, field=f"{where}.weights")
    found = [checked_number(x, f"{where}.weights", -MAX_NUMBER, MAX_NUMBER) for x in weights]
    return Policy(kind, threshold, bias=bias, weights=tuple(found))


def policy_document(policy: Policy) -> dict[str, Any]:
    """Returns the JSON document that `policy_from` reads."""
    document: dict[str, Any] = {"kind": policy.kind.value, "threshold": policy.threshold}
    if policy.asks_first:
        return document | {"tokens": policy.tokens}
    return document | {"bias": policy.bias, "weights": list(policy.weights)}


def cascade_from(document: object, where: str) -> Cascade:
    """Returns the cascade of a JSON document. Raises InvalidArgument whose field is the place."""
    table = checked_object(document, where, ("model", "policy", "upstream"))
    return Cascade(
        checked_name(table.get("model"), f"{where}.model"),
        policy_from(table.get("policy"), f"{where}.policy"),
        _upstream(table["upstream"], f"{where}.upstream") if "upstream" in table else None,
    )


def _upstream(document: object, where: str) -> Upstream:
    table = checked_object(document, where, ("address", "key_file", "ca_file"))
    for name in ("address", "key_file", "ca_file"):
        text = table.get(name, "")
        if not (isinstance(text, str) and len(text) <= MAX_PATH and text.isprintable()):
            raise InvalidArgument("must be a text", field=f"{where}.{name}")
    if not re.fullmatch(r"[^\s/,]+:[0-9]{1,5}", table.get("address", "")):
        raise InvalidArgument("must be host:port", field=f"{where}.address")
    return Upstream(table["address"], table.get("key_file", ""), table.get("ca_file", ""))


def cascade_document(cascade: Cascade) -> dict[str, Any]:
    """Returns the JSON document that `cascade_from` reads."""
    document: dict[str, Any] = {
        "model": cascade.model,
        "policy": policy_document(cascade.policy),
    }
    if (upstream := cascade.upstream) is not None:
        given = {"key_file": upstream.key_file, "ca_file": upstream.ca_file}
        document["upstream"] = {
            "address": upstream.address,
            **{name: text for name, text in given.items() if text},
        }
    return document
