"""`baton bench speculation`: what drafts gain where a text repeats itself, and cost where not.

Models of random weights repeat nothing of their prompts, so what is drawn is replaced by a text
that is known: steps, rows and samples are computed as always, and drafts are right where they
foretell the text. Texts are Python's own modules: one that is copied with edits, one that is quoted
between other lines, and one that follows upon another.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from statistics import median
from typing import Any

from baton_loadtest.bench import engines
from baton_loadtest.bench.options import engine, option
from baton_loadtest.child import progress
from baton_loadtest.launch import call, cores
from baton_loadtest.report import Chart, Line, Report, Result
from batonlm.cli.layout import resolve_model
from batonlm.core.errors import BatonError
from batonlm.core.scheduler.events import NewTokens
from batonlm.core.scheduler.plan import ModelRunner, StepPlan, StepResult

PLOTS = True
OPTIONS = (
    *engine(threads=2, shape="25m"),
    option("--batches", (1, 4, 16, 32), "sequences at once"),
    option("--prompt-tokens", 512),
    option("--output-tokens", 192),
    option("--rounds", 3, "of each, interleaved"),
    option("--loose", False, "without exact mode"),
    option("--cpu-time", False, "in seconds of CPU time, where others use the machine, too"),
)

DEADLINE_S = 3600.0
EDITED_EVERY, QUOTED, BETWEEN = 60, 48, 16
"""Tokens from one edit to the next, of a quotation, and between two."""
GOAL, LEAST = 1.8, 0.97
"""Of tokens/s against those without drafts: of one sequence that repeats its prompt, and of all."""
TEXTS = {"edited code": GOAL, "quoted text": GOAL, "other text": 0.0}
"""Goals at a batch of one."""
MODULES = (
    *("argparse", "ast", "asyncio.base_events", "calendar", "cgitb", "codecs", "configparser"),
    *("csv", "dataclasses", "datetime", "decimal", "difflib", "dis", "doctest", "email.message"),
    *("enum", "fractions", "ftplib", "gettext", "heapq", "http.client", "imaplib", "inspect"),
    *("ipaddress", "json.decoder", "logging", "mailbox", "optparse", "pdb", "pickle", "random"),
    *("smtplib", "statistics", "subprocess", "tarfile", "textwrap", "threading", "turtle"),
    *("typing", "unittest.mock", "urllib.parse", "uuid", "zipfile"),
)


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if tokens with and without drafts differ."""
    threads = min(args.threads, len(cores()))
    job = {
        "model": str(engines.folder(args.shape)),
        "threads": threads,
        "exact": not args.loose,
        "batches": args.batches,
        "prompt": args.prompt_tokens,
        "output": args.output_tokens,
        "rounds": args.rounds,
        "cpu": args.cpu_time,
    }
    found = call(run, job, threads=threads, deadline_s=DEADLINE_S)
    results = [Result("threads", threads, "")]
    lines = []
    for text, goal in TEXTS.items():
        ratios = []
        for batch in args.batches:
            one = found[f"{text} {batch}"]
            off, on = (median(one[way]) for way in ("off", "ngram"))
            # Of two runs beside each other, so that a slow minute counts for both.
            pairs = zip(one["ngram"], one["off"], strict=True)
            ratio = median(ours / theirs for ours, theirs in pairs)
            ratios.append(ratio)
            wanted = goal if batch == 1 and goal else LEAST
            name = f"{text}, {batch} at once"
            results += [
                Result(f"{name}: output", on, "tokens/s", off, ratio, wanted, ratio >= wanted),
                Result(f"{name}: tokens of a sequence in a step", one["a step"], ""),
                Result(f"{name}: drafts that were right", one["right"], "%"),
            ]
        lines.append(Line(text, args.batches, ratios))
    chart = Chart("output with drafts", "sequences at once", "of that without", tuple(lines))
    return Report(results, (chart,))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, exact, batches, prompt, output, rounds, cpu.

    Returns by text and batch the tokens/s of each round, off and ngram; how many tokens a sequence
    got in a step, and the percentage of drafts that were right.
    """
    most = max(job["batches"])
    positions = most * (job["prompt"] + job["output"] + engines.GROWTH)
    runner = engines.open_runner(job["model"], job["threads"], positions, exact=job["exact"])
    told = _Told(runner)
    clock = time.process_time if job["cpu"] else time.perf_counter
    found: dict[str, Any] = {}
    for text in TEXTS:
        pairs = _texts(text, most, job["prompt"], job["output"])
        for batch in job["batches"]:
            one: dict[str, Any] = {"off": [], "ngram": []}
            for number in range(job["rounds"]):
                for way in ("off", "ngram") if number % 2 else ("ngram", "off"):
                    speed, steps, right = _answer(told, pairs[:batch], way, clock)
                    one[way].append(speed)
                    if way == "ngram":
                        one |= {"a step": steps, "right": right}
            found[f"{text} {batch}"] = one
            ratio = median(one["ngram"]) / median(one["off"])
            progress(f"{text}, {batch} at once: {ratio:.2f}, {one['a step']:.2f} tokens a step")
    return found


Text = tuple[list[int], list[int]]
"""A prompt and its answer, in token ids."""


def _texts(kind: str, count: int, prompt: int, output: int) -> list[Text]:
    """Of modules of their own each, as far as there are so many."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(resolve_model("")[0] / "tokenizer.json"))
    sources: list[list[int]] = []
    for name in MODULES:
        try:
            source = inspect.getsource(import_module(name))
        except ImportError:
            continue
        # The start of a module is its description, and its end often tests.
        ids = tokenizer.encode(source[len(source) // 8 :], add_special_tokens=False).ids
        if len(ids) >= prompt + 2 * output:
            sources.append(ids)
    found = []
    for i in range(count):
        ids = sources[i % len(sources)]
        other = sources[(i + 1) % len(sources)][i // len(sources) * 50 :]
        given = ids[:prompt]
        if kind == "other text":
            answer = other[prompt : prompt + output]
        elif kind == "edited code":
            answer = []
            for first in range(0, output, EDITED_EVERY):
                place = first % max(1, prompt - EDITED_EVERY)
                answer += [*given[place : place + EDITED_EVERY - 4], *other[first : first + 4]]
        else:
            answer = []
            for number, first in enumerate(range(0, output, QUOTED + BETWEEN)):
                place = number * 131 % max(1, prompt - QUOTED)
                answer += [*other[first : first + BETWEEN], *given[place : place + QUOTED]]
        found.append((given, answer[:output]))
    return found


class _Told:
    """A runner that computes and draws, and gives the tokens of known answers in their place."""

    depth = 1

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.answers: dict[int, Sequence[int]] = {}
        """By sequence id."""
        self._plans: deque[StepPlan] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self.runner.submit(plan)

    def collect(self) -> StepResult:
        result = self.runner.collect()
        rows = [row for chunk in self._plans.popleft().chunks for row in chunk.samples]
        tokens = []
        for row, token in zip(rows, result.tokens, strict=True):
            answer = self.answers[row.sequence_id]
            told = answer[min(row.position, len(answer) - 1)]
            tokens.append(token._replace(token_id=told))
        return replace(result, tokens=tuple(tokens))


def _answer(
    told: _Told, texts: Sequence[Text], way: str, clock: Callable[[], float]
) -> tuple[float, float, float]:
    """Returns tokens/s, tokens that a sequence got in a step, and the percentage of drafts that
    were right; from the first step on in which nothing is prefilled.

    Raises BatonError if an answer is another one.
    """
    output = len(texts[0][1])
    # Places for drafts of the largest batch, too.
    rules = engines.policy(max(2 * len(texts), 32), 2048, beside=64)
    loop = engines.engine_loop(told, replace(rules, speculation=way))
    scheduler = loop.scheduler
    told.answers = {i: answer for i, (_, answer) in enumerate(texts)}
    for i, (prompt, _) in enumerate(texts):
        scheduler.add(engines.attempt(str(i), prompt, output), time.monotonic())
    said: list[list[int]] = [[] for _ in texts]
    began = 0.0
    count = rows = 0
    while scheduler.has_work:
        now = clock()
        plan = loop.plan(now)
        assert plan is not None
        loop.submit(plan)
        _, result = loop.collect()
        scheduler.observe(plan, clock() - now)
        events = loop.apply(result, now)
        made = [e for event in events if isinstance(event, NewTokens) for e in event.tokens]
        for one in made:
            said[int(one.key.request_id)] += one.token_ids
        if plan.work.prefill:
            began = clock()
        else:
            count += sum(len(one.token_ids) for one in made)
            rows += plan.work.rows
    seconds = clock() - began
    if said != [answer for _, answer in texts]:
        raise BatonError("drafts changed an answer")
    right = 100.0
    if scheduler.speculation is not None and scheduler.speculation.drafted:
        right = 100 * scheduler.speculation.accepted / scheduler.speculation.drafted
    return count / seconds, count / rows, right
