"""The model's device: which one it is, and moving numbers to it and back without waiting for it.

On a GPU host memory is pinned, and torch's allocator of pinned memory hands a block out again only
when the copies that use it are done: dropping a tensor too early is safe. Both directions are
ordered with all other work of the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from batonlm.core.errors import Unavailable

_PORTABLE = 1
"""cudaHostRegisterPortable: for all contexts of the process."""


def choose_device(name: str) -> torch.device:
    """The device of a configured name; auto is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers, or rows of numbers, as a tensor on the device."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


def upload_bytes(data: bytes, device: torch.device) -> torch.Tensor:
    """At least one byte, as uint8 [len(data)] on the device."""
    host = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def pin(address: int, num_bytes: int) -> Callable[[], None]:
    """Page-locks memory of the host that is not torch's, so that GPUs copy from and to it without a
    copy in between and without waiting.

    Returns what undoes it, to be called before the memory is unmapped, when no copy runs. Raises
    Unavailable when CUDA refuses.
    """
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if code := int(cudart.cudaHostRegister(address, num_bytes, _PORTABLE)):
        raise Unavailable(f"staging memory cannot be page-locked: CUDA's error {code}")
    return lambda: cudart.cudaHostUnregister(address)


class Download:
    """Tensors of one device on their way to the host."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        """Starts the copies. On the host nothing is copied: the tensors must not change then."""
        self._event: torch.cuda.Event | None = None
        if not any(tensor.is_cuda for tensor in tensors):
            self._tensors = list(tensors)
            return
        self._tensors = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
        for host, tensor in zip(self._tensors, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        # Blocking: the waiting thread sleeps, instead of spinning on a core that asyncio can use.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host, in the order given, once all have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def settle(device: torch.device) -> None:
    """Waits until the current stream's work is done; on a CPU it always is. The thread sleeps."""
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        done.synchronize()
