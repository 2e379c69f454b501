"""`baton bench grammar`: what it costs to compile a grammar, and to follow it token by token.

Models draw answers at temperature 1 in batches; each mask is timed where a step is planned. Steps
with and without masks take turns, on the same model and with as many sequences.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from baton.cli.layout import resolve_model
from baton.core.request.attempt import Attempt
from baton.core.request.request import Grammar, SamplingParams, StopParams
from baton.core.scheduler.plan import Matcher, ModelRunner
from baton.grammar.compiler import compile_grammar
from baton.grammar.matcher import Compiled
from baton.grammar.vocabulary import load
from baton_loadtest.bench import shapes
from baton_loadtest.bench.child import progress
from baton_loadtest.bench.grammar_asks import asks, write_tokenizer
from baton_loadtest.bench.process import call, cores
from baton_loadtest.bench.serving import open_loop, open_runner, policy
from baton_loadtest.report import Chart, Line, Report, Result, quantile

DEADLINE_S = 280.0
COMPILED = 5
"""Times that each grammar is compiled."""

PROMPT = 16


def measure(args: argparse.Namespace) -> Report:
    """Raises ContenderFailed when a model cannot run."""
    bundled = resolve_model("")[0]
    models = {"bundled model": bundled, f"{args.shape}, random weights": shapes.folder(args.shape)}
    results: list[Result] = []
    lines: list[Line] = []
    for name, folder in models.items():
        own = folder / "tokenizer.json"
        if not own.is_file():
            write_tokenizer(folder, shapes.config(folder)["vocab_size"])
        job = {
            "model": str(folder),
            "threads": min(args.threads, cores()),
            "batch": args.batch,
            "tokens": args.tokens,
            "seed": args.seed,
        }
        found = call("grammar", job, threads=job["threads"], deadline_s=DEADLINE_S)
        results += _results(name, found)
        masks = [seconds for one in found["kinds"].values() for seconds in one["masks"]]
        shares = [percent / 1000 for percent in range(0, 1000, 2)]
        lines.append(Line(name, [100 * s for s in shares], _ms(masks, shares)))
    chart = Chart("one mask", "% of masks take at most", "ms", tuple(lines))
    return Report(results, (chart,))


def _results(name: str, found: dict[str, Any]) -> list[Result]:
    said = [Result(f"{name}: tokens", found["vocab"], "")]
    every: list[float] = []
    for kind, one in found["kinds"].items():
        every += one["masks"]
        said.append(Result(f"{name}, {kind}: compiled", 1000 * median(one["compile"]), "ms"))
        said += [
            Result(f"{name}, {kind}: mask, p{percent}", value, "ms")
            for percent, value in zip((50, 99), _ms(one["masks"], (0.5, 0.99)), strict=True)
        ]
    p50, p99, most = _ms(every, (0.5, 0.99, 1.0))
    free, bound = (1000 * median(found[which]) for which in ("free", "bound"))
    batch = found["batch"]
    return [
        *said,
        Result(f"{name}, all kinds: mask, p50", p50, "ms"),
        Result(f"{name}, all kinds: mask, p99", p99, "ms"),
        Result(f"{name}, all kinds: mask, longest", most, "ms"),
        Result(f"{name}: step of {batch} under grammars", bound, "ms", free, bound / free),
    ]


def _ms(seconds: Sequence[float], shares: Sequence[float]) -> list[float]:
    return [1000 * quantile(seconds, share) for share in shares]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, batch, tokens, seed.

    Returns vocab and batch; kinds: by name, seconds of every compilation and mask; free and bound:
    seconds of steps without and with masks.
    """
    batch, tokens = job["batch"], job["tokens"]
    positions = batch * (PROMPT + tokens + 32)
    runner = open_runner(job["model"], job["threads"], positions, exact=True)
    model = runner.model
    tokenizer = load(
        Path(job["model"]),
        special=(),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )
    kinds: dict[str, Any] = {}
    timed = []
    for kind, grammar in asks().items():
        compile_s = []
        for _ in range(COMPILED):
            began = time.perf_counter()
            matcher = compile_grammar(tokenizer, grammar)
            compile_s.append(time.perf_counter() - began)
        timed.append(Timed(grammar, Compiled(matcher)))
        kinds[kind] = {"compile": compile_s, "masks": timed[-1].masks}
        progress(f"compiled: {kind}")
    for one in timed:
        _answer(runner, [one], job)
    steps: dict[str, list[float]] = {"free": [], "bound": []}
    for _ in range(2):
        steps["free"] += _answer(runner, [], job)
        steps["bound"] += _answer(runner, timed, job)
    return {"vocab": model.vocab_size, "batch": batch, "kinds": kinds, **steps}


class Timed:
    """A CompiledGrammar whose matchers say how long each mask took. masks: in seconds."""

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


def _answer(runner: ModelRunner, grammars: Sequence[Timed], job: dict[str, Any]) -> list[float]:
    """A batch of answers, the grammars in turn. Seconds of the steps in which all had a row."""
    batch = job["batch"]
    loop = open_loop(runner, policy(batch, batch * (PROMPT + 1)))
    for number in range(batch):
        timed = grammars[number % len(grammars)] if grammars else None
        prompt = tuple((7 * number + 3 * i) % 200 + 5 for i in range(PROMPT))
        asked = Attempt(
            request_id=str(number),
            attempt=0,
            choices=(0,),
            token_ids=prompt,
            num_prompt_tokens=PROMPT,
            sampling=SamplingParams(seed=job["seed"] + number),
            stop=StopParams(max_tokens=job["tokens"], ignore_eos=True),
            grammar=None if timed is None else timed.grammar,
        )
        loop.scheduler.add(asked, time.monotonic(), grammar=timed)
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
