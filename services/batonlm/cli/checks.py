"""The checks of `baton doctor` on this machine, one function each.

Every check returns a Finding and raises no expected errors. Dependencies of a check are imported
inside it: a missing or broken package is a finding and does not end the doctor.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console

from batonlm.cli.layout import resolve_model
from batonlm.core.errors import BatonError, InvalidArgument, install

log = logging.getLogger(__name__)


class Status(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    status: Status
    detail: str
    advice: str = ""
    """What to do; empty if all is well."""


def ok(detail: str) -> Finding:
    return Finding(Status.OK, detail)


def warn(detail: str, advice: str) -> Finding:
    return Finding(Status.WARN, detail, advice)


def fail(detail: str, advice: str) -> Finding:
    return Finding(Status.FAIL, detail, advice)


Check = tuple[str, Callable[[], Finding]]
"""A check and its name."""

_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}


def failed(findings: Mapping[str, Finding]) -> bool:
    return any(finding.status is Status.FAIL for finding in findings.values())


def show(console: Console, name: str, finding: Finding) -> None:
    status = finding.status.value
    console.print(f"{status:<5}", style=_COLOURS[finding.status], end="")
    console.print(f" {name:<14} {finding.detail}", markup=False)
    if finding.advice:
        console.print(f"{'':<6}{'':<14} -> {finding.advice}", markup=False)
    sys.stdout.flush()


def report(checks: Iterable[Check], *, as_json: bool, needed: str = "") -> int:
    """Runs checks in order and prints what they find. needed: the check without which the later
    ones have no data. Returns the exit code: 1 if a check failed, else 0. Raises InvalidArgument
    for a wrong option."""
    console = Console(highlight=False, soft_wrap=True)
    found: dict[str, Finding] = {}
    for name, check in checks:
        found[name] = _checked(name, check)
        if not as_json:
            show(console, name, found[name])
        if name == needed and failed(found):
            break
    if as_json:
        print(json.dumps(document(found), indent=2))
    return int(failed(found))


def _checked(name: str, check: Callable[[], Finding]) -> Finding:
    """Runs a check. An exception becomes a finding, so that the other checks still run."""
    try:
        return check()
    except InvalidArgument:
        raise
    except BatonError as error:
        return fail(error.message, "see whether it can be reached")
    except Exception as error:
        log.debug("check %s broke", name, exc_info=True)
        return fail(f"the check itself broke: {type(error).__name__}", "please report this")


def document(findings: Mapping[str, Finding]) -> dict[str, Any]:
    """Returns the findings as JSON values."""
    return {
        "ok": not failed(findings),
        "checks": [
            {
                "name": name,
                "status": finding.status.value,
                "detail": finding.detail,
                "advice": finding.advice,
            }
            for name, finding in findings.items()
        ],
    }


ENGINE_ADVICE = install("engine")
NIXL_TIMEOUT_S = 60.0
MIN_SHM_BYTES = 256 << 20
MIN_OPEN_FILES = 4096


def python() -> Finding:
    version = platform.python_version()
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return fail(version, "use Python 3.11, 3.12 or 3.13")
    return ok(version)


def torch() -> Finding:
    from batonlm.engine.config import configure_threads

    if "torch" not in sys.modules:
        configure_threads()
    try:
        module = importlib.import_module("torch")
    except (ImportError, OSError):
        return fail("torch cannot be imported", f"{ENGINE_ADVICE} (prefill and decode need it)")
    threads, cores = module.get_num_threads(), os.cpu_count() or 1
    detail = f"{module.__version__}, {threads} threads on {cores} cores"
    if threads > cores:
        return warn(detail, f"set OMP_NUM_THREADS to at most {cores}")
    return ok(detail)


def transformers() -> Finding:
    try:
        version: str = importlib.import_module("transformers").__version__
    except ImportError:
        return fail("transformers cannot be imported", ENGINE_ADVICE)
    if version.split(".")[0] != "5":
        return fail(version, "pip install 'transformers>=5.16,<6'")
    return ok(version)


def nixl() -> Finding:
    """One of two processes, each with an agent, reads 1 MiB of the other's registered memory."""
    from batonlm.transfer.nixl import available

    without = "or move KV without it: baton up --transport loopback"
    if not available():
        return fail("NIXL is not installed", f"{ENGINE_ADVICE}, {without}")
    command = [sys.executable, "-m", "batonlm.cli.nixl_probe"]
    try:
        # In its own process: UCX ends a process in which it cannot work.
        probe = subprocess.run(command, capture_output=True, timeout=NIXL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return fail(f"no transfer within {NIXL_TIMEOUT_S:.0f} s", f"check UCX_*, {without}")
    try:
        answer = json.loads(probe.stdout.splitlines()[-1])
        return ok(f"NIXL moved {answer['bytes']} bytes between two processes")
    except (ValueError, IndexError, KeyError):
        reason = probe.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
        return fail(
            f"the transfer ended with code {probe.returncode} {reason[0][:200]}".rstrip(),
            f"try UCX_LOG_LEVEL=info, {without}",
        )


def gpu() -> Finding:
    try:
        cuda = importlib.import_module("torch").cuda
    except (ImportError, OSError):
        return warn("unknown without torch", ENGINE_ADVICE)
    if cuda.is_available():
        names = [cuda.get_device_name(index) for index in range(cuda.device_count())]
        return ok(f"{', '.join(names)}; 'baton doctor gpu' says more")
    if Path("/dev/nvidia0").exists():
        return warn(
            "there is a GPU that torch does not see", "'baton doctor gpu' says what it lacks"
        )
    return ok("none; the engine runs on the CPU")


def shared_memory(folder: str = "/dev/shm") -> Finding:
    """UCX transfers KV between processes of one machine, and of pods of one node, through shared
    memory, and several ranks of a worker need it, too."""
    advice = "in a container: docker run --shm-size=1g; in a pod: an emptyDir of medium Memory"
    try:
        size = shutil.disk_usage(folder).total
    except OSError:
        return warn(f"there is no {folder}; UCX uses TCP, which is slower", advice)
    detail = f"{folder} has {size >> 20} MiB"
    if size < MIN_SHM_BYTES:
        return warn(f"{detail}; UCX uses TCP then, which is slower", advice)
    return ok(detail)


def open_files(limit: int | None = None) -> Finding:
    """limit: None: this process's own."""
    own, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = own if limit is None else limit
    if limit == resource.RLIM_INFINITY:
        return ok("no limit")
    if limit >= MIN_OPEN_FILES:
        return ok(f"limit {limit}")
    raised = min(65_536, most) if most > 0 else 65_536
    return warn(f"limit {limit}", f"ulimit -n {raised}; in a pod: the runtime's LimitNOFILE")


def model(name: str) -> Callable[[], Finding]:
    """Checks whether a model could be served, without reading its weights."""

    def check() -> Finding:
        advice = "choose a folder with config.json, tokenizer.json and *.safetensors"
        try:
            folder, _ = resolve_model(name)
            from batonlm.tokenizer.encoder import load_tokenizer

            load_tokenizer(folder)
        except InvalidArgument as error:
            return fail(error.message, advice)
        try:
            from batonlm.engine.checkpoint import check_files
            from batonlm.engine.config import EngineConfig
            from batonlm.engine.loader import outline
        except (ImportError, OSError):
            return warn(f"{folder.name}: only the tokenizer was checked", ENGINE_ADVICE)
        try:
            weights = check_files(folder)
            network = outline(EngineConfig(str(folder))).network
        except InvalidArgument as error:
            return fail(error.message, advice)
        size = sum(file.stat().st_size for file in weights)
        return ok(f"{folder.name}: {type(network).__name__}, {size / 2**20:.1f} MiB of weights")

    return check
