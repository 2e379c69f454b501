"""Starts a real tokenizer or detokenizer process and ends it again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from batonlm.rpc.channels import INTERNAL_CLIENT

PATIENCE_S = 120.0
SMALL_WINDOW = (*INTERNAL_CLIENT, ("grpc.http2.bdp_probe", 0))
"""A peer that does not read is noticed after 64 KiB, not after however much the probe allows."""


@dataclass
class Started:
    """A process that serves, and a channel to it."""

    process: asyncio.subprocess.Process
    channel: grpc.aio.Channel

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exit_code(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()

    def modules(self) -> str:
        """The shared objects it has mapped."""
        return Path(f"/proc/{self.process.pid}/maps").read_text()

    def resident_mib(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("no VmRSS")


@asynccontextmanager
async def started(
    role: str, model: Path, *flags: str, constants: str = ""
) -> AsyncIterator[Started]:
    """constants: replaced as `batonlm.testing.worker` says."""
    module = ("batonlm.testing.worker", role) if constants else (f"batonlm.{role}",)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *module, "--model", str(model)),
        *("--listen", "127.0.0.1:0", "--log-level", "warning", *flags),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "BATON_TEST_CONSTANTS": constants},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            told = json.loads(await process.stdout.readline())
        assert told["role"] == role
        async with grpc.aio.insecure_channel(told["listen"], options=SMALL_WINDOW) as channel:
            yield Started(process, channel)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def exit_of(role: str, *flags: str) -> tuple[int, str]:
    """Exit code and stderr of a process that does not get to serve."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"batonlm.{role}", "--listen", "127.0.0.1:0", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert out == b""
    assert process.returncode is not None
    return process.returncode, err.decode()
