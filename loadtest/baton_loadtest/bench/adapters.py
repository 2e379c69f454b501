"""`baton bench adapters`: what LoRA adapters cost decode, by how many there are in a batch.

Steps of one batch size are timed in turns: without adapters, and with more and more distinct ones,
each on every linear layer of the model and used by as many sequences as the others. A second runner
has room for one adapter, so that two that take turns are made ready again each time. Then streams
decode step after step, in turns with nothing beside them and while another adapter is loaded again
and again: the longest gap between two tokens says what a hot load does to those who are served.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from baton_loadtest.bench import engines
from baton_loadtest.bench.engines import StepTimer
from baton_loadtest.bench.options import engine, option
from baton_loadtest.child import progress
from baton_loadtest.launch import call, cores
from baton_loadtest.report import Chart, Line, Report, Result, at_most, compared

if TYPE_CHECKING:
    from batonlm.engine.runner import TorchRunner

PLOTS = True
OPTIONS = (
    *engine(threads=2),
    option("--batch", 64, "sequences of a step"),
    option("--rank", 16),
    option("--adapters", (1, 4, 16, 64), "distinct ones in a step"),
    option("--context", 512, "positions of each sequence"),
    option("--rounds", 5, "interleaved"),
)

DEADLINE_S = 900.0
GOAL, GOAL_ADAPTERS = 0.75, 16
LONGEST_GAP = 2.0
"""Gaps without loads that the longest gap beside loads may be: one step more."""
GAP_STEPS = 20
"""Steps in a row, of each round and side."""
MIB = 1 << 20


def measure(args: argparse.Namespace) -> Report:
    """Raises ContenderFailed if the model cannot run."""
    threads = min(args.threads, len(cores()))
    job = {
        "model": str(engines.folder(args.shape)),
        "threads": threads,
        "batch": args.batch,
        "rank": args.rank,
        "adapters": args.adapters,
        "context": args.context,
        "rounds": args.rounds,
    }
    found = call(run, job, threads=threads, deadline_s=DEADLINE_S)
    speeds = {int(n): args.batch / min(times) for n, times in found["steps"].items()}
    results = [
        Result("threads", threads, ""),
        Result("sequences of a step", args.batch, ""),
        Result("rank", args.rank, ""),
        Result("one adapter, ready", found["bytes"] / MIB, "MiB"),
        Result("loading one", 1000 * median(found["loads"]), "ms"),
        Result("without adapters", speeds[0], "tokens/s"),
    ]
    for count in args.adapters:
        goal = GOAL if count == GOAL_ADAPTERS and args.rank == 16 else None
        name = f"{count} distinct adapter{'' if count == 1 else 's'}"
        results.append(compared(name, speeds[count], "tokens/s", speeds[0], goal))
    results.append(Result("making one ready that was not", 1000 * found["page_s"], "ms"))
    alone, beside = (1000 * max(found["gaps"][side]) for side in ("alone", "beside"))
    results += [
        Result("adapters loaded beside streams", found["hot_loads"], ""),
        at_most("longest gap between tokens beside loads", beside, "ms", LONGEST_GAP, alone),
    ]
    counts = [0, *args.adapters]
    line = Line(f"{args.shape}, rank {args.rank}", counts, [speeds[n] for n in counts])
    return Report(results, (Chart("decode", "distinct adapters", "tokens/s", (line,)),))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, batch, rank, adapters, context, rounds.

    Returns by number of adapters the seconds of steps; bytes of a ready adapter; the seconds of
    each load; page_s, the seconds by which an adapter that has to be made ready again delays a
    step; gaps, the seconds between tokens without and beside hot_loads loads.
    """
    most = max(job["adapters"])
    with tempfile.TemporaryDirectory() as place:
        folders = [
            _save(Path(job["model"]), Path(place, str(n)), job["rank"], n) for n in range(most)
        ]
        size = sum(file.stat().st_size for file in folders[0].iterdir())
        positions = job["batch"] * (job["context"] + engines.GROWTH)
        host = 2 * most * size
        runner = engines.open_runner(
            job["model"], job["threads"], positions, adapter_bytes=(2 * most * size, host)
        )
        loads, digests = [], []
        for folder in folders:
            began = time.perf_counter()
            found = runner.load_adapter(folder)
            loads.append(time.perf_counter() - began)
            digests.append(found.digest)
        timer = StepTimer(runner)
        steps: dict[int, list[float]] = {n: [] for n in (0, *job["adapters"])}
        for number in range(job["rounds"]):
            for count, times in steps.items():
                own = digests[:count] or [""]
                times.append(timer.decode(job["batch"], job["context"], adapters=own))
            progress(f"round {number + 1} of {job['rounds']}")
        hot = _save(Path(job["model"]), Path(place, "hot"), job["rank"], most)
        gaps, hot_loads = _beside_loads(runner, timer, job, digests[:1], hot)
        runner.close()
        page_s = _page(job, folders, found.num_bytes, host)
    return {
        "steps": steps,
        "bytes": found.num_bytes,
        "loads": loads,
        "page_s": page_s,
        "gaps": gaps,
        "hot_loads": hot_loads,
    }


