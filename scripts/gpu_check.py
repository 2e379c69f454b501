"""Checks and measures the engine on the GPU of this machine, and writes what came out as JSON.

    python scripts/gpu_check.py A --json gpu-a.json [--quick] [--only SECTION ...] [--budget 570]

Each part of a section runs in a process of its own, with a time limit: one that hangs, crashes or
leaves CUDA unusable ends alone. The file is replaced after each section, and a run that finds its
file there goes on where that one ended. This process needs no torch; sections are listed in
`gpucheck/sections.py`, and docs/gpu-check.md says what the figures mean.

Exit code 0 when all that was asked for ran and every goal was met, 1 when not, 2 when there is no
GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [ROOT / name for name in ("services", "loadtest", "scripts", "")]
CARRIED = ROOT / ".gpucheck"
"""What `gpucheck/strip_nixl.py` makes, for one version of Python."""
sys.path[:0] = map(str, PATHS)

from baton_loadtest.report import Result, document, table  # noqa: E402
from batonlm.core.errors import InvalidArgument  # noqa: E402
from batonlm.engine.gpus import VISIBLE, find_driver, select, visible  # noqa: E402
from gpucheck.sections import SECTIONS, Section  # noqa: E402

COMMAND_S = 570.0
"""The budget of one command: ten minutes less what starting and copying take."""
TAIL_LINES = 40
SHORTEST_S = 5.0
"""A part is not begun with less than this left."""
DYING_S = 5.0
"""How long a part that ran out of time may write where it stood."""


@dataclass(frozen=True, slots=True)
class Options:
    device: str
    quick: bool
    jobs: int
    """Parts that run at the same time at most."""
    cache: Path
    """Where Triton keeps compiled kernels."""


@dataclass
class Outcome:
    """What came of one part of a section."""

    state: str
    """done, skipped, failed, crashed, timed out, or no time."""
    seconds: float = 0.0
    reason: str = ""
    tail: str = ""
    """The last lines of its output, unless it is done."""
    results: list[Result] = field(default_factory=list)


class Processes:
    """Those that run, so that none outlives this one's end. Used by several threads."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(
        self, command: list[str], environment: dict[str, str], log: Path, limit_s: float
    ) -> int:
        """Runs a command in a process group of its own; its output goes to `log`.

        Returns its exit code, which is negative when a signal ended it. Raises TimeoutExpired. Of
        the whole group nothing is left in any case.
        """
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.add(process)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            # Python's faulthandler writes where every thread stands.
            process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DYING_S)
            raise
        finally:
            self._end(process)

    def close(self) -> None:
        for process in list(self._running):
            self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._running.discard(process)


def run_part(
    section: Section, part: str, options: Options, known: dict[str, float], limit_s: float,
    processes: Processes,
) -> Outcome:  # fmt: skip
    """Runs one part of a section to its end, or to its time limit."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpucheck-") as name:
        folder = Path(name)
        figures, log, given = folder / "figures", folder / "log", folder / "known"
        given.write_text(json.dumps(known))
        command = [sys.executable, "-X", "faulthandler", "-m", "gpucheck.child", section.run]
        command += ["--part", part]
        command += ["--device", options.device, "--known", str(given), "--out", str(figures)]
        command += ["--quick"] if options.quick else []
        state = reason = ""
        try:
            code = processes.run(command, environment(options), log, limit_s)
        except subprocess.TimeoutExpired:
            state, reason = "timed out", f"after {limit_s:.0f} s"
        else:
            if code < 0:
                state, reason = "crashed", signal.Signals(-code).name
            elif code:
                state, reason = "failed", last_line(log)
        lines = [json.loads(line) for line in whole_lines(figures)]
        skipped = [line["skipped"] for line in lines if "skipped" in line]
        if not state:
            state, reason = ("skipped", skipped[0]) if skipped else ("done", "")
        tail = "" if state == "done" else "".join(tail_of(log))
        results = [Result(**line) for line in lines if "skipped" not in line]
    return Outcome(state, time.monotonic() - began, reason, tail, results)


def environment(options: Options) -> dict[str, str]:
    """Of a part's process."""
    bindings = "nixl_cu13/_bindings" + sysconfig.get_config_var("EXT_SUFFIX")
    carried = [CARRIED] if (CARRIED / bindings).exists() else []
    given = os.environ.get("PYTHONPATH", "")
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join([*map(str, [*PATHS, *carried]), *filter(None, [given])])
    found["PYTHONUNBUFFERED"] = "1"
    found["TRITON_CACHE_DIR"] = str(options.cache)
    found["HF_HUB_OFFLINE"] = "1"
    if options.device == "cpu":
        found["TRITON_INTERPRET"] = "1"
        found["OMP_NUM_THREADS"] = "1"
    return found


