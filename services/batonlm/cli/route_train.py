"""`baton route train`: makes the policy of a name with a small and a large model.

    baton route train --data asked.jsonl --kind classifier --quality 0.95 --out policy.json

Each line of the data is a JSON object with a `prompt`, and either how good both models' answers are
(`small` and `large`, from 0 to 1; or `suffices`, true or false), or the `right` answer. With --ask
a running Baton's two models are asked for answers and confidences; answers that equal the right
one, but for white space around them, are good.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batonlm.client import Client
from batonlm.core.errors import InvalidArgument
from batonlm.core.request.attempt import Logprobs
from batonlm.core.routing.cascade import (
    DEFAULT_TOKENS,
    MOST_TOKENS,
    Policy,
    PolicyKind,
    policy_document,
)
from batonlm.core.routing.cascade_training import Curve, Example, trained
from batonlm.core.routing.documents import checked_number, checked_object

MAX_LINES = 1_000_000
MAX_LINE_BYTES = 1 << 20
AT_ONCE = 16
ANSWER_S = 120.0
LONGEST_ANSWER = 512
SHARES = (0.1, 0.25, 0.5, 0.75)
"""Of requests, for which the curve is told."""
_KEYS = ("prompt", "right", "small", "large", "suffices", "logprob", "margin")


@dataclass(frozen=True, slots=True)
class Question:
    """A line of the data."""

    prompt: str
    right: str | None = None
    small: float | None = None
    large: float | None = None
    logprob: float | None = None
    """The small model's confidence of this kind, from 0 to 1, as all of them are."""
    margin: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("for baton route train")
    own.add_argument("--data", metavar="FILE", type=Path, help="questions, one JSON object a line")
    own.add_argument(
        "--kind", choices=[kind.value for kind in PolicyKind], default=PolicyKind.LOGPROB.value,
        help="what says how sure the small model is (%(default)s)",
    )  # fmt: skip
    own.add_argument(
        "--tokens", type=int, default=DEFAULT_TOKENS,
        help="of the small model's answer, which logprob and margin look at (%(default)s)",
    )  # fmt: skip
    aim = own.add_mutually_exclusive_group()
    aim.add_argument(
        "--quality", type=float, help="this part of the large model's score is to be kept"
    )
    aim.add_argument(
        "--share", type=float, help="this share of requests may be asked of the large model"
    )
    own.add_argument("--out", metavar="FILE", type=Path, help="where the policy is written")
    own.add_argument("--json", metavar="FILE", type=Path, help="where the curve is written")
    own.add_argument("--ask", metavar="HOST:PORT", help="the gRPC address of a running Baton")
    own.add_argument("--small", metavar="MODEL", default="small", help="its small model")
    own.add_argument("--large", metavar="MODEL", default="large", help="its large model")


def run(args: argparse.Namespace) -> int:
    """Raises BatonError."""
    if args.data is None or args.out is None:
        raise InvalidArgument("needs --data and --out", field="data")
    for name in ("quality", "share"):
        if getattr(args, name) is not None:
            checked_number(getattr(args, name), name, 0.0, 1.0)
    if args.quality is None and args.share is None:
        raise InvalidArgument("needs --quality or --share", field="quality")
    checked_number(args.tokens, "tokens", 1, MOST_TOKENS)
    kind = PolicyKind(args.kind)
    questions = list(read(args.data))
    if args.ask:
        with Client(args.ask, timeout_s=ANSWER_S) as client:
            questions = asked(client, questions, args.small, args.large, args.tokens)
    policy, curve = trained(
        kind, examples(questions, kind),
        tokens=args.tokens, quality=args.quality, share=args.share,
    )  # fmt: skip
    told = described(policy, curve, len(questions))
    _write(args.out, policy_document(policy) | {"trained": told["at"]})
    if args.json is not None:
        _write(args.json, told)
    print(table(told))
    return 0


