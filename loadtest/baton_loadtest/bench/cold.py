"""`baton bench cold`: the time to fetch, read, verify and load weights.

A single reader that hashes whole files with BLAKE2b, as in earlier versions, is compared with the
engine's reader, which reads pieces with several threads and hashes them with xxh3; each with and
without the files in the page cache. Files are removed from it by asking the kernel to drop their
pages, which does not clear the cache of a disk or host.

Then an engine starts from nothing: a process fetches the model from an object store, imports the
engine, and opens a runner. The store is a server of this process that answers reads of the S3
protocol as fast as a network of --mbit-s would. A fetch that reads all files once more for their
digest, as in earlier versions, is what it is compared with. How long the parts take says what can
be won by doing one of them while another one is waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from baton_loadtest.bench import engines
from baton_loadtest.bench.options import engine, option
from baton_loadtest.child import progress
from baton_loadtest.launch import call, cores, environment, say
from baton_loadtest.report import Report, Result, compared
from batonlm.registry.digest import MANIFEST
from batonlm.registry.sources import FolderSource, sha256_of

PLOTS = False
OPTIONS = (
    *engine(threads=2, shape="500m"),
    option("--rounds", 3, "interleaved"),
    option("--mbit-s", 1000.0, "of the network that the object store is behind"),
)

DEADLINE_S = 900.0
SERIAL_BYTES = 8 << 20
WAYS = ("serial", "parallel")
FETCHES = ("read twice", "read once")
PARTS = ("fetch", "import", "weights", "pack and check")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_SENT_BYTES = 256 << 10


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
    starts = _starts(folder, threads, args)
    before = median(starts["read twice"]["fetch"])
    now = {part: median(times) for part, times in starts["read once"].items()}
    network = f"{args.mbit_s:g} Mbit/s"
    results += [
        compared(f"fetch at {network}", now["fetch"], "s", before),
        *(Result(f"then {part}", now[part], "s") for part in PARTS[1:]),
        Result("from nothing to ready", sum(now.values()), "s"),
    ]
    return Report(results)


def _starts(
    folder: Path, threads: int, args: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each part of a start, by way."""
    found: dict[str, dict[str, list[float]]] = {
        way: {part: [] for part in PARTS} for way in FETCHES
    }
    with _object_store(folder, args.mbit_s * 1e6 / 8) as endpoint:
        keys = {name: "any" for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        for number in range(args.rounds):
            # In turns, because whoever comes first finds less of the imports in memory.
            for way in FETCHES if number % 2 else FETCHES[::-1]:
                with (
                    tempfile.TemporaryDirectory(dir=folder.parent) as into,
                    environment(AWS_ENDPOINT_URL=endpoint, AWS_REGION="us-east-1", **keys),
                ):
                    job = {"into": into, "threads": threads, "way": way}
                    parts = call(start, job, threads=threads, deadline_s=DEADLINE_S)
                for part, seconds in parts.items():
                    found[way][part].append(seconds)
            say(f"starts, round {number + 1} of {args.rounds}")
    return found


def start(job: dict[str, Any]) -> dict[str, float]:
    """job: into, threads, way. Fetches the model and opens a runner. Returns seconds by part."""
    from batonlm.registry import cache
    from batonlm.registry.digest import model_digest
    from batonlm.registry.object_store import object_source

    def read_again(*_: object) -> str:
        (folder,) = Path(job["into"]).glob(".*.partial")
        return model_digest(folder / "config.json", list(folder.glob("*.safetensors")))

    times = [time.perf_counter()]
    with ExitStack() as ends:
        if job["way"] == "read twice":
            ends.enter_context(patch.object(cache, "contents_digest", read_again))
        found = cache.fetched(object_source("s3://bench/model"), Path(job["into"]), progress)
    times.append(time.perf_counter())
    from batonlm.engine.config import EngineConfig, configure_threads

    configure_threads(job["threads"])
    from batonlm.engine import loader
    from batonlm.engine.runner import TorchRunner

    times.append(time.perf_counter())
    config = EngineConfig(
        model=str(found), threads=job["threads"], dtype="float32", num_blocks=64, max_batch=8
    )
    loaded = loader.load(config)
    times.append(time.perf_counter())
    TorchRunner.over(loaded, config, free=1 << 40).close()
    times.append(time.perf_counter())
    return {part: times[i + 1] - times[i] for i, part in enumerate(PARTS)}


@contextmanager
def _object_store(folder: Path, bytes_per_s: float) -> Iterator[str]:
    """Serves a model's files as s3://bench/model, all readers together at this speed. Yields the
    endpoint."""
    entries = [
        {"name": file.name, "size": file.size, "sha256": sha256_of(folder / file.name)}
        for file in FolderSource(folder).files(weights=True)
    ]
    manifest = json.dumps({"files": entries}).encode()
    names = {entry["name"] for entry in entries}
    lock, free_at = threading.Lock(), time.monotonic()

    def wait_for_turn(count: int) -> None:
        nonlocal free_at
        with lock:
            free_at = max(free_at, time.monotonic()) + count / bytes_per_s
            pause = free_at - time.monotonic()
        if pause > 0:
            time.sleep(pause)

    class Reads(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = self.path.partition("?")[0].rpartition("/")[2]
            if name == MANIFEST:
                self._answer(200, len(manifest), "")
                self.wfile.write(manifest)
                return
            wanted = _RANGE.fullmatch(self.headers.get("range", ""))
            if name not in names or wanted is None:
                self._answer(404, 0, "")
                return
            first, last = int(wanted[1]), int(wanted[2])
            size = (folder / name).stat().st_size
            self._answer(206, last + 1 - first, f"bytes {first}-{last}/{size}")
            with (folder / name).open("rb") as file:
                file.seek(first)
                while first <= last:
                    sent = file.read(min(_SENT_BYTES, last + 1 - first))
                    wait_for_turn(len(sent))
                    self.wfile.write(sent)
                    first += len(sent)

        def _answer(self, status: int, length: int, part: str) -> None:
            self.send_response(status)
            self.send_header("content-length", str(length))
            self.send_header("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.send_header("etag", '"0"')
            if part:
                self.send_header("content-range", part)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Reads) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


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
