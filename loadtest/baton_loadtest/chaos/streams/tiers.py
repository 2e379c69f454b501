"""`baton chaos run --schedule tiers`: what happens to stored KV, and to who uses it, under load.

Workers with little memory for KV keep what they evict in host memory, in a folder that they share
and that is a small file system of its own, and in a second one as the store; they collect prefixes
from one another, too. The streams run again and again, so that most prompts are found somewhere.
Meanwhile stored files are damaged, workers of both engine roles are killed and stopped for a while,
the file system is filled up, and both folders are emptied.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from baton_loadtest.chaos.streams.fleet import Fleet, fleet
from baton_loadtest.chaos.streams.load import Load, client_of, compared_with, left_behind, streams
from baton_loadtest.chaos.world import Broken
from baton_loadtest.launch import say
from baton_loadtest.report import Result, at_most

ENGINES = ("prefill", "decode")
KV_MEMORY_MIB = 32
"""Of a worker; what all streams take is more."""
HOST_MIB, DISK_MIB, SMALL_DISK_MIB = 32, 32, 48
"""In front of the store. What two workers of each role may keep there together is more than their
file system has."""

FROZEN_S = 4.0
"""Long enough for a router to count a worker as dead."""

DAMAGES = ("bit", "cut", "swapped", "longer", "link")
"""How stored files are damaged."""

HOLDER = 'mount -t tmpfs -o size="$2" tmpfs "$1" && echo && exec cat'

_READS = "baton_prefix_tier_reads_total"
COUNTED = {
    "prompt tokens from host memory": ("baton_prefix_restored_tokens_total", "host"),
    "prompt tokens from the folder": ("baton_prefix_restored_tokens_total", "disk"),
    "prompt tokens from the store": ("baton_prefix_restored_tokens_total", "store"),
    "prompt tokens collected from other workers": ("baton_prefix_collected_tokens_total", ""),
    "stored units found torn": (_READS, "torn"),
    "stored units found corrupt": (_READS, "corrupt"),
    "stored units found to be others": (_READS, "foreign"),
    "stored units that were gone": (_READS, "gone"),
    "units that could not be written": ("baton_prefix_tier_writes_total", "failed"),
}
"""Counters of workers: the metric, and the value of a label."""


def measure(args: argparse.Namespace) -> list[Result]:
    """Raises Broken if no file system can be mounted, or a process does not come back."""
    with small_file_system(SMALL_DISK_MIB) as disk, tempfile.TemporaryDirectory() as store:
        return asyncio.run(_measure(args, disk, Path(store)))


async def _measure(args: argparse.Namespace, disk: Path, store: Path) -> list[Result]:
    wanted = streams(args.seed, args.streams)
    folders = (disk / "kv", store / "kv")
    async with (
        fleet(
            args,
            kv_memory_mib=KV_MEMORY_MIB,
            engine_flags=(
                *("--prefix-host-mib", str(HOST_MIB), "--prefix-disk-mib", str(DISK_MIB)),
                *("--prefix-disk-folder", str(folders[0]), "--prefix-store", str(folders[1])),
                # A step of this model is quicker than any tier.
                *("--prefix-restore-tokens", "64"),
            ),
            router_flags=("--collect-prefix-tokens", "64"),
        ) as running,
        client_of(running.routers) as stub,
    ):
        say(f"{len(wanted)} streams undisturbed")
        reference = await Load(stub, wanted, args.concurrency).once()
        load = Load(stub, wanted, args.concurrency)
        harm = Harm(running, folders, args.seed, args.hold)
        async with load.on_and_on():
            for _ in range(args.rounds):
                for kind, harms in harm.kinds().items():
                    say(kind)
                    harm.done[kind] += 1
                    await harms()
        await running.whole()
        held, unasked = await running.at_rest(), len(running.unasked)
        for name in running.names(*ENGINES):
            await harm.count(name)
    return [
        *(Result(kind, number, "") for kind, number in harm.done.items()),
        *(Result(f"files damaged: {kind}", harm.damaged[kind], "") for kind in DAMAGES),
        *(_some(name, harm.counted[name]) for name in COUNTED),
        *compared_with(
            [one for one, _ in load.answers],
            [reference[one.number] for one, _ in load.answers],
            [answer for _, answer in load.answers],
        ),
        at_most("requests that failed", sum(not a.finished for _, a in load.answers), "", 0),
        *left_behind(held, unasked),
    ]


def _some(name: str, number: float) -> Result:
    """A figure whose absence means that nothing was tried."""
    return Result(name, number, "", None, None, 1, number >= 1)


class Harm:
    """What is done to workers and to stored files. Belongs to one run."""

    def __init__(self, running: Fleet, folders: Sequence[Path], seed: int, hold_s: float) -> None:
        """folders: the shared one, on the small file system, and the store. hold_s: until the next
        harm, so that its consequences show."""
        self.done: Counter[str] = Counter()
        self.damaged: Counter[str] = Counter()
        self.counted: Counter[str] = Counter()
        """By the names of COUNTED."""
        self._running, self._folders, self._hold_s = running, folders, hold_s
        self._draw = random.Random(f"tiers {seed}")

    def kinds(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {
            "stored files damaged": self._damage,
            "workers killed": self._kill,
            "workers stopped for a while": self._freeze,
            "file system filled up": self._fill,
            "folder and store emptied": self._empty,
        }

    async def count(self, name: str) -> None:
        """Adds a worker's counters, which end with its process."""
        read = await self._running.metrics(name)
        for row, (metric, label) in COUNTED.items():
            self.counted[row] += sum(
                round(value)
                for key, value in read.items()
                if key.partition("{")[0] == metric and (not label or f'"{label}"' in key)
            )

    async def _damage(self) -> None:
        """Every second file, several times, since files are written and read meanwhile."""
        for _ in range(3):
            await asyncio.to_thread(self._damage_files)
            await asyncio.sleep(self._hold_s)

    def _damage_files(self) -> None:
        for folder in self._folders:
            files = sorted(folder.glob("*/*/*.kv"))
            for file in self._draw.sample(files, len(files) // 2):
                # A worker may delete it, or write it again.
                with suppress(OSError):
                    kind = self._draw.choice(DAMAGES)
                    damage(file, kind, self._draw.choice(files), self._draw)
                    self.damaged[kind] += 1

    async def _kill(self) -> None:
        for role in ENGINES:
            name = self._draw.choice(self._running.names(role))
            await self.count(name)
            await self._running.back(self._running.signal(name, signal.SIGKILL))

    async def _freeze(self) -> None:
        for role in ENGINES:
            pid = self._running.child(self._draw.choice(self._running.names(role))).pid
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(FROZEN_S)
            finally:
                os.kill(pid, signal.SIGCONT)
            await self._running.whole()

    async def _fill(self) -> None:
        filler = self._folders[0].parent / "filler"
        for _ in range(3):
            # What workers delete for room is filled up again.
            await asyncio.to_thread(fill, filler)
            await asyncio.sleep(self._hold_s)
        filler.unlink()

    async def _empty(self) -> None:
        for folder in self._folders:
            for part in folder.glob("*"):
                await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
        await asyncio.sleep(self._hold_s)


def damage(file: Path, kind: str, other: Path, draw: random.Random) -> None:
    """Damages a stored file in one of the DAMAGES. other: a file to swap it with or link it to.
    Raises OSError."""
    if kind == "link":
        file.unlink()
        file.symlink_to(other)
    elif kind == "swapped":
        file.write_bytes(other.read_bytes())
    elif kind == "longer":
        with file.open("ab") as out:
            out.write(b"more")
    elif kind == "cut":
        os.truncate(file, draw.randrange(file.stat().st_size))
    else:
        with file.open("r+b") as out:
            place = draw.randrange(file.stat().st_size)
            out.seek(place)
            (byte,) = out.read(1)
            out.seek(place)
            out.write(bytes([byte ^ 1 << draw.randrange(8)]))


def fill(filler: Path) -> None:
    """Lets a file grow until its file system is full."""
    with suppress(OSError), filler.open("ab", buffering=0) as out:
        while out.write(bytes(1 << 16)):
            pass


@contextmanager
def small_file_system(mib: int) -> Iterator[Path]:
    """The path of a file system of so many MiB in memory. Raises Broken where none can be mounted.

    It is mounted in a namespace of its own, without privileges, by a process that holds it; others
    reach it through that process's root.
    """
    with tempfile.TemporaryDirectory() as folder:
        namespace = ("unshare", "--user", "--map-root-user", "--mount")
        command = (*namespace, "sh", "-c", HOLDER, "sh", folder, f"{mib}m")
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdin is not None and holder.stdout is not None
            if not holder.stdout.readline():
                raise Broken("no file system can be mounted here")
            yield Path(f"/proc/{holder.pid}/root{folder}")
            holder.stdin.close()
