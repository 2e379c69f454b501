"""`baton bench engine`: Baton's engine against alternatives, same requests, one run.

Every contender runs in its own process, one at a time, pinned to the same cores, with the same
weights, prompts and answer lengths, greedy, and without end-of-sequence tokens. A second part
compares exact mode with plain mode, the fused decoder with transformers' own layers, and a single
sequence's decoding with the memory bandwidth.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from baton_loadtest.bench import engines, peers
from baton_loadtest.bench.engines import EngineRequests, StepTimer
from baton_loadtest.bench.options import engine, option, values
from baton_loadtest.child import progress
from baton_loadtest.launch import ContenderFailed, call, cores, say
from baton_loadtest.report import Bars, Report, Result, at_most, compared
from batonlm.core.scheduler.plan import ModelRunner

PLOTS = True
BY_PRECISION = {"int8": "Baton int8", "int4": "Baton int4"}
OPTIONS = (
    *engine(threads=2),
    option("--seed", 42),
    option("--peers", False, "transformers takes part as well, and llama.cpp with --llama"),
    option("--llama", "", "a folder with libllama: llama.cpp takes part, also without --peers"),
    option(
        "--quantize",
        ("int8", "int4"),
        "in which precisions Baton takes part, too: none, int8, int4",
        type=values(str, ("none", *BY_PRECISION)),
    ),
    option("--requests", 32),
    option("--rounds", 2, "at most, interleaved"),
    option("--seconds", 50.0, "no contender begins a round, or static batch, that would end later"),
)

PROMPT_TOKENS, OUTPUT_TOKENS = (32, 512), (16, 256)
STEP_TOKENS = 512
MAX_RUNNING = 64
DEADLINE_S = 600.0
AGAINST_CONTINUOUS, AGAINST_LLAMA, INT8_AGAINST_FLOAT, QUANTIZED_AGAINST_LLAMA = 3.0, 1.4, 1.4, 2.0
OF_BANDWIDTH, EXACT_COST, FUSED_COST = 0.70, 1.10, 1.0
BATCHES = (1, 8, 32)
CONTEXT = 512
ROUNDS = 3
ALONE_PROMPT = 128

EXACT = "Baton float32, exact"
PLAIN = "Baton float32, not exact"
OWN_LAYERS = "transformers' layers"
CONTINUOUS = "transformers continuous batching"
STATIC = {size: f"transformers generate, batches of {size}" for size in (8, 32)}
LLAMA = {name: f"llama.cpp {name}" for name in (peers.FLOAT16, peers.Q8_0, peers.Q4_0)}


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine that takes part."""

    name: str
    run: Callable[[dict[str, Any]], dict[str, Any]]
    job: dict[str, Any]
    """Its own parameters, in addition to the common ones."""


@dataclass(slots=True)
class Ranking:
    """A contender's results so far."""

    tokens: list[list[int]] = field(default_factory=list)
    """Of its last round, for the requests that it answered."""
    speeds: list[float] = field(default_factory=list)
    """Output tokens per second of each round."""
    cpu_speeds: list[float] = field(default_factory=list)
    """Output tokens per second of CPU time."""
    weights_bytes: int = 0
    """What its weights take in memory; 0: it does not say."""
    seconds: float = 0.0

    def add(self, answer: dict[str, Any]) -> None:
        self.tokens = answer["tokens"]
        count = sum(map(len, self.tokens))
        self.speeds.append(count / answer["seconds"])
        self.cpu_speeds.append(count / answer["cpu_seconds"])
        self.seconds += answer["seconds"]
        self.weights_bytes = answer.get("weights_bytes", 0)

    def has_time(self, seconds: float) -> bool:
        """Returns whether another round of mean length keeps the total below so many seconds."""
        rounds = len(self.speeds)
        return self.seconds * (rounds + 1) <= seconds * max(rounds, 1)