def whole_lines(path: Path) -> list[str]:
    """Lines that were written to their end; a crash may leave half of one."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def tail_of(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines(keepends=True)[-TAIL_LINES:]
    return [line.replace(f"{ROOT}/", "") for line in lines]


def last_line(log: Path) -> str:
    lines = [line.strip() for line in tail_of(log) if line.strip()]
    return lines[-1] if lines else "without a word"


class Report:
    """The JSON file: the form of every measurement, and beside it machine, sections and code."""

    def __init__(self, path: Path, options: Options, device: dict[str, Any]):
        """Goes on with the file when it is of the same code, device and options."""
        self._path = path
        self._same = {
            "device": device,
            "quick": options.quick,
            "source": source_digest(),
        }
        self.sections: dict[str, dict[str, Any]] = {}
        self._results: list[tuple[str, Result]] = []
        before = json.loads(path.read_text()) if path.exists() else {}
        if all(before.get(name) == value for name, value in self._same.items()):
            self.sections = before["sections"]
            for result in before["results"]:
                self._results.append((result.pop("section"), Result(**result)))

    @property
    def results(self) -> list[Result]:
        return [result for _, result in self._results]

    def known(self) -> dict[str, float]:
        return {result.name: result.value for result in self.results}

    def finished(self, section: str) -> bool:
        return self.sections.get(section, {}).get("state") in ("done", "skipped")

    def add(self, section: str, outcomes: dict[str, Outcome]) -> None:
        """Takes in what came of a section's parts, instead of an earlier run's, and writes. What
        an earlier run measured stays when this one had no time for it."""
        if section in self.sections and all(o.state == "no time" for o in outcomes.values()):
            return
        self._results = [pair for pair in self._results if pair[0] != section]
        self._results += [(section, r) for each in outcomes.values() for r in each.results]
        bad = {
            part: each for part, each in outcomes.items() if each.state not in ("done", "skipped")
        }
        worst = next(iter(bad.values()), None)
        skipped = all(each.state == "skipped" for each in outcomes.values())
        state = worst.state if worst else "skipped" if skipped else "done"
        self.sections[section] = {
            "state": state,
            "seconds": sum(each.seconds for each in outcomes.values()),
            "parts": {
                part: {"state": each.state, "reason": each.reason, "tail": each.tail}
                for part, each in outcomes.items()
                if each.state != "done"
            },
        }
        self.write()

    def write(self) -> None:
        """Replaces the file at once: a reader, or a run that goes on, never sees half of it."""
        whole = document(0, self.results)
        whole["command"] = whole["command"].replace("baton", "gpu_check.py", 1)
        whole["results"] = [
            {"section": name, **each}
            for (name, _), each in zip(self._results, whole["results"], strict=True)
        ]
        whole = {**whole, **self._same, "sections": self.sections}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(self._path.name + ".new")
        beside.write_text(json.dumps(whole, indent=2) + "\n")
        os.replace(beside, self._path)


def source_digest() -> str:
    """Of the code that is measured: a machine that the tree was copied to has no commit."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in ("services/batonlm", "scripts/gpucheck"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def probe(options: Options, processes: Processes) -> dict[str, Any]:
    """What the device is, and the versions of what drives it; empty where there is none."""
    with tempfile.TemporaryDirectory(prefix="gpucheck-") as name:
        out, log = Path(name) / "device", Path(name) / "log"
        command = [sys.executable, "-m", "gpucheck.device", options.device, str(out)]
        try:
            processes.run(command, environment(options), log, 120.0)
        except subprocess.TimeoutExpired:
            print("gpu_check: the device did not answer within 120 s", file=sys.stderr)
        if not out.exists():
            print("".join(tail_of(log)), file=sys.stderr)
            return {}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def run(
    sections: Iterable[Section], report: Report, options: Options, budget_s: float,
    processes: Processes,
) -> bool:  # fmt: skip
    """Runs what is not finished yet. Returns whether all ran and every goal was met."""
    ends = time.monotonic() + budget_s
    chosen = list(sections)
    for section in chosen:
        if report.finished(section.name):
            print(f"== {section.name}: measured before", flush=True)
            continue
        print(f"== {section.name}: {section.about}", flush=True)
        parts = (options.quick and section.quick_parts) or section.parts
        left = ends - time.monotonic()
        if left < section.expected_s:
            reason = f"{max(0.0, left):.0f} s are left, and it takes about {section.expected_s:g} s"
            outcomes = {part: Outcome("no time", reason=reason) for part in parts}
        else:
            known = report.known()

            def one(
                part: str, section: Section = section, known: dict[str, float] = known
            ) -> Outcome:
                left = ends - time.monotonic()
                if left < SHORTEST_S:
                    return Outcome("no time", reason="the budget is spent")
                limit_s = min(section.limit_s, left)
                return run_part(section, part, options, known, limit_s, processes)

            with ThreadPoolExecutor(options.jobs if section.together else 1) as threads:
                try:
                    outcomes = dict(zip(parts, threads.map(one, parts), strict=True))
                except BaseException:
                    threads.shutdown(wait=False, cancel_futures=True)
                    processes.close()
                    raise
        report.add(section.name, outcomes)
        show(outcomes)
    return judge(chosen, report)


