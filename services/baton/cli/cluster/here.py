"""What this pod has that a worker's pod would have, and what that means; asks no API."""

from __future__ import annotations

import resource
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from baton.cli.checks import MIN_OPEN_FILES, MIN_SHM_BYTES
from baton.cli.cluster.needs import Needs
from baton.cli.findings import Finding, fail, ok, warn

API_NAME = "kubernetes.default.svc"


def dns(names: Sequence[str]) -> Finding:
    """names: of Services, in this cluster's DNS."""
    missing = [name for name in (API_NAME, *names) if not _resolves(name)]
    if API_NAME in missing:
        return fail(
            f"{API_NAME} has no address: DNS does not work in this pod",
            "see the pods of CoreDNS in kube-system, and NetworkPolicies that forbid port 53",
        )
    if missing:
        return warn(
            f"no address yet: {', '.join(missing)}",
            "a headless Service has addresses once a pod of it runs",
        )
    return ok(f"{len(names) + 1} names have addresses")


def memory_lock(needs: Needs, limit: int | None = None) -> Finding:
    """limit: bytes, -1 for none; None: this process's own."""
    found = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if found in (-1, resource.RLIM_INFINITY):
        return ok("no limit on locked memory")
    detail = f"{found >> 10} KiB may be locked"
    if needs.rdma:
        return warn(
            detail,
            "RDMA registers the KV ring: give prefill and decode the capability IPC_LOCK (the "
            "preset gpu-rdma does), or raise the container runtime's LimitMEMLOCK",
        )
    return ok(f"{detail}; TCP and shared memory need none")


def open_files(limit: int | None = None) -> Finding:
    found = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if found in (-1, resource.RLIM_INFINITY) or found >= MIN_OPEN_FILES:
        return ok("no limit" if found in (-1, resource.RLIM_INFINITY) else f"limit {found}")
    return warn(f"limit {found}", f"raise the container runtime's LimitNOFILE to {MIN_OPEN_FILES}")


def shared_memory(folder: str = "/dev/shm", least: int = MIN_SHM_BYTES) -> Finding:
    try:
        size = shutil.disk_usage(folder).total
    except OSError:
        return warn(f"there is no {folder}", "mount an emptyDir with medium Memory there")
    detail = f"{folder} has {size >> 20} MiB"
    if size < least:
        return warn(
            f"{detail}; UCX moves KV between pods of a node by TCP then, and several ranks of a "
            "worker have no room to talk",
            "mount an emptyDir with medium Memory there; the chart does for prefill and decode",
        )
    return ok(detail)


def infiniband(needs: Needs, folder: str = "/dev/infiniband") -> Finding:
    files = sorted(path.name for path in Path(folder).glob("uverbs*"))
    if files:
        return ok(f"{folder} has {', '.join(files)}")
    if needs.rdma:
        return fail(
            f"{folder} has no uverbs device: this pod was given no RDMA",
            "ask for the device plugin's rdma/* resource in this pod as prefill and decode do",
        )
    return ok("no RDMA device in this pod, and none is needed")


def gpu_driver(needs: Needs, root: str = "/") -> Finding:
    driver = Path(root, "proc/driver/nvidia/version")
    devices = sorted(path.name for path in Path(root, "dev").glob("nvidia[0-9]*"))
    if devices and driver.exists():
        words = driver.read_text().split("  ")
        return ok(f"{len(devices)} GPUs in this pod, {words[1].strip() if words[1:] else 'driver'}")
    if needs.gpu:
        return warn(
            "no GPU in this pod",
            "to try one, run the doctor with a limit of nvidia.com/gpu: 1 and, where the cluster "
            "needs it, runtimeClassName nvidia",
        )
    return ok("none in this pod, and none is needed")


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False