def measure(args: argparse.Namespace) -> Report:
    """Raises ContenderFailed if Baton itself cannot run."""
    threads = min(args.threads, len(cores()))
    if args.peers and not args.llama:
        say("llama.cpp is left out: name a folder that has libllama with --llama")
    model = engines.folder(args.shape)
    config = engines.config_of(model)
    small, vocab = args.shape == "tiny", config["vocab_size"]
    outputs = (16, 32) if small else OUTPUT_TOKENS
    requests = EngineRequests.draw(args.seed, args.requests, PROMPT_TOKENS, outputs, vocab)
    shared = {
        "model": str(model),
        "threads": threads,
        "step_tokens": STEP_TOKENS,
        "seconds": args.seconds,
        "requests": asdict(requests),
        "warm": asdict(EngineRequests.draw(args.seed + 1, 4, (32, 64), (4, 4), vocab)),
    }
    contenders = line_up(
        model,
        precisions=tuple(name for name in args.quantize if name in BY_PRECISION),
        peers_too=args.peers,
        llama=args.llama,
    )
    rankings = _compete(contenders, shared, args.rounds)
    small_job = {"prefill": 128, "tokens": 16, "megabytes": 32}
    large_job = {"prefill": 1024, "tokens": 64, "megabytes": 1024}
    job = {"model": str(model), "threads": threads, **(small_job if small else large_job)}
    modes = call(run_modes, job, threads=threads, deadline_s=DEADLINE_S)
    results = [
        Result("threads of every contender", threads, ""),
        Result("requests", args.requests, ""),
        Result("prompt tokens", requests.prompt_tokens, ""),
        Result("output tokens", requests.output_tokens, ""),
        *_speeds(rankings, args.requests),
        *_goals(rankings),
        *_alone(modes, model, config),
        *_exact(modes),
        *_fused(modes),
    ]
    bars = tuple((name, median(one.speeds)) for name, one in rankings.items())
    return Report(results, (Bars(f"{args.requests} requests, {args.shape}", "tokens/s", bars),))


def line_up(
    model: Path, *, precisions: tuple[str, ...], peers_too: bool, llama: str
) -> list[Contender]:
    """Returns the contenders in order.

    precisions: of BY_PRECISION. llama: the folder of llama.cpp's library, or nothing.
    """
    found = [
        Contender(EXACT, run_baton, {"exact": True, "quantize": "none"}),
        Contender(PLAIN, run_baton, {"exact": False, "quantize": "none"}),
    ]
    for name in precisions:
        job = {"exact": False, "quantize": name}
        found.append(Contender(BY_PRECISION[name], run_baton, job))
    if peers_too:
        found.append(Contender(CONTINUOUS, peers.run_transformers, {"batch": 0}))
        for size, name in STATIC.items():
            found.append(Contender(name, peers.run_transformers, {"batch": size}))
    if llama:
        for precision, name in LLAMA.items():
            job = {"library": llama, "gguf": str(model / f"{precision}.gguf")}
            found.append(Contender(name, peers.run_llama, job))
    return found


def _compete(
    contenders: list[Contender], shared: dict[str, Any], rounds: int
) -> dict[str, Ranking]:
    """Runs all first rounds, then all second rounds, and so on, one at a time.

    After its first round a contender continues only while all its rounds stay within the given
    time. One that fails is left out; if Baton itself fails, ContenderFailed is raised.
    """
    rankings = {contender.name: Ranking() for contender in contenders}
    for number in range(rounds):
        for contender in contenders:
            ranking = rankings.get(contender.name)
            if ranking is None or not ranking.has_time(shared["seconds"]):
                continue
            try:
                if contender.name in LLAMA.values():
                    _write_for_llama(Path(shared["model"]), contender.job)
                job = {**shared, **contender.job}
                answer = call(contender.run, job, threads=shared["threads"], deadline_s=DEADLINE_S)
            except (ContenderFailed, ImportError, ValueError) as error:
                if contender.name in (EXACT, PLAIN):
                    raise
                say(f"{contender.name} is left out: {error}")
                del rankings[contender.name]
                continue
            ranking.add(answer)
            say(
                f"round {number + 1}, {contender.name}: {ranking.speeds[-1]:.1f} tokens/s "
                f"in {answer['seconds']:.0f} s"
            )
    return rankings