def judge(sections: Iterable[Section], report: Report) -> bool:
    """Whether all of them ran, or cannot run here, and no goal was missed."""
    ran = all(report.finished(section.name) for section in sections)
    return ran and all(result.met is not False for result in report.results)


def show(outcomes: dict[str, Outcome]) -> None:
    for part, outcome in outcomes.items():
        if outcome.results:
            print(table(outcome.results), flush=True)
        if outcome.state != "done":
            print(f"{part or 'this section'} {outcome.state}: {outcome.reason}", flush=True)
        if outcome.state not in ("done", "skipped"):
            print(outcome.tail, flush=True)


def choose(command: str, only: Sequence[str]) -> list[Section]:
    """The sections asked for, in the table's order; ceilings come along, others compare with
    them."""
    found = [s for s in SECTIONS if not command or s.command == command]
    if only:
        found = [section for section in SECTIONS if section.name in only]
    first = SECTIONS[0]
    return found if first in found else [first, *found]


def expose(device: str) -> str:
    """Returns cpu or cuda. The first GPU that the name allows becomes the only one that processes
    of this check see. Raises InvalidArgument. Without NVIDIA's library for management, `probe` says
    whether torch finds one."""
    driver = find_driver()
    if device == "cpu" or (device == "cuda" and driver is None):
        return device
    gpus = visible(driver.gpus if driver else (), os.environ.get(VISIBLE))
    os.environ[VISIBLE] = select("cuda" if device == "auto" else device, gpus)[0].uuid
    return "cuda"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [section.name for section in SECTIONS]
    parser.add_argument("command", nargs="?", choices=("A", "B", "C", ""), default="")
    parser.add_argument("--json", type=Path, help="where the figures go; an earlier run's is kept")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--only", nargs="*", choices=names, default=[], help="some sections")
    parser.add_argument("--list", action="store_true", help="names the sections and ends")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=f"default {COMMAND_S:g}")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument(
        "--device", default="cuda", metavar="NAME",
        help="cuda, cuda:N, GPU-UUID or MIG-UUID; cpu: rehearse (default %(default)s)",
    )  # fmt: skip
    cache = Path.home() / ".cache/baton/gpu-check"
    parser.add_argument("--cache", type=Path, default=cache, help="compiled kernels are kept here")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        for s in SECTIONS:
            print(f"{s.command}  {s.name:<16} {s.expected_s:>4.0f} s  {s.about}")
        return 0
    if chosen.json is None:
        parser.error("--json FILE is needed")
    try:
        device_kind = expose(chosen.device)
    except InvalidArgument as error:
        parser.error(f"--device: {error.message}")
    options = Options(device_kind, chosen.quick, chosen.jobs, chosen.cache)
    budget_s = chosen.budget or (COMMAND_S if chosen.command else float("inf"))
    processes = Processes()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        device = probe(options, processes)
        if not device:
            print(
                "gpu_check: there is no GPU that torch can use, so nothing was run", file=sys.stderr
            )
            return 2
        print(f"{device}", flush=True)
        report = Report(chosen.json, options, device)
        good = run(choose(chosen.command, chosen.only), report, options, budget_s, processes)
    finally:
        processes.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