def _beside_loads(
    runner: TorchRunner, timer: StepTimer, job: dict[str, Any], used: Sequence[str], hot: Path
) -> tuple[dict[str, list[float]], int]:
    """The seconds between tokens of streams with the adapters in use, without loads and beside
    them; and how many loads there were, each of files that are not loaded then."""
    gaps: dict[str, list[float]] = {"alone": [], "beside": []}
    loads = 0

    def load_on(begun: threading.Event, stop: threading.Event) -> int:
        begun.set()
        count = 0
        while True:
            runner.unload_adapter(runner.load_adapter(hot).digest)
            count += 1
            if stop.is_set():
                return count

    def stream(times: list[float]) -> None:
        timer.once(job["batch"], job["context"], used)
        last = time.perf_counter()
        for _ in range(GAP_STEPS):
            timer.once(job["batch"], job["context"], used)
            now = time.perf_counter()
            times.append(now - last)
            last = now

    with ThreadPoolExecutor(1) as threads:
        for number in range(job["rounds"]):
            stream(gaps["alone"])
            begun, stop = threading.Event(), threading.Event()
            loading = threads.submit(load_on, begun, stop)
            try:
                begun.wait()
                stream(gaps["beside"])
            finally:
                stop.set()
            loads += loading.result()
            progress(f"loads beside streams, round {number + 1} of {job['rounds']}")
    return gaps, loads


def _page(job: dict[str, Any], folders: list[Path], each: int, host: int) -> float:
    """Seconds by which one adapter that is not ready delays a step: two take turns where there is
    room for one of them."""
    runner = engines.open_runner(
        job["model"],
        job["threads"],
        job["context"] + engines.GROWTH,
        adapter_bytes=(each + each // 2, host),
    )
    first, *others = [runner.load_adapter(folder).digest for folder in folders[:2]]
    timer = StepTimer(runner)
    ready = timer.decode(1, job["context"], adapters=[first])
    if not others:
        return 0.0
    turns = []
    for _ in range(job["rounds"]):
        for digest in (others[0], first):
            turns.append(timer.once(1, job["context"], adapters=[digest]))
    runner.close()
    return max(0.0, median(turns) - ready)


def _save(model: Path, folder: Path, rank: int, seed: int) -> Path:
    """Random matrices for every linear layer but the output's, as peft saves them."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed)
    stored, targets = {}, set()
    for name, layer in network.named_modules():
        if not isinstance(layer, torch.nn.Linear) or name == "lm_head":
            continue
        targets.add(name.rpartition(".")[2])
        shapes = {"A": (rank, layer.in_features), "B": (layer.out_features, rank)}
        for part, shape in shapes.items():
            matrix = torch.randn(shape, generator=generator) * 0.02 / math.sqrt(rank)
            stored[f"base_model.model.{name}.lora_{part}.weight"] = matrix
    folder.mkdir()
    save_file(stored, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*targets]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