def _write_for_llama(model: Path, job: dict[str, Any]) -> None:
    """Writes the file of a contender's job, from float16's where it is of another precision."""
    whole, target = model / f"{peers.FLOAT16}.gguf", Path(job["gguf"])
    peers.write_gguf(model, whole)
    if target != whole:
        own = {"source": str(whole), "target": str(target), "precision": target.stem}
        own["library"] = job["library"]
        call(peers.quantize_gguf, own, threads=len(cores()), deadline_s=DEADLINE_S)


def run_baton(job: dict[str, Any]) -> dict[str, Any]:
    """The engine with a decode worker's scheduler.

    job: model, threads, exact, quantize, step_tokens, requests, warm. Returns a `Served`, and
    weights_bytes.
    """
    requests = engines.from_json(job["requests"])
    runner = engines.open_runner(
        job["model"],
        job["threads"],
        requests.positions(MAX_RUNNING),
        exact=job["exact"],
        quantize=job["quantize"],
    )
    rules = engines.policy(MAX_RUNNING, job["step_tokens"])
    engines.serve(engines.engine_loop(runner, rules), engines.from_json(job["warm"]))
    served = engines.serve(engines.engine_loop(runner, rules), requests)
    weights = engines.weights_bytes(job["model"], quantize=job["quantize"])
    return {**asdict(served), "weights_bytes": weights}


def run_modes(job: dict[str, Any]) -> dict[str, Any]:
    """Measures exact and plain mode, and exact mode over transformers' own layers, side by side in
    one process, and the memory bandwidth.

    job: model, threads, prefill (its length), tokens (at batch 1), megabytes (over which bandwidth
    is measured). Returns for each mode the best seconds of three rounds in turns: "decode BATCH" (a
    step), "prefill", and "alone" (one token at batch 1, through the scheduler, at `alone_context`
    positions on average); the read bandwidth in bytes per second; and whether the exact runner is
    exact.
    """
    positions = max(
        max(BATCHES) * (CONTEXT + engines.GROWTH),
        job["prefill"],
        ALONE_PROMPT + job["tokens"] + engines.GROWTH,
    )
    runners = {
        mode: engines.open_runner(
            job["model"],
            job["threads"],
            positions,
            exact=mode != "not exact",
            decoder="transformers" if mode == OWN_LAYERS else "auto",
        )
        for mode in ("exact", "not exact", OWN_LAYERS)
    }
    timers = {mode: StepTimer(runner) for mode, runner in runners.items()}
    cases: dict[str, Callable[[StepTimer], float]] = {
        f"decode {batch}": partial(StepTimer.decode, batch=batch, context=CONTEXT)
        for batch in BATCHES
    }
    cases["prefill"] = lambda timer: timer.prefill(job["prefill"], STEP_TOKENS)
    cases["alone"] = lambda timer: _time_alone(timer.runner, job["tokens"])
    best = {mode: dict.fromkeys(cases, float("inf")) for mode in runners}
    bandwidth = 0.0
    for number in range(ROUNDS):
        for case, measured in cases.items():
            for mode, timer in timers.items():
                best[mode][case] = min(best[mode][case], measured(timer))
        bandwidth = max(bandwidth, _read_bandwidth(job["megabytes"]))
        progress(f"modes, round {number + 1} of {ROUNDS}")
    return {
        "is_exact": runners["exact"].exact,
        "bandwidth": bandwidth,
        "alone_context": ALONE_PROMPT + job["tokens"] / 2,
        **best,
    }


def _time_alone(runner: ModelRunner, tokens: int) -> float:
    """Returns the seconds per token of one sequence, without its first."""
    loop = engines.engine_loop(runner, engines.policy(1, ALONE_PROMPT + 1))
    prompt = range(3, 3 + ALONE_PROMPT)
    loop.scheduler.add(engines.attempt("alone", prompt, tokens), time.monotonic())
    while not engines.step(loop):
        pass
    began = time.perf_counter()
    while loop.scheduler.has_work:
        engines.step(loop)
    return (time.perf_counter() - began) / (tokens - 1)


