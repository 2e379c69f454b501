"""`baton bench speculation`: what drafts gain where a text repeats itself, and cost where not.

Models of random weights repeat nothing of their prompts, so what is drawn is replaced by a text
that is known: steps, rows and samples are computed as always, and drafts are right where they
foretell the text. Texts are Python's own modules: one that is copied with edits, one that is quoted
between other lines, and one that follows upon another.

With `--own` a model gives its own greedy answers to requests that the bundled model's corpus has:
to write a program again with one name changed, to quote part of a text, and to tell a story.
"""

from __future__ import annotations

import argparse
import inspect
import random
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple

from baton_loadtest.bench import engines
from baton_loadtest.bench.options import engine, option
from baton_loadtest.child import progress
from baton_loadtest.launch import call, cores
from baton_loadtest.report import Chart, Line, Report, Result
from batonlm.cli.layout import resolve_model
from batonlm.core.errors import BatonError
from batonlm.core.scheduler.events import NewTokens
from batonlm.core.scheduler.plan import ModelRunner, StepPlan, StepResult

GOAL, LEAST = 1.8, 0.97
"""Of tokens/s against those without drafts: of one sequence that repeats its prompt, and of all."""
TEXTS = {"edited code": GOAL, "quoted text": GOAL, "other text": 0.0}
"""Goals at a batch of one."""
PLOTS = True
OPTIONS = (
    *engine(threads=2, shape="25m"),
    option("--batches", (1, 4, 16, 32), "sequences at once"),
    option("--prompt-tokens", 512),
    option("--output-tokens", 192),
    option("--rounds", 3, "of each, interleaved"),
    option("--texts", tuple(TEXTS), f"some of {', '.join(TEXTS)}"),
    option("--loose", False, "without exact mode"),
    option("--own", False, "answers of the model itself, of an instruction-tuned one"),
    option("--draft-model", "", "folder or hub id of a small model that drafts, as another way"),
    option("--cpu-time", False, "in seconds of CPU time, where others use the machine, too"),
)

