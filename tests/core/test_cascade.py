"""Policies of a small and a large model: confidences, the file's form, and training."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.attempt import Logprobs
from batonlm.core.request.request import ChatPrompt, Message, TextPrompt, TokenPrompt
from batonlm.core.routing.aliases import parse, render
from batonlm.core.routing.cascade import (
    MAX_THRESHOLD,
    Policy,
    PolicyKind,
    cascade_document,
    cascade_from,
    features,
    policy_document,
    policy_from,
    prompt_text,
)
from batonlm.core.routing.cascade_training import Example, chosen, curve, fit, trained

HALF, TENTH = math.log(0.5), math.log(0.1)


def test_a_confidence_is_of_the_first_tokens_of_all_choices() -> None:
    first = [Logprobs(0.0, ((1, 0.0), (2, -50.0))), Logprobs(HALF, ((1, HALF), (2, HALF)))]
    later = [Logprobs(-90.0, ((1, -90.0), (2, -90.0)))] * 5
    assert Policy(PolicyKind.LOGPROB, 0.5, 2).of_answers([first + later]) == pytest.approx(0.5**0.5)
    assert Policy(PolicyKind.MARGIN, 0.5, 2).of_answers([first + later]) == pytest.approx(0.5)
    both = Policy(PolicyKind.LOGPROB, 0.5, 1).of_answers([first, [Logprobs(TENTH)]])
    assert both == pytest.approx(0.1**0.5)
    assert Policy(PolicyKind.LOGPROB, 0.5).of_answers([[], []]) is None
    assert Policy(PolicyKind.LOGPROB, 0.5).of_answers([[Logprobs(-math.inf)]]) == 0.0


@settings(max_examples=30)
@given(st.text(max_size=100), st.sampled_from([1, 64, 2048]))
def test_features_have_a_length_of_one_and_stay_the_same(text: str, size: int) -> None:
    found = features(text, size)
    assert found == features(text, size)
    assert all(0 <= place < size for place in found)
    assert not found or sum(x * x for x in found.values()) == pytest.approx(1.0)


def test_a_classifier_reads_the_newest_message_of_the_user() -> None:
    messages = [Message("user", "old"), Message("assistant", "x"), Message("user", "new")]
    assert prompt_text(ChatPrompt(tuple(messages))) == "new"
    assert prompt_text(TextPrompt("a" * 10_000)) == "a" * 4096
    assert prompt_text(TokenPrompt((1, 2))) is None
    assert Policy(PolicyKind.CLASSIFIER, 0.5, weights=(1.0,)).of_prompt(TokenPrompt((1,))) is None


POLICY = {"kind": "logprob", "threshold": 0.5, "tokens": 8}
CLASSIFIER = {"kind": "classifier", "threshold": 0.5, "bias": 0.5, "weights": [1.0, -2.0]}
UPSTREAM = {"address": "cluster:50051", "key_file": "/keys/one"}


@pytest.mark.parametrize("policy", [POLICY, CLASSIFIER])
@pytest.mark.parametrize("upstream", [{}, {"upstream": UPSTREAM}])
def test_what_is_written_is_read(policy: dict[str, Any], upstream: dict[str, Any]) -> None:
    document = {"model": "large", "policy": policy} | upstream
    assert cascade_document(cascade_from(document, "it")) == document
    text = json.dumps({"aliases": {"auto": {"models": {"small": 1}, "cascade": document}}})
    assert parse(render(parse(text))) == parse(text)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"kind": "pickle"}, "it.kind"),
        ({"kind": None}, "it.kind"),
        ({"threshold": -0.1}, "it.threshold"),
        ({"threshold": MAX_THRESHOLD + 1}, "it.threshold"),
        ({"threshold": float("nan")}, "it.threshold"),
        ({"threshold": True}, "it.threshold"),
        ({"tokens": 0}, "it.tokens"),
        ({"tokens": 1.5}, "it.tokens"),
        ({"weights": [1.0]}, "it.weights"),
        ({"other": 1}, "it"),
    ],
)
def test_a_policy_that_says_something_else_is_refused(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        policy_from(POLICY | changed, "it")
    assert caught.value.field == field


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": []},
        {"weights": ["1"]},
        {"weights": [float("inf")]},
        {"weights": [0.0] * 20_000},
        {"weights": {"a": 1}},
        {"bias": None},
        {"tokens": 3},
    ],
)
def test_a_classifier_has_its_numbers_and_no_others(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        policy_from(CLASSIFIER | changed, "it")


@pytest.mark.parametrize(
    "upstream",
    [{}, {"address": "cluster"}, {"address": "a b:1"}, {"address": "http://x:1/"}, {"address": 1},
     {"address": "x:1", "key_file": 3}, {"address": "x:1", "token": "secret"}, "x:1"],
)  # fmt: skip
def test_an_upstream_has_an_address(upstream: object) -> None:
    with pytest.raises(InvalidArgument):
        cascade_from({"model": "large", "policy": POLICY, "upstream": upstream}, "it")


def asked(count: int, seed: int = 0) -> list[Example]:
    """Prompts of which the small model gets nearly all that are about cats, and few others. Its
    confidence follows how good it is, with noise."""
    draw, found = random.Random(seed), []
    for number in range(count):
        easy = draw.random() < 0.6
        topic = draw.choice(["cat", "kitten"] if easy else ["tensor", "manifold"])
        small = float(draw.random() < (0.95 if easy else 0.1))
        confidence = 0.5 * small + 0.5 * draw.random()
        text = f"What is {number} about the {topic}?"
        found.append(Example(text, small, float(draw.random() < 0.97), confidence))
    return found


@pytest.mark.parametrize("kind", [PolicyKind.LOGPROB, PolicyKind.CLASSIFIER])
def test_a_policy_beats_chance_on_what_it_was_not_chosen_on(kind: PolicyKind) -> None:
    examples = asked(800)
    policy, found = trained(kind, examples, tokens=16, quality=0.95)
    at = found.at(policy.threshold)
    assert found.small < 0.75 < found.large
    assert at.share < 0.75 and at.score > 0.85 * found.large
    assert at.score > found.random(at.share) + 0.05
    assert (found.recovered() or 0.0) > 0.6
    assert policy == trained(kind, examples, tokens=16, quality=0.95)[0], "it can be made again"
    assert policy_from(policy_document(policy), "it") == policy
    cheap, found = trained(kind, examples, tokens=16, share=0.2)
    assert found.at(cheap.threshold).share < 0.35


def test_a_curve_goes_from_always_small_to_always_large() -> None:
    examples = [Example("a", 1, 1, 0.9), Example("b", 0, 1, 0.2), Example("c", 1, 0, 0.2)]
    found = curve(examples, lambda each: each.confidence or 0.0)
    assert [p.share for p in found.points] == pytest.approx([0.0, 2 / 3, 1.0])
    assert [p.score for p in found.points] == pytest.approx([2 / 3] * 3)
    assert found.points[1].threshold == pytest.approx(0.55)
    assert found.recovered() is None
    assert found.at(0.0).share == 0.0 and found.at(0.2).share == 0.0
    assert found.at(0.21).share == pytest.approx(2 / 3) and found.at(MAX_THRESHOLD).share == 1.0
    assert chosen(found, quality=1.0).share == 0.0
    assert chosen(found, share=0.5).share == 0.0


def test_an_example_of_which_nothing_can_be_learned() -> None:
    bias, weights = fit([Example("", 1.0, 1.0)] * 20)
    assert bias > 0 and not any(map(math.isnan, weights))
    with pytest.raises(InvalidArgument, match="more examples"):
        trained(PolicyKind.CLASSIFIER, asked(20), tokens=1, share=0.5)
    with pytest.raises(InvalidArgument, match="margin"):
        missing = [Example(each.prompt, each.small, each.large) for each in asked(400)]
        trained(PolicyKind.MARGIN, missing, tokens=1, share=0.5)