def read(file: Path) -> Iterator[Question]:
    """Yields the questions of a file. Raises InvalidArgument naming the line."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if number > MAX_LINES or len(line) > MAX_LINE_BYTES:
                    raise InvalidArgument(f"line {number} is one too many, or too long")
                if line.strip():
                    yield _question(line, f"line {number}")
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}", field="data") from None


def _question(line: bytes, where: str) -> Question:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidArgument("is not JSON", field=where) from None
    table = checked_object(document, where, _KEYS)
    for name in ("prompt", "right"):
        if not isinstance(table.get(name, ""), str) or (name == "prompt" and name not in table):
            raise InvalidArgument("must be a text", field=f"{where}.{name}")
    numbers = {
        name: checked_number(table[name], f"{where}.{name}", 0.0, 1.0)
        for name in ("small", "large", "logprob", "margin")
        if name in table
    }
    if "suffices" in table:
        if not isinstance(table["suffices"], bool) or "small" in table or "large" in table:
            raise InvalidArgument("must be true or false, alone", field=f"{where}.suffices")
        numbers |= {"small": float(table["suffices"]), "large": 1.0}
    return Question(table["prompt"], table.get("right"), **numbers)


def examples(questions: Sequence[Question], kind: PolicyKind) -> list[Example]:
    """Raises InvalidArgument for a question without scores."""
    found = []
    for number, each in enumerate(questions, 1):
        if each.small is None or each.large is None:
            text = "needs `small` and `large`, or `suffices`, or `right` with --ask"
            raise InvalidArgument(text, field=f"data, question {number}")
        confidence = None if kind is PolicyKind.CLASSIFIER else getattr(each, kind.value)
        found.append(Example(each.prompt, each.small, each.large, confidence))
    return found


def asked(
    client: Client, questions: Sequence[Question], small: str, large: str, tokens: int
) -> list[Question]:
    """Asks both models of a running Baton every question, greedily. Raises BatonError."""

    def ask(question: Question) -> Question:
        if question.right is None:
            raise InvalidArgument("needs the `right` answer", field="data")
        good, confidences = [], {}
        for model in (small, large):
            answer = client.chat(
                question.prompt, model=model, temperature=0.0, max_tokens=LONGEST_ANSWER,
                top_logprobs=2,
            ).read()  # fmt: skip
            good.append(float(answer.text.strip() == question.right.strip()))
            if model == small:
                confidences = confidences_of(answer.choices[0].logprobs, tokens)
        return Question(question.prompt, question.right, *good, **confidences)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, questions))


def confidences_of(logprobs: Sequence[Any], tokens: int) -> dict[str, float]:
    """Returns the confidences of an answer by their kinds' names, as a router computes them.
    logprobs: TokenLogprobs with two alternatives each."""
    entries = [
        Logprobs(each.token.logprob, tuple((top.token_id, top.logprob) for top in each.top))
        for each in logprobs
    ]
    found = {}
    for kind in (PolicyKind.LOGPROB, PolicyKind.MARGIN):
        with suppress(TypeError):
            found[kind.value] = float(Policy(kind, 0.0, tokens).of_answers([entries]))  # type: ignore[arg-type]
    return found


def described(policy: Policy, curve: Curve, count: int) -> dict[str, Any]:
    """Returns what the curve says, as a JSON document: at the policy's threshold, beside random
    choice at the same share; for each model alone; and for some shares."""
    at = curve.at(policy.threshold)
    return {
        "kind": policy.kind.value,
        "threshold": policy.threshold,
        "examples": count,
        "small": curve.small,
        "large": curve.large,
        "recovered": curve.recovered(),
        "at": {"share": at.share, "score": at.score, "random": curve.random(at.share)},
        "shares": [
            {"share": share, "score": curve.score(share), "random": curve.random(share)}
            for share in SHARES
        ],
        "curve": [[point.share, point.score] for point in curve.points],
    }


def table(told: dict[str, Any]) -> str:
    """Returns the document of `described` as lines for a terminal."""
    at = told["at"]
    lines = [
        f"{'asks the large model':<24}{'score':>8}{'by chance':>11}",
        f"{'never':<24}{told['small']:>8.3f}",
        *(
            f"{row['share']:<24.0%}{row['score']:>8.3f}{row['random']:>11.3f}"
            for row in told["shares"]
        ),
        f"{'always':<24}{told['large']:>8.3f}",
        f"{at['share']:<24.1%}{at['score']:>8.3f}{at['random']:>11.3f}  <- the policy",
    ]
    return "\n".join(lines)


def _write(file: Path, document: dict[str, Any]) -> None:
    """Raises InvalidArgument."""
    try:
        file.write_text(json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}", field="out") from None
    print(f"wrote {file}", file=sys.stderr)
