"""`baton doctor gpu`: whether a worker on this machine's GPUs can run and move KV, and what to do.

The order is that of the parts: driver, GPUs, torch, the compiler of kernels, then what KV takes
between machines. Each check reads the real thing (NVML, /proc, /sys, the installed wheels, a sum
computed on each GPU); `root` and `driver` stand for them in tests.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batonlm.cli import checks
from batonlm.cli.checks import Check, Finding, fail, ok, report, warn
from batonlm.cli.kv import fabric
from batonlm.cli.kv.fabric import Fabric
from batonlm.engine.gpus import VISIBLE, Driver, Gpu, find_driver, visible
from batonlm.engine.memory import size

_OLDEST_DRIVER = {"12": 525, "13": 580}
"""By the major version of CUDA; NVIDIA promises that minor versions need no newer one."""
_OLDEST_CAPABILITY = (8, 0)
"""Of Ampere: what the kernels are compiled and tested for, and the first with bfloat16."""
_DMA_BUF_KERNEL = (5, 12)
_SUM_TIMEOUT_S = 120.0
_BUSY = 0.9
"""A GPU with less of its memory free is used by somebody else."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("gpu", help="say what this machine's GPUs lack for a worker")
    # The parent parser also has --json; a default here would override it.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a worker could not compute on a GPU here, else 0."""
    return report(every(), as_json=args.json, needed="driver")


def every(root: Path = Path("/")) -> Iterator[Check]:
    found = find_driver()
    hardware = fabric.look(root)
    yield "driver", lambda: driver(found, root)
    yield "gpus", lambda: gpus(found.gpus if found else (), os.environ.get(VISIBLE))
    yield "torch", lambda: torch(found)
    yield "compiler", compiler
    yield "shared memory", checks.shared_memory
    yield "ucx", ucx
    yield "rdma", lambda: rdma(hardware)
    yield "gpudirect", lambda: gpudirect(hardware, root)
    yield "locked memory", lambda: locked_memory(hardware)
    yield "huge pages", lambda: huge_pages(root)


def driver(found: Driver | None, root: Path = Path("/")) -> Finding:
    if found is not None:
        return ok(f"NVIDIA {found.version}")
    if (root / "proc/driver/nvidia/version").exists():
        return fail(
            "the kernel has NVIDIA's driver, but its library for management does not answer",
            "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility, as Baton's image has it; "
            "on the machine: 'nvidia-smi' says more",
        )
    return fail(
        "there is no NVIDIA driver",
        "install one, or, in a container, give it a GPU: a limit of nvidia.com/gpu: 1, and "
        "runtimeClassName nvidia where that is not the default; docker run --gpus all",
    )


def gpus(found: tuple[Gpu, ...], limit: str | None) -> Finding:
    """found: those of the driver. limit: CUDA_VISIBLE_DEVICES."""
    there = visible(found, limit)
    if not there:
        if found:
            return fail(
                f"{VISIBLE}={limit} allows none of {len(found)}",
                f"unset it, or name some: {', '.join(gpu.uuid for gpu in found)}",
            )
        return fail("the driver has none", "see 'nvidia-smi' and the kernel's log for NVRM errors")
    detail = "; ".join(
        f"{i}: {gpu.name}, {size(gpu.free_bytes)} of {size(gpu.total_bytes)} free, {gpu.uuid}"
        for i, gpu in enumerate(there)
    )
    busy = [str(i) for i, gpu in enumerate(there) if gpu.free_bytes < _BUSY * gpu.total_bytes]
    if busy:
        return warn(
            f"{detail}; in use: {', '.join(busy)}",
            "'nvidia-smi' shows by what. Workers that share a GPU take equal memory_share; "
            "beside other programs give kv_memory_mib",
        )
    return ok(detail)


_SUM = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    whole = torch.ones(1000, device=f"cuda:{i}").sum().item() == 1000
    found["gpus"].append([*torch.cuda.get_device_capability(i), whole])