def _read_bandwidth(megabytes: int) -> float:
    """Returns bytes per second: the best of sums and matrix-vector products over so much float32,
    with torch's threads. This is the memory's bandwidth if the data exceeds the caches."""
    import torch

    width = 4096
    matrix = torch.ones(max(1, megabytes * 250_000 // width), width)
    vector = torch.ones(width)
    works: list[Callable[[], object]] = [matrix.sum, lambda: torch.mv(matrix, vector)]
    best = float("inf")
    for work in works * 5:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return matrix.numel() * matrix.element_size() / best


def _speeds(rankings: dict[str, Ranking], requests: int) -> list[Result]:
    ours = rankings[EXACT].tokens
    found = []
    for name, one in rankings.items():
        found.append(Result(f"{name}: output", median(one.speeds), "tokens/s"))
        found.append(Result(f"{name}: output", median(one.cpu_speeds), "tokens/CPU-s"))
        if one.weights_bytes:
            found.append(Result(f"{name}: weights", one.weights_bytes / 2**20, "MiB"))
        if len(one.tokens) < requests:
            done = len(one.tokens)
            found.append(Result(f"{name}: requests done in its time", done, ""))
        if name != EXACT:
            equal, prefix = agreement(ours, one.tokens)
            found.append(Result(f"{name}: requests with tokens equal to exact", 100 * equal, "%"))
            if equal < 1:
                found.append(Result(f"{name}: tokens until they differ, mean", prefix, ""))
    return found


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> tuple[float, float]:
    """Returns the share of equal answers, and the mean length of their common beginnings.

    theirs may have the first few requests only.
    """
    pairs = list(zip(ours, theirs, strict=False))
    equal = sum(a == b for a, b in pairs) / len(pairs)
    prefixes = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in pairs
    ]
    return equal, sum(prefixes) / len(pairs)


def _goals(rankings: dict[str, Ranking]) -> list[Result]:
    pairs = [
        (one, other, goal)
        for one in (EXACT, PLAIN)
        for other, goal in (
            (CONTINUOUS, AGAINST_CONTINUOUS),
            (LLAMA[peers.FLOAT16], AGAINST_LLAMA),
        )
    ]
    int8, int4 = BY_PRECISION["int8"], BY_PRECISION["int4"]
    pairs += [
        (int8, PLAIN, INT8_AGAINST_FLOAT),
        (int8, LLAMA[peers.Q8_0], QUANTIZED_AGAINST_LLAMA),
        (int4, LLAMA[peers.Q4_0], QUANTIZED_AGAINST_LLAMA),
    ]
    return [
        compared(
            f"{one} against {other}",
            median(rankings[one].speeds),
            "tokens/s",
            median(rankings[other].speeds),
            goal,
        )
        for one, other, goal in pairs
        if one in rankings and other in rankings
    ]


def _alone(modes: dict[str, Any], model: Path, config: dict[str, Any]) -> list[Result]:
    """Compares batch 1 with the limit of memory: every token reads every weight and all KV."""
    kv = engines.kv_bytes(config) * modes["alone_context"]
    bound = modes["bandwidth"] / (4 * engines.weights_read(model, config) + kv)
    return [
        Result("read bandwidth", modes["bandwidth"] / 1e9, "GB/s"),
        *(
            compared(
                f"one sequence, {mode}, against the bound of memory",
                1 / modes[mode]["alone"],
                "tokens/s",
                bound,
                OF_BANDWIDTH,
            )
            for mode in ("exact", "not exact")
        ),
    ]


def _exact(modes: dict[str, Any]) -> list[Result]:
    if not modes["is_exact"]:
        return [Result("exact mode could be had", 0, "")]
    exact, plain = modes["exact"], modes["not exact"]
    names = {f"decode {batch}": f"step of exact mode, batch {batch}" for batch in BATCHES}
    names["prefill"] = "prefill in exact mode"
    return [
        at_most(name, 1000 * exact[key], "ms", EXACT_COST, 1000 * plain[key])
        for key, name in names.items()
    ]


def _fused(modes: dict[str, Any]) -> list[Result]:
    """Compares the fused decoder with transformers' own layers, both exact."""
    names = {f"decode {batch}": f"step of the fused decoder, batch {batch}" for batch in BATCHES}
    names |= {"prefill": "prefill of the fused decoder", "alone": "one sequence's token, fused"}
    fused, own = modes["exact"], modes[OWN_LAYERS]
    return [
        at_most(name, 1000 * fused[key], "ms", FUSED_COST, 1000 * own[key])
        for key, name in names.items()
    ]
