"""`baton bench adapters`: what LoRA adapters cost decode, by how many there are in a batch.

Steps of one batch size are timed in turns: without adapters, and with more and more distinct ones,
each on every linear layer of the model and used by as many sequences as the others. A second runner
has room for half of the most adapters, so that a step with all of them makes each ready again.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from baton_loadtest.bench import engines
from baton_loadtest.bench.engines import StepTimer
from baton_loadtest.bench.options import engine, option
from baton_loadtest.child import progress
from baton_loadtest.launch import call, cores
from baton_loadtest.report import Chart, Line, Report, Result, compared

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
    counts = [0, *args.adapters]
    line = Line(f"{args.shape}, rank {args.rank}", counts, [speeds[n] for n in counts])
    return Report(results, (Chart("decode", "distinct adapters", "tokens/s", (line,)),))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, batch, rank, adapters, context, rounds.

    Returns by number of adapters the seconds of steps; bytes of a ready adapter; the seconds of
    each load; and page_s, the seconds by which an adapter that has to be made ready again delays a
    step.
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
        runner.close()
        page_s = _page(job, folders, found.num_bytes, host)
    return {"steps": steps, "bytes": found.num_bytes, "loads": loads, "page_s": page_s}


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
