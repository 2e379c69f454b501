"""Group, what ranks add up, gather, pass on and agree on: one rank's end of it.

On CPUs it is gloo, on GPUs NCCL. All ranks of a group must call the same methods in the same order,
with tensors of the same shapes. On a GPU calls are put in the current stream and nothing waits for
them, so that they may be recorded in CUDA graphs.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from batonlm.engine.ranks.runner import Place

TIMEOUT = timedelta(minutes=30)
"""Longer than ranks can be apart, which is most while they load. A rank that died ends the others'
waiting at once."""

LOOPBACK = "127.0.0.1"

Store = Any
"""One of torch.distributed, through which ranks find each other; its stubs do not export them."""


def open_store(fd: int, host: str, port: int, place: Place) -> Store:
    """The store of all ranks: a file that all have open as `fd`; or, with a host, rank 0's, which
    is served by whoever has the listening socket `fd`. That one does not check who connects."""
    if not host:
        return distributed.FileStore(f"/proc/self/fd/{fd}", place.size)  # type: ignore[attr-defined]
    serves = place.rank == 0
    return distributed.TCPStore(  # type: ignore[attr-defined]
        host, port, None, serves, TIMEOUT, wait_for_workers=False,
        master_listen_fd=fd if serves else None,
    )  # fmt: skip


def part_of(store: Store, name: str) -> Store:
    """A store whose keys are its own."""
    return distributed.PrefixStore(name, store)  # type: ignore[attr-defined]


class Group:
    """store: through which its ranks find each other. host: this machine's address for them."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        host: str = LOOPBACK,
    ):
        self.rank, self.size = rank, size
        self._device = device
        # Numbers of the host are agreed on beside the device's work.
        self._gloo = _gloo(part_of(store, "host"), rank, size, host)
        self._work: Any = self._gloo
        if device.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            self._work = distributed.ProcessGroupNCCL(part_of(store, "device"), rank, size, options)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, the same bits on each. Half precision is added in float32 on CPUs.

        On a CPU sums are made of gathered parts in the order of the ranks: gloo's own sum cuts a
        tensor into pieces and adds each in another order, so that a row's bits would depend on how
        many rows there are. NCCL's does that too; exactness is not to be had on GPUs.
        """
        if self.size == 1:
            return part
        if part.is_cuda:
            total = part.contiguous().clone()
            self._work.allreduce([total]).wait()
            return total
        parts = self._gather(self._work, part)
        if part.dtype.itemsize < 4:
            parts = [each.float() for each in parts]
        total = parts[0] + parts[1]
        for each in parts[2:]:
            total += each
        return total.to(part.dtype)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[..., n] of each rank -> [..., size * n], in the order of the ranks."""
        return part if self.size == 1 else torch.cat(self._gather(self._work, part), -1)

    def pass_on(self, tensor: torch.Tensor, source: int) -> None:
        """Makes the contiguous tensor on all ranks what it is on `source`, in place."""
        if self.size > 1:
            options = distributed.BroadcastOptions()
            options.rootRank = source
            self._work.broadcast([tensor], options).wait()

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._work.send([tensor.contiguous()], rank, 0).wait()

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Fills a contiguous tensor."""
        self._work.recv([tensor], rank, 0).wait()

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        return int(min(self._gather(self._gloo, torch.tensor([number], dtype=torch.int64))))

    def common(self, numbers: frozenset[int], limit: int) -> frozenset[int]:
        """What is in all ranks' sets of numbers from 0 up to `limit`."""
        mask = torch.zeros(limit + 1, dtype=torch.int64)
        mask[sorted(numbers)] = 1
        masks = torch.stack(self._gather(self._gloo, mask))
        return frozenset(masks.amin(0).nonzero().flatten().tolist())

    def _gather(self, work: Any, part: torch.Tensor) -> list[torch.Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        work.allgather([parts], [part]).wait()
        return parts


def _gloo(store: Store, rank: int, size: int, host: str) -> Any:
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()  # type: ignore[attr-defined]
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = TIMEOUT
    return gloo(store, rank, size, options)