print(json.dumps(found))
"""


def torch(found: Driver | None) -> Finding:
    """In a process of its own: a broken driver can end it, and its memory is given back."""
    if find_spec("torch") is None:
        return fail("torch is not installed", checks.ENGINE_ADVICE)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SUM], capture_output=True, timeout=_SUM_TIMEOUT_S, check=False
        )
        said = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return fail(
            "torch could not compute on a GPU",
            "see the kernel's log (dmesg) for NVRM and Xid errors",
        )
    return judge_torch(said, found)


def judge_torch(said: dict[str, Any], found: Driver | None) -> Finding:
    """said: what the program above prints."""
    detail = f"torch {said['torch']}"
    if not said["cuda"]:
        return fail(
            f"{detail} is built without CUDA",
            "install the build for CUDA (PyPI's own wheel on Linux), or use the image engine-gpu",
        )
    detail += f" for CUDA {said['cuda']}"
    oldest = _OLDEST_DRIVER.get(said["cuda"].partition(".")[0], 0)
    if found is not None and int(found.version.partition(".")[0]) < oldest:
        return fail(f"{detail}, driver {found.version}", f"install driver {oldest} or newer")
    if not said["gpus"]:
        return fail(f"{detail} sees no GPU", f"see {VISIBLE}, and the driver's version")
    if not all(whole for _, _, whole in said["gpus"]):
        return fail(f"{detail} computed a wrong sum", "replace the GPU: 'nvidia-smi -q' has ECC")
    old = [
        f"{major}.{minor}"
        for major, minor, _ in said["gpus"]
        if (major, minor) < _OLDEST_CAPABILITY
    ]
    if old:
        return warn(
            f"{detail}, compute capability {', '.join(old)}",
            "kernels are compiled for 8.0 (A100) and newer: older GPUs are not tried",
        )
    return ok(f"{detail} computes on {len(said['gpus'])}")


def compiler() -> Finding:
    named = os.environ.get("CC", "")
    found = shutil.which(named or "cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        return fail(
            "there is no C compiler: Triton makes a launcher for each kernel with one",
            "apt-get install gcc libc6-dev; the image engine-gpu has one",
        )
    return ok(found)


def ucx() -> Finding:
    """The transports that the UCX inside of NIXL's wheel brings along."""
    spec = find_spec("nixl")
    if spec is None or spec.origin is None:
        return fail("NIXL is not installed", checks.ENGINE_ADVICE)
    site = Path(spec.origin).parent.parent
    there = sorted(folder.name.partition(".")[0] for folder in site.glob("nixl_cu*.libs"))
    made = {
        kind: [
            name for name in there if any((site / f"{name}.libs/ucx").glob(f"libuct_{kind}.so*"))
        ]
        for kind in ("cuda", "ib")
    }
    lacking = [kind for kind, names in made.items() if not names]
    if lacking:
        return warn(
            f"NIXL's UCX has no transport for {' and '.join(lacking)}",
            "install NIXL's wheel from PyPI: KV moves through host memory, or over TCP",
        )
    cuda = importlib.import_module("torch").version.cuda if find_spec("torch") else None
    wanted = f"nixl_cu{cuda.partition('.')[0]}" if cuda else ""
    if wanted and wanted not in there:
        return fail(
            f"{', '.join(there)} with torch for CUDA {cuda}",
            f"pip install {wanted.replace('_', '-')}",
        )
    return ok(f"{', '.join(there)} with transports for CUDA and InfiniBand")


def rdma(hardware: Fabric) -> Finding:
    if not hardware.rdma:
        return ok("no RDMA device: KV goes over TCP between machines")
    names = ", ".join(
        f"{port.name} {port.mbit / 1000:.0f} Gbit/s{'' if port.active else ' (down)'}"
        for port in hardware.rdma
    )
    if not hardware.active:
        return warn(
            names, "bring a link up: 'ibstat', the switch, on InfiniBand the subnet manager"
        )
    if not hardware.rdma_files:
        return fail(
            f"{names}, but there is no /dev/infiniband/uverbs*",
            "in a pod: rdma.enabled with the device plugin's resource; on the machine: rdma-core",
        )
    return ok(names)


def gpudirect(hardware: Fabric, root: Path = Path("/")) -> Finding:
    """Whether a network card can reach a GPU's memory."""
    if (root / "sys/module/nvidia_peermem").exists():
        return ok("nvidia_peermem is loaded")
    version = root / "proc/driver/nvidia/version"
    is_open = version.exists() and "Open Kernel Module" in version.read_text()
    kernel = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if is_open and kernel >= _DMA_BUF_KERNEL:
        return ok("by dma-buf: NVIDIA's open kernel modules and this kernel have it")
    if not hardware.active:
        return ok("not there, and not needed without an RDMA device")
    return warn(
        "network cards cannot reach the GPUs' memory: KV takes a way through host memory",
        "modprobe nvidia_peermem (GPU operator: driver.rdma.enabled=true), or use NVIDIA's open "
        "kernel modules",
    )


def locked_memory(hardware: Fabric) -> Finding:
    if hardware.memlock is None:
        return ok("no limit")
    detail = f"{hardware.memlock >> 10} KiB may be locked"
    if not hardware.active:
        return ok(f"{detail}; only RDMA needs more")
    return fail(
        f"{detail}, and RDMA locks the staging memory",
        "containerd: LimitMEMLOCK=infinity; CRI-O: default_ulimits; without: ulimit -l unlimited. "
        "The capability IPC_LOCK has no effect on users other than root",
    )


def huge_pages(root: Path = Path("/")) -> Finding:
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return ok("unknown, and none are needed")
    numbers = {k: int(v) for k, v in re.findall(r"^(Huge\w+):\s+(\d+)", text, re.MULTILINE)}
    total, free = numbers.get("HugePages_Total", 0), numbers.get("HugePages_Free", 0)
    if not total:
        return ok("none are reserved, and none are needed")
    page = numbers.get("Hugepagesize", 0) << 10
    return ok(f"{free} of {total} free, of {size(page)}")
