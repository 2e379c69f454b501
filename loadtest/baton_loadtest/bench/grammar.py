"""`baton bench grammar`: the cost of compiling a grammar, and of following it token by token.

Models sample answers at temperature 1 in batches; each mask is timed where a step is planned. Steps
with and without masks alternate, on the same model and with equally many sequences.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from baton_loadtest.bench import engines
from baton_loadtest.bench.options import engine, option
from baton_loadtest.child import progress
from baton_loadtest.launch import call, cores
from baton_loadtest.report import Chart, Line, Report, Result, ms
from batonlm.cli.layout import resolve_model
from batonlm.core.request.request import Grammar, GrammarKind, SamplingParams
from batonlm.core.scheduler.plan import Matcher, ModelRunner
from batonlm.grammar.book import Compiled
from batonlm.grammar.compiler import compile_grammar, load_vocabulary

PLOTS = True
OPTIONS = (
    *engine(threads=2, shape="wide"),
    option("--batch", 16, "answers at once"),
    option("--tokens", 120, "of an answer"),
)

DEADLINE_S = 280.0
COMPILED = 5
"""How often each grammar is compiled."""

PROMPT = 16


def measure(args: argparse.Namespace) -> Report:
    """Raises ContenderFailed if a model cannot run."""
    own = engines.folder(args.shape)
    if not (own / "tokenizer.json").is_file():
        _write_tokenizer(own, engines.config_of(own)["vocab_size"])
    threads = min(args.threads, len(cores()))
    job = {"threads": threads, "batch": args.batch, "tokens": args.tokens, "seed": args.seed}
    results: list[Result] = []
    lines: list[Line] = []
    models = {"bundled model": resolve_model("")[0], f"{args.shape}, random weights": own}
    for name, folder in models.items():
        found = call(run, {**job, "model": str(folder)}, threads=threads, deadline_s=DEADLINE_S)
        results += _results(name, found)
        masks = [seconds for one in found["kinds"].values() for seconds in one["masks"]]
        shares = [percent / 1000 for percent in range(0, 1000, 2)]
        lines.append(Line(name, [100 * s for s in shares], [ms(masks, s) for s in shares]))
    chart = Chart("one mask", "% of masks take at most", "ms", tuple(lines))
    return Report(results, (chart,))


def _results(name: str, found: dict[str, Any]) -> list[Result]:
    results = [Result(f"{name}: tokens", found["vocab"], "")]
    every: list[float] = []
    for kind, one in found["kinds"].items():
        masks = one["masks"]
        every += masks
        results += [
            Result(f"{name}, {kind}: compiled", 1000 * median(one["compile"]), "ms"),
            Result(f"{name}, {kind}: mask, p50", ms(masks, 0.5), "ms"),
            Result(f"{name}, {kind}: mask, p99", ms(masks, 0.99), "ms"),
        ]
    free, bound = (1000 * median(found[which]) for which in ("free", "bound"))
    step = f"{name}: step of {found['batch']} under grammars"
    return [
        *results,
        Result(f"{name}, all kinds: mask, p50", ms(every, 0.5), "ms"),
        Result(f"{name}, all kinds: mask, p99", ms(every, 0.99), "ms"),
        Result(f"{name}, all kinds: mask, longest", ms(every, 1.0), "ms"),
        Result(step, bound, "ms", free, bound / free),
    ]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, batch, tokens, seed.

    Returns vocab and batch; kinds: by name, seconds of every compilation and mask; free and bound:
    seconds of steps without and with masks.
    """
    batch = job["batch"]
    positions = batch * (PROMPT + job["tokens"] + 32)
    runner = engines.open_runner(job["model"], job["threads"], positions)
    model = runner.model
    tokenizer = load_vocabulary(
        Path(job["model"]),
        special=(),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )
    kinds: dict[str, Any] = {}
    timed = []
    for kind, grammar in grammars().items():
        compile_s = []
        for _ in range(COMPILED):
            began = time.perf_counter()
            matcher = compile_grammar(tokenizer, grammar)
            compile_s.append(time.perf_counter() - began)
        timed.append(_TimedGrammar(grammar, Compiled(matcher)))
        kinds[kind] = {"compile": compile_s, "masks": timed[-1].masks}
        progress(f"compiled: {kind}")
    for one in timed:
        _answer(runner, [one], job)
    steps: dict[str, list[float]] = {"free": [], "bound": []}
    for _ in range(2):
        steps["free"] += _answer(runner, [], job)
        steps["bound"] += _answer(runner, timed, job)
    return {"vocab": model.vocab_size, "batch": batch, "kinds": kinds, **steps}


