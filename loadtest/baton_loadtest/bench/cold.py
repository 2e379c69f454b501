"""`baton bench cold`: the time to read, verify and load weights.

A single reader that hashes whole files with BLAKE2b, as in earlier versions, is compared with the
engine's reader, which reads pieces with several threads and hashes them with xxh3; each with and
without the files in the page cache. Files are removed from it by asking the kernel to drop their
pages, which does not clear the cache of a disk or host.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from baton_loadtest.bench import engines
from baton_loadtest.bench.options import engine, option
from baton_loadtest.child import progress
from baton_loadtest.launch import call, cores
from baton_loadtest.report import Report, Result, compared

PLOTS = False
OPTIONS = (*engine(threads=2, shape="500m"), option("--rounds", 3, "interleaved"))

DEADLINE_S = 900.0
SERIAL_BYTES = 8 << 20
WAYS = ("serial", "parallel")


def measure(args: argparse.Namespace) -> Report:
    """Raises ContenderFailed if the model cannot be loaded."""
    threads = min(args.threads, len(cores()))
    folder = engines.folder(args.shape)
    job = {"model": str(folder), "threads": threads, "rounds": args.rounds}
    found = call(run, job, threads=threads, deadline_s=DEADLINE_S)
    gigabytes = found["bytes"] / 1e9
    results = [Result("weights", gigabytes, "GB")]
    for name, times in found["times"].items():
        serial, parallel = (median(times[way]) for way in WAYS)
        if name.startswith("read"):
            results.append(compared(name, gigabytes / parallel, "GB/s", gigabytes / serial))
        else:
            results.append(compared(name, parallel, "s", serial))
    return Report(results)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, rounds. Returns bytes, and times by figure and way, in seconds."""
    import torch

    from batonlm.engine import loader
    from batonlm.engine.config import EngineConfig
    from batonlm.registry.digest import model_digest

    torch.set_num_threads(job["threads"])
    folder = Path(job["model"])
    weights = sorted(folder.glob("*.safetensors"))
    config = EngineConfig(model=str(folder), dtype="float32")

    def parallel() -> None:
        model_digest(folder / "config.json", weights)

    def serial() -> None:
        digest = blake2b(digest_size=16)
        for file in (folder / "config.json", *weights):
            with file.open("rb") as stream:
                while piece := stream.read(SERIAL_BYTES):
                    digest.update(piece)

    def load(read: Callable[[], None]) -> None:
        """Runs the real loader with another reader."""
        with patch.object(loader, "model_digest", lambda *_: read()):
            loader.load(config)

    readers = dict(zip(WAYS, (serial, parallel), strict=True))
    figures: dict[str, tuple[bool, Callable[[Callable[[], None]], None]]] = {
        "read and check, files not in memory": (True, lambda read: read()),
        "read and check, files in memory": (False, lambda read: read()),
        "load, files not in memory": (True, load),
        "load, files in memory": (False, load),
    }
    times: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in figures}
    for number in range(job["rounds"]):
        for name, (cold, work) in figures.items():
            for way, read in readers.items():
                _forget(weights) if cold else parallel()
                began = time.perf_counter()
                work(read)
                times[name][way].append(time.perf_counter() - began)
        progress(f"round {number + 1} of {job['rounds']}")
    return {"bytes": sum(file.stat().st_size for file in weights), "times": times}


def _forget(files: Sequence[Path]) -> None:
    """Removes files from the page cache; pages that are not on disk yet are written first."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
