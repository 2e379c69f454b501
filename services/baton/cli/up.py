"""`baton up`: runs all five stages on this machine; knows no stage's insides.

In front it is the supervisor itself. With --detach it starts itself once more in a session of its
own, passes on what that one reports, and prints one JSON line when everything is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from baton.cli import state, throwaway_ca
from baton.cli.access import KEY_VARIABLE, Access
from baton.cli.greeting import greeting
from baton.cli.layout import BUNDLED, Layout, UpOptions, plan
from baton.cli.progress import Progress
from baton.cli.supervisor import StartFailed, Supervisor
from baton.core.errors import InvalidArgument

DEMO_PROMPT = "Tell me a story about yourself."
_COUNTS = ("prefill", "decode", "tokenizer", "detokenizer", "routers")


def add_parser(subparsers: Any) -> None:
    defaults = UpOptions()
    parser = subparsers.add_parser("up", help="run all five stages on this machine")
    parser.add_argument("--model", default="", help="folder or hub id (default: the bundled model)")
    for name in _COUNTS:
        parser.add_argument(
            f"--{name}", type=int, default=getattr(defaults, name), metavar="N",
            help=f"how many {name.rstrip('s')} processes (default %(default)s)",
        )  # fmt: skip
    parser.add_argument("--http-port", type=int, default=defaults.http_port, metavar="P")
    parser.add_argument("--grpc-port", type=int, default=defaults.grpc_port, metavar="P")
    parser.add_argument(
        "--transport", choices=("nixl", "loopback"), default=_best_transport(),
        help="how KV moves from prefill to decode (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--exact", action=argparse.BooleanOptionalAction, default=True,
        help="same tokens whatever runs beside them (default on)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default=defaults.dtype,
        help="number type of weights and KV (default auto: float32 on CPUs)",
    )  # fmt: skip
    parser.add_argument(
        "--quantize", choices=("none", "int8"), default=defaults.quantize,
        help="weights of linear layers as 8-bit integers (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N",
        help="torch threads of an engine process (default: cores shared out)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-memory-mib", type=int, default=0, metavar="MIB",
        help="memory for KV of an engine process (default: an equal share of what is free)",
    )  # fmt: skip
    parser.add_argument(
        "--runner", choices=("torch", "fake"), default="torch",
        help="fake: tokens without a model, to try the machinery (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--keys", default="", metavar="FILE",
        help="ask clients for API keys of this file ('baton keys new' makes it)",
    )  # fmt: skip
    parser.add_argument(
        "--vllm-engine",
        action="store_true",
        help="routers also serve vllm.grpc.engine.VllmEngine, for gateways such as SMG",
    )
    parser.add_argument(
        "--tls",
        action="store_true",
        help="TLS everywhere, with a CA made for this run and thrown away after it",
    )
    parser.add_argument("--detach", action="store_true", help="return when ready, print JSON")
    parser.add_argument("--demo", action="store_true", help="ask something once ready")
    parser.add_argument("--report-fd", type=int, default=-1, help=argparse.SUPPRESS)


def _best_transport() -> str:
    """NIXL wherever it is installed."""
    return "nixl" if importlib.util.find_spec("nixl") else "loopback"


def run(args: argparse.Namespace) -> int:
    running = state.read()
    if running is not None:
        raise InvalidArgument(
            f"already running at {running['http']} (process {running['pid']}); "
            "'baton down' stops it"
        )
    if args.demo and args.keys and not os.environ.get(KEY_VARIABLE):
        raise InvalidArgument(f"needs a key of --keys in ${KEY_VARIABLE}", field="demo")
    if args.detach:
        return _detach(args)
    return asyncio.run(_supervise(args))


def _options(args: argparse.Namespace) -> UpOptions:
    names = UpOptions.__dataclass_fields__.keys() & vars(args).keys()
    return UpOptions(**{name: getattr(args, name) for name in names})


async def _supervise(args: argparse.Namespace) -> int:
    ca = throwaway_ca.make(state.folder()) if args.tls else None
    try:
        return await _run(args, plan(_options(args), ca))
    finally:
        if ca is not None:
            shutil.rmtree(ca.folder, ignore_errors=True)


async def _run(args: argparse.Namespace, layout: Layout) -> int:
    report = _Report(args.report_fd) if args.report_fd >= 0 else None
    progress = None if report else Progress(len(layout.processes))
    ready = asyncio.Event()

    def notify(what: str, *details: Any) -> None:
        if what == "ready":
            ready.set()
        if report is not None:
            report.send([what, *details])
        elif progress is not None:
            progress.show(what, *details)

    supervisor = Supervisor(layout, notify)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, supervisor.stop)
    running = asyncio.create_task(supervisor.run())
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if ready.is_set():
            if report is not None:
                report.send(["description", supervisor.description()])
                report.close()
            else:
                await asyncio.to_thread(_after_start, args, supervisor.description())
                print("\nCtrl-C stops everything.", file=sys.stderr)
        await running
    except StartFailed as failure:
        if report is None:
            raise
        report.send(["failed", failure.message])
        return 1
    finally:
        waiting.cancel()
        if progress is not None:
            progress.close()
    return 0


class _Report:
    """Tells the starting process, by JSON lines, what happens. Its absence stops nothing later."""

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "w", buffering=1)

    def send(self, said: list[Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._file.write(json.dumps(said) + "\n")

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._file.close()


def _detach(args: argparse.Namespace) -> int:
    layout = plan(_options(args))
    reader, writer = os.pipe()
    flags = [a for a in sys.argv[1:] if a not in ("--detach", "--demo")]
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "baton.cli.main", *flags, "--report-fd", str(writer)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(writer,),
        start_new_session=True,
    )
    os.close(writer)
    progress = Progress(len(layout.processes))
    try:
        with os.fdopen(reader) as reports:
            for line in reports:
                what, *details = json.loads(line)
                if what == "failed":
                    raise StartFailed(details[0])
                if what == "description":
                    progress.close()
                    if args.demo:
                        _after_start(args, details[0])
                    else:
                        print(json.dumps({k: v for k, v in details[0].items() if k != "pid"}))
                    return 0
                progress.show(what, *details)
        assert supervisor.stderr is not None
        words = supervisor.stderr.read().decode(errors="replace").strip().splitlines()
        raise StartFailed(words[-1] if words else "the supervisor ended")
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            supervisor.terminate()
        supervisor.wait()
        raise
    finally:
        progress.close()


def _after_start(args: argparse.Namespace, description: dict[str, Any]) -> None:
    if args.demo:
        from baton.cli.chat import ask

        ca = Path(description["ca"]).read_bytes() if "ca" in description else None
        print(f"\n> {DEMO_PROMPT}\n")
        ask(Access(description["grpc"], ca, os.environ.get(KEY_VARIABLE, "")), DEMO_PROMPT)
    print(greeting(description, args.model or BUNDLED, keys=bool(args.keys)), file=sys.stderr)
