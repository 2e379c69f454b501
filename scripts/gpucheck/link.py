"""What NIXL moves between two processes of one machine, without any of Baton's code around it.

The second process owns memory and waits; this one reads it whole, again and again. Hand-overs are
compared with what comes out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from baton_loadtest.report import Result
from batonlm.transfer.ucx import KvNetwork, choose
from gpucheck.check import Check, Skip
from gpucheck.figures import median
from gpucheck.neighbour import answer, neighbour, questions
from gpucheck.timing import settle

DEADLINE_S = 20.0
"""Of one read."""


def run(check: Check) -> Iterator[Result]:
    """The part names the kind of memory on both sides: host, which is pinned, or device."""
    if find_spec("nixl") is None:
        raise Skip("NIXL is not installed; gpucheck/strip_nixl.py makes a small copy to carry")
    size = 1 << 28 if check.on_gpu else 1 << 20
    agent, memory, kind = open_agent("reader", check.device, check.part, size)
    with neighbour("gpucheck.link", check.device, check.part, str(size)) as owner:
        hello = owner.listen()
        name = agent.add_remote_agent(bytes.fromhex(hello["metadata"]))
        theirs = [(hello["address"], size, 0)]
        ours = agent.get_xfer_descs([(memory.data_ptr(), size, 0)], kind)
        remote = agent.get_xfer_descs(theirs, kind)
        times = []
        for _ in range(12):
            began = time.perf_counter()
            handle = agent.initialize_xfer("READ", ours, remote, name)
            state = agent.transfer(handle)
            while state == "PROC" and time.perf_counter() - began < DEADLINE_S:
                state = agent.check_xfer_state(handle)
            times.append(time.perf_counter() - began)
            if state != "DONE":
                raise RuntimeError(f"a read of {kind} ended as {state}")
            agent.release_xfer_handle(handle)
        settle(check.device)
        wrong = int((memory != 7).sum())
    yield Result(link_name(check.part), size / median(times[2:]), "B/s")
    yield Result(f"bytes wrong after reads, {check.part}", wrong, "bytes", goal=0, met=wrong == 0)


def link_name(part: str) -> str:
    return f"NIXL between two processes, {part}"


def open_agent(name: str, device: str, part: str, size: int) -> tuple[Any, torch.Tensor, str]:
    """An agent with `size` bytes registered: the agent, the memory and NIXL's word for its kind."""
    choose(KvNetwork.TRUSTED).apply()
    from nixl import nixl_agent, nixl_agent_config

    on_device = part == "device" and device == "cuda"
    pinned = part == "host" and device == "cuda"
    place = "cuda" if on_device else "cpu"
    memory = torch.zeros(size, dtype=torch.uint8, device=place, pin_memory=pinned)
    kind = "VRAM" if on_device else "DRAM"
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.data_ptr(), size, 0, "")], kind)
    return agent, memory, kind


def main() -> None:
    """The owner of the memory."""
    device, part, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    agent, memory, _ = open_agent("owner", device, part, size)
    memory.fill_(7)
    settle(device)
    answer(metadata=agent.get_agent_metadata().hex(), address=memory.data_ptr())
    for _ in questions():
        pass


if __name__ == "__main__":
    main()