DEADLINE_S = 3600.0
EDITED_EVERY, QUOTED, BETWEEN = 60, 48, 16
"""Tokens from one edit to the next, of a quotation, and between two."""
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
    draft = str(engines.folder(args.draft_model)) if args.draft_model else ""
    job = {
        "model": str(engines.folder(args.shape)),
        "threads": threads,
        "draft": draft,
        "texts": [text for text in TEXTS if text in args.texts],
        "own": args.own,
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
    for text in job["texts"]:
        goal = TEXTS[text]
        for way in _ways(draft)[1:]:
            by = f"{text}, by a model" if way == "draft" else text
            ratios = []
            for batch in args.batches:
                one = found[f"{text} {batch}"]
                off, on = median(one["off"]["speed"]), median(one[way]["speed"])
                # Of two runs beside each other, so that a slow minute counts for both.
                pairs = zip(one[way]["speed"], one["off"]["speed"], strict=True)
                ratio = median(ours / theirs for ours, theirs in pairs)
                ratios.append(ratio)
                wanted = goal if batch == 1 and goal else LEAST
                name = f"{by}, {batch} at once"
                results += [
                    Result(f"{name}: output", on, "tokens/s", off, ratio, wanted, ratio >= wanted),
                    Result(f"{name}: tokens of a sequence in a step", one[way]["a step"][-1], ""),
                    Result(f"{name}: drafts that were right", one[way]["right"][-1], "%"),
                ]
            lines.append(Line(by, args.batches, ratios))
    chart = Chart("output with drafts", "sequences at once", "of that without", tuple(lines))
    return Report(results, (chart,))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, draft, own, texts, threads, exact, batches, prompt, output, rounds, cpu.

    Returns by text and batch, and by way, of each round the tokens/s (speed), how many tokens a
    sequence got in a step, and the percentage of drafts that were right.
    """
    most = max(job["batches"])
    positions = most * (job["prompt"] + job["output"] + engines.GROWTH)
    runner: Any = engines.open_runner(
        job["model"], job["threads"], positions, exact=job["exact"], draft_model=job["draft"]
    )
    clock = time.process_time if job["cpu"] else time.perf_counter
    if runner.draft_model is not None:
        runner.draft_model.clock = clock
    ways = _ways(job["draft"])
    engine = runner if job["own"] else _Told(runner)
    found: dict[str, Any] = {}
    for text in job["texts"]:
        if job["own"]:
            texts = _requests(text, most, job["model"], job["output"])
        else:
            texts = _texts(text, most, job["prompt"], job["output"])
        for batch in job["batches"]:
            one: dict[str, Any] = {way: {"speed": [], "a step": [], "right": []} for way in ways}
            for number in range(job["rounds"]):
                for way in ways if number % 2 else reversed(ways):
                    answer = _answer(engine, texts[:batch], way, clock)
                    one[way]["speed"].append(answer.speed)
                    one[way]["a step"].append(answer.a_step)
                    one[way]["right"].append(answer.right)
                    for i, tokens in enumerate(answer.tokens):
                        texts[i] = texts[i]._replace(answer=texts[i].answer or tokens)
                        # Without exact mode the answer of other steps may be another one.
                        if tokens != texts[i].answer and (job["exact"] or not job["own"]):
                            raise BatonError("drafts changed an answer")
            found[f"{text} {batch}"] = one
            for way in ways[1:]:
                ratio = median(one[way]["speed"]) / median(one["off"]["speed"])
                a_step = one[way]["a step"][-1]
                progress(f"{text}, {batch} at once, {way}: {ratio:.2f}, {a_step:.2f} tokens a step")
    return found


def _ways(draft: str) -> list[str]:
    return ["off", "ngram", "draft"] if draft else ["off", "ngram"]


class Text(NamedTuple):
    """In token ids."""

    prompt: list[int]
    answer: list[int]
    """Empty: not known yet."""
    most: int
    """Tokens of the answer, at most."""


HEROES = "Ada", "Grace", "Alan", "Linus", "Edsger", "Barbara", "Donald", "Ken"
THINGS = "robot", "kite", "lantern", "violin", "map", "boat", "clock", "telescope", "drum", "key"
NOUNS = (
    *("river", "stone", "cloud", "paper", "window", "garden", "letter", "engine", "bridge"),
    *("ladder", "mirror", "pocket", "basket", "button", "corner", "feather", "hammer", "island"),
)
LINES = 10
"""Of a text of `_requests`."""


def _requests(kind: str, count: int, model: str, output: int) -> list[Text]:
    """Prompts in the model's chat template, whose answers are not known."""
    transformers: Any = import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    numbers = random.Random(f"{kind} {count}")
    found = []
    for number in range(count):
        code = [_statement(numbers) for _ in range(LINES)]
        if kind == "edited code":
            old, new = numbers.choice(re.findall(r"[a-z]{3,}", code[0])), numbers.choice(NOUNS)
            question = "\n".join([f"Rename {old} to {new}:", *code])
        elif kind == "quoted text":
            lines = [_sentence(numbers) for _ in range(LINES)]
            asked = f"Quote from this text what follows after {lines[2][:12]!r}:"
            question = f"{asked}\n{' '.join(lines)}"
        else:
            hero, thing = HEROES[number % len(HEROES)], numbers.choice(THINGS)
            question = f"Tell me a story about {hero} and a {thing}."
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        found.append(Text(tokenizer.encode(text, add_special_tokens=False), [], output))
    return found


def _statement(numbers: random.Random) -> str:
    one, two, three = (numbers.choice(NOUNS) for _ in range(3))
    return numbers.choice((
        f"{one} = {two}({three}, {numbers.randint(0, 99)})",
        f"    {one} = {two} + {three}",
        f"for {one} in {two}:",
        f"    {one}.{two}({three})",
    ))  # fmt: skip


def _sentence(numbers: random.Random) -> str:
    hero, word = numbers.choice(HEROES), numbers.choice(NOUNS)
    return numbers.choice((
        f"On day {numbers.randint(1, 99)}, {hero} found a {word}.",
        f"{hero} and {numbers.choice(HEROES)} talked about the {word} for 3 hours.",
        f"{hero} carried a red {word} to the harbour.",
    ))  # fmt: skip


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
        found.append(Text(given, answer[:output], output))
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


@dataclass(frozen=True)
class Answer:
    """What sequences got, from the first step on in which nothing is prefilled."""

    tokens: list[list[int]]
    """All of each."""
    speed: float
    """Tokens/s."""
    a_step: float
    """Tokens that a sequence got in a step."""
    right: float
    """The percentage of drafts that were right."""


def _answer(engine: Any, texts: Sequence[Text], way: str, clock: Callable[[], float]) -> Answer:
    # Places for drafts of the largest batch, too.
    rules = engines.policy(max(2 * len(texts), 32), 2048, beside=64)
    loop = engines.engine_loop(engine, replace(rules, speculation=way))
    scheduler = loop.scheduler
    told = isinstance(engine, _Told)
    if told:
        engine.answers = {i: text.answer for i, text in enumerate(texts)}
    for i, text in enumerate(texts):
        attempt = engines.attempt(str(i), text.prompt, text.most)
        stop = replace(attempt.stop, ignore_eos=told)
        scheduler.add(replace(attempt, stop=stop), time.monotonic())
    tokens: list[list[int]] = [[] for _ in texts]
    began = 0.0
    count = rows = 0
    while scheduler.has_work:
        now = clock()
        plan = loop.plan(now)
        assert plan is not None
        loop.submit(plan)
        _, result = loop.collect()
        scheduler.observe(plan, clock() - now - plan.work.drafting_s)
        events = loop.apply(result, now)
        made = [e for event in events if isinstance(event, NewTokens) for e in event.tokens]
        for one in made:
            tokens[int(one.key.request_id)] += one.token_ids
        if plan.work.prefill:
            began = clock()
        else:
            count += sum(len(one.token_ids) for one in made)
            rows += plan.work.rows
    seconds = clock() - began
    right = 100.0
    if scheduler.speculation is not None and scheduler.speculation.drafted:
        right = 100 * scheduler.speculation.accepted / scheduler.speculation.drafted
    return Answer(tokens, count / seconds, count / rows, right)