class _TimedGrammar:
    """A compiled grammar whose matchers append the seconds of each mask to `masks`."""

    def __init__(self, grammar: Grammar, compiled: Compiled) -> None:
        self.grammar = grammar
        self.masks: list[float] = []
        self._compiled = compiled

    def matcher(self) -> Matcher:
        return _TimedMatcher(self._compiled.matcher(), self.masks)


class _TimedMatcher:
    def __init__(self, matcher: Matcher, masks: list[float]) -> None:
        self._matcher = matcher
        self._masks = masks

    @property
    def stuck(self) -> str:
        return self._matcher.stuck

    def allowed(self, tokens: Sequence[int], first: int) -> bytes:
        began = time.perf_counter()
        mask = self._matcher.allowed(tokens, first)
        self._masks.append(time.perf_counter() - began)
        return mask

    def allowed_behind(
        self, tokens: Sequence[int], first: int, drafts: Sequence[int]
    ) -> list[bytes]:
        return self._matcher.allowed_behind(tokens, first, drafts)


def _answer(
    runner: ModelRunner, grammars: Sequence[_TimedGrammar], job: dict[str, Any]
) -> list[float]:
    """Runs a batch of answers, with the grammars in turn. Returns the seconds of the steps in which
    all had a row."""
    batch = job["batch"]
    loop = engines.engine_loop(runner, engines.policy(batch, batch * (PROMPT + 1)))
    for number in range(batch):
        timed = grammars[number % len(grammars)] if grammars else None
        prompt = [(7 * number + 3 * i) % 200 + 5 for i in range(PROMPT)]
        attempt = replace(
            engines.attempt(str(number), prompt, job["tokens"]),
            sampling=SamplingParams(seed=job["seed"] + number),
            grammar=None if timed is None else timed.grammar,
        )
        loop.scheduler.add(attempt, time.monotonic(), grammar=timed)
    whole = []
    while loop.scheduler.has_work:
        began = time.perf_counter()
        plan = loop.plan(time.monotonic())
        if plan is None:
            break
        loop.submit(plan)
        loop.apply(loop.collect()[1], time.monotonic())
        if len(plan.chunks) == plan.num_tokens == batch:
            whole.append(time.perf_counter() - began)
    return whole


_TEXT = {"type": "string", "maxLength": 24}
_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": _TEXT, "maxItems": 4},
        "mail": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.(com|org)$"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                "right": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "left", "right"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_WIDE = {
    "type": "object",
    "properties": {f"field_{i}": {"anyOf": [_TEXT, {"type": "integer"}]} for i in range(100)},
    "required": [f"field_{i}" for i in range(0, 100, 2)],
}


def grammars() -> dict[str, Grammar]:
    """Returns one grammar of each kind, by name."""
    return {
        "any JSON object": _schema({"type": "object"}),
        "object of 4 fields": _schema(_PERSON),
        "list of objects": _schema({"type": "array", "items": _PERSON, "maxItems": 8}),
        "tree that names itself": _schema(_TREE),
        "100 optional fields": _schema(_WIDE),
        "one of 500 texts": _schema({"enum": [f"option number {i}" for i in range(500)]}),
        "regular expression": Grammar(GrammarKind.REGEX, r"(\w+ ){3,12}\w+[.!?]"),
        "arithmetic in Lark": Grammar(
            GrammarKind.LARK,
            'start: sum\nsum: (sum ("+"|"-"))? product\nproduct: (product ("*"|"/"))? atom\n'
            'atom: /[0-9]{1,6}/ | "(" sum ")"',
        ),
    }


def _write_tokenizer(folder: Path, size: int) -> None:
    """Writes a byte-level tokenizer of `size` tokens: bytes, numbers, blanks, and words of made-up
    syllables with and without a leading space. Its texts are as long as those of a language."""
    draw = random.Random(0)
    special, space = ["<pad>", "<s>", "</s>"], "\u0120"
    tokens = dict.fromkeys([*special, *sorted(ByteLevel.alphabet()), *map(str, range(1000))])
    tokens.update(dict.fromkeys(space * count for count in range(2, 17)))
    tokens.update(dict.fromkeys(['":', '",', '"}', "[]", "{}", "},", space + '"']))
    while len(tokens) < size:
        parts = draw.choices("aeiou", k=draw.randint(1, 4))
        word = "".join(draw.choice("bcdfghklmnprstvwz") + part for part in parts)
        word = draw.choice((word, word.capitalize(), word + draw.choice("nrst")))
        tokens.update(dict.fromkeys((word, space + word)))
    vocab = {token: number for number, token in enumerate(list(tokens)[:size])}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))


def _schema(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
