"""Checks and measures the engine on the GPU of this machine, and writes what came out as JSON.

    python scripts/gpu_check.py --json gpu.json [--quick] [--only SECTION ...]

Knows sections and how they fail: one that does is reported, and the others still run. Exit code 0
when all ran and every goal was met, 1 when not, 2 when there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "services"))

import torch  # noqa: E402

from baton_loadtest.report import Result, table, write  # noqa: E402

Section = Callable[["Check"], list[Result]]


@dataclass
class Check:
    """One run. ceilings: what was measured first and others are compared with, by name."""

    quick: bool
    ceilings: dict[str, float] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def attempt(self, name: str, section: Section) -> None:
        """Runs a section, and keeps what it found or how it failed."""
        print(f"== {name}", flush=True)
        began = time.monotonic()
        try:
            found = section(self)
        except Exception as error:
            traceback.print_exc()
            self.failures[name] = f"{type(error).__name__}: {error}"
        else:
            self.results += found
            print(table(found), flush=True)
        self.results.append(Result(f"{name} took", time.monotonic() - began, "s"))

    @property
    def sound(self) -> bool:
        return not self.failures and all(result.met is not False for result in self.results)

    def ceiling(self, name: str) -> float:
        """Raises RuntimeError when its measurement failed, which fails who needs it too."""
        if name not in self.ceilings:
            raise RuntimeError(f"{name} was not measured")
        return self.ceilings[name]


def ceilings(check: Check) -> list[Result]:
    from gpucheck import timing

    for name, unit, measure in (
        ("copy bandwidth", "B/s", timing.copy_bandwidth),
        ("read bandwidth", "B/s", timing.read_bandwidth),
        ("matmul rate", "FLOP/s", timing.matmul_rate),
    ):
        check.ceilings[name] = measure()
        print(f"{name}: {check.ceilings[name]:.4g} {unit}", flush=True)
    torch.cuda.empty_cache()
    return [
        Result("copy bandwidth", check.ceilings["copy bandwidth"], "B/s"),
        Result("read bandwidth", check.ceilings["read bandwidth"], "B/s"),
        Result("matmul rate, bfloat16", check.ceilings["matmul rate"], "FLOP/s"),
    ]


def kernels(check: Check) -> list[Result]:
    from gpucheck import kernels

    found = [r for kind in ("float32", "bfloat16", "float16") for r in kernels.correctness(kind)]
    bandwidth = check.ceiling("read bandwidth")
    for batch, context in ((1, 8192), (64, 1024), (64, 8192)):
        found.append(kernels.decode_traffic(bandwidth, batch, context))
    torch.cuda.empty_cache()
    return found


def parity(check: Check) -> list[Result]:
    from gpucheck import parity

    return parity.tokens_of_tiny_models("float32", check.quick)


def agreement(check: Check) -> list[Result]:
    from gpucheck import parity

    return parity.tokens_of_tiny_models("bfloat16", quick=True)


def speed(check: Check) -> list[Result]:
    from gpucheck import figures, speed

    shape = figures.LLAMA_1B if check.quick else figures.LLAMA_8B
    prompt, context, batches = 1024, 1024 + 256, (1, 64)
    runner = speed.open_model(shape, max(batches), max(batches) * context, 4 * speed.CHUNK)
    found = []
    try:
        found += speed.prefill(runner, shape, check.ceiling("matmul rate"), 3 * speed.CHUNK)
        for batch in batches:
            bandwidth = check.ceiling("read bandwidth")
            found += speed.decode(runner, shape, bandwidth, batch, prompt, context)
    finally:
        runner.close()
        torch.cuda.empty_cache()
    found.append(Result("most memory allocated", torch.cuda.max_memory_allocated(), "B"))
    return found


SECTIONS: dict[str, Section] = {
    "ceilings": ceilings,
    "kernels": kernels,
    "parity": parity,
    "agreement": agreement,
    "speed": speed,
}


def report(check: Check, path: Path) -> None:
    """The form of every measurement, and beside it the GPU and what failed."""
    import transformers
    import triton

    write(path, 0, check.results)
    said = json.loads(path.read_text())
    said["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    said["versions"] = {
        module.__name__: module.__version__ for module in (torch, triton, transformers)
    }
    said["failures"] = check.failures
    path.write_text(json.dumps(said, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller models")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=[], help="some sections")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check: torch finds no GPU on this machine, so nothing was run", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    check = Check(chosen.quick)
    for name, section in SECTIONS.items():
        if not chosen.only or name in chosen.only or name == "ceilings":
            check.attempt(name, section)
            report(check, chosen.json)
    for name, reason in check.failures.items():
        print(f"{name} failed: {reason}")
    return 0 if check.sound else 1


if __name__ == "__main__":
    sys.exit(main())
