"""`baton up`: runs all five stages on this machine.

In the foreground this process is the supervisor. With --detach it starts the supervisor as another
process in a new session, forwards its reports, and prints one JSON line when everything is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from batonlm.cli import state, throwaway_ca
from batonlm.cli.access import KEY_VARIABLE, Access
from batonlm.cli.layout import Layout, UpOptions, check_machine, plan, served_models
from batonlm.cli.supervisor import START_TIMEOUT_S, STOP_BOUND_S, StartFailed, Supervisor
from batonlm.core.errors import InvalidArgument
from batonlm.core.scheduler.policy import SPECULATION
from batonlm.engine.config import CHOICES
from batonlm.rpc.children import KILL_S


def greeting(description: dict[str, Any], model: str, *, keys: bool) -> str:
    """Returns the text that shows how to use the running Baton. description: see
    `Supervisor.description`. keys: whether clients need an API key."""
    name = os.path.basename(sys.argv[0]) if sys.argv[0].endswith("baton") else "baton"
    command = sys.argv[0] if "/" in sys.argv[0] and name == "baton" else name
    http, ca = description["http"], description.get("ca", "")
    trust = f"--cacert {ca} " if ca else ""
    header = f' -H "authorization: Bearer ${KEY_VARIABLE}"' if keys else ""
    key = f'os.environ["{KEY_VARIABLE}"]' if keys else '"none"'
    python = f"  # SSL_CERT_FILE={ca} python ...\n" if ca else ""
    return f"""
Baton answers at {http} (OpenAI HTTP) and {description["grpc"]} (gRPC).
Chat in a browser at {http}/, or ask from here:

  {command} chat "What is the capital of France?"

  curl {trust}{http}/v1/chat/completions{header} -H 'content-type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "What is 3 + 4?"}}]}}'

{python}  from openai import OpenAI
  client = OpenAI(base_url="{http}/v1", api_key={key})
  print(client.chat.completions.create(model="{model}", messages=[
      {{"role": "user", "content": "Who are you?"}}]).choices[0].message.content)

Stop it: {command} down{state.option()}      Logs: {state.log_file()}"""


_PARTS = {
    "fork": "waits for torch, which all engines import once",
    "engine": "imports torch and checks that the model fits",
    "weights": "loads weights",
    "check": "checks the model against its own attention",
    "ring": "tries its transport of KV",
}
"""What a worker does in a part of its start. The other processes' parts are short."""


class Progress:
    """Shows the start and the end on stderr: on a terminal a bar per process that loads, otherwise
    plain lines."""

    def __init__(self, num_processes: int, note: str = "") -> None:
        """note: a line for the user before the first process serves."""
        self._console = Console(file=sys.stderr)
        self._began = time.monotonic()
        self._serving = 0
        self._num_processes = num_processes
        self._ready = self._stopping = False
        self._tasks: dict[str, TaskID] = {}
        self._bars = Bars(
            TextColumn("{task.description:>14} {task.fields[part]}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        if note:
            self._console.print(note)
        self._console.print(f"Starting {num_processes} processes")
        self._bars.start()

    def show(self, what: str, *details: object) -> None:
        match what, details:
            case "part", (str(name), str(part)) if part in _PARTS and not self._ready:
                if self._console.is_terminal:
                    self._bars.update(self._task(name), part=_PARTS[part])
                else:
                    self._console.print(f"  {self._elapsed():5.1f} s  {name} {_PARTS[part]}")
            case "loading", (str(name), int(done), int(total)):
                self._bars.update(self._task(name), completed=done, total=total)
            case "serving", (str(name),) if not self._ready:
                self._serving += 1
                if name in self._tasks:
                    self._bars.remove_task(self._tasks.pop(name))
                self._console.print(
                    f"  {self._elapsed():5.1f} s  {name} serves "
                    f"({self._serving} of {self._num_processes})"
                )
            case "serving", (str(name),):
                self._console.print(f"{name} serves again")
            case "restarting", (str(name), code):
                self._console.print(f"{name} ended ({_ending(code)}); starting it again")
            case "ready", ():
                self._ready = True
                self._bars.stop()
                self._console.print(f"Ready after {self._elapsed():.1f} s")
            case "stopping", (int(count), bool(killed)):
                self._stopping = True
                self._bars.stop()
                how = "Killing" if killed else "Stopping"
                more = "" if killed else "; a second Ctrl-C kills them"
                self._console.print(f"{how} {count} processes{more}")
            case "stopped", () if self._stopping:
                self._console.print("Stopped: nothing runs any more")

    def close(self) -> None:
        self._bars.stop()

    def _task(self, name: str) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=None, part="")
        return self._tasks[name]

    def _elapsed(self) -> float:
        return time.monotonic() - self._began


def _ending(code: object) -> str:
    if isinstance(code, int) and code < 0:
        return f"killed by signal {-code}"
    return f"exit code {code}"


DEMO_PROMPT = "Tell me a story about yourself."
NOTICES = 1024
"""How many notices may wait to be delivered; beyond that the oldest are dropped."""
NOTICES_S = 2.0
"""How long the end waits for their delivery."""
_COUNTS = ("prefill", "decode", "tokenizer", "detokenizer", "routers")


def add_parser(subparsers: Any) -> None:
    defaults = UpOptions()
    parser = subparsers.add_parser("up")
    parser.add_argument(
        "--model", action="append", default=[], metavar="MODEL",
        help="folder or hub id (default: the bundled model), with a name and options of its own: "
        "NAME=MODEL,decode=2,dtype=bfloat16; given again: one more model",
    )  # fmt: skip
    parser.add_argument(
        "--served-model-name", nargs="+", default=(), metavar="NAME",
        help="the model's name for clients, and others that stand for it (default: the folder's)",
    )  # fmt: skip
    parser.add_argument(
        "--max-model-len", type=int, default=0, metavar="TOKENS",
        help="longest sequence (default: the model's, or what the memory for KV holds)",
    )  # fmt: skip
    parser.add_argument(
        "--embed-model", nargs="+", default=(), metavar="MODEL",
        help="folders or hub ids of models for /v1/embeddings and /v1/rerank, a process each",
    )  # fmt: skip
    parser.add_argument(
        "--adapter", dest="adapters", nargs="+", action="extend", default=[],
        metavar="NAME=FOLDER", help="LoRA adapters of the model, which requests name as a model",
    )  # fmt: skip
    parser.add_argument(
        "--adapters-folder", default="", metavar="FOLDER",
        help="folder below which adapters may be loaded while it runs, see docs/adapters.md; or "
        "s3://BUCKET/PREFIX",
    )  # fmt: skip
    parser.add_argument(
        "--adapters-on-use", action="store_true",
        help="load from there what a request names; what is not used makes room",
    )  # fmt: skip
    for name in _COUNTS:
        parser.add_argument(
            f"--{name}", type=int, default=getattr(defaults, name), metavar="N",
            help=f"how many {name.rstrip('s')} processes (default %(default)s)",
        )  # fmt: skip
    for name, port in ("http", defaults.http_port), ("grpc", defaults.grpc_port):
        parser.add_argument(
            f"--{name}-port", type=int, default=port, metavar="P",
            help="of the first router (default %(default)s; 0: a free one)",
        )  # fmt: skip
    parser.add_argument(
        "--host",
        default=defaults.host,
        help="where clients reach the routers, such as 0.0.0.0; takes --keys (default %(default)s)",
    )
    parser.add_argument(
        "--allow-anonymous", action="store_true", help="answer anybody who reaches --host"
    )
    parser.add_argument(
        "--cors-origin", nargs="+", default=(), metavar="ORIGIN",
        help="web pages of these origins may call HTTP, such as http://localhost:3000 (*: all)",
    )  # fmt: skip
    parser.add_argument(
        "--prefer-split", dest="local_prefill_tokens", action="store_const", const=0, default=-1,
        help="hand every prompt over from prefill to decode, short ones too",
    )  # fmt: skip
    parser.add_argument(
        "--name",
        default="",
        help="of this Baton, to run several on one machine; see `baton status`",
    )
    parser.add_argument(
        "--transport", choices=("nixl", "loopback"), default=_best_transport(),
        help="how KV moves from prefill to decode (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--exact", action=argparse.BooleanOptionalAction, default=True,
        help="same tokens whatever runs beside them (default on)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=CHOICES["dtype"], default=defaults.dtype,
        help="number type of weights and KV (default auto: float32 on CPUs)",
    )  # fmt: skip
    parser.add_argument(
        "--quantize", choices=CHOICES["quantize"], default=defaults.quantize,
        help="weights of linear layers in 8 or 4 bits: int8 and int4 on CPUs, fp8 on GPUs (default "
        "%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache-dtype", choices=CHOICES["kv_cache_dtype"], default=defaults.kv_cache_dtype,
        help="number type of KV; int8, and fp8, less precise: a quarter of float32's memory "
        "(default %(default)s: --dtype)",
    )  # fmt: skip
    parser.add_argument(
        "--speculation",
        choices=SPECULATION,
        default=defaults.speculation,
        help="draft the next tokens where that saves time, of texts that repeat themselves, by "
        "--draft-model or by the model's own head; the tokens are the same (default %(default)s)",
    )
    parser.add_argument(
        "--draft-model", default="", metavar="MODEL",
        help="small model of the same tokenizer, a folder or hub id, for --speculation draft",
    )  # fmt: skip
    parser.add_argument(
        "--device", default=defaults.device, metavar="NAME",
        help="where prefill and decode compute: auto, cpu, cuda, cuda:N, GPU-UUID, MIG-UUID "
        "(default auto: GPUs where there are some, evenly)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N",
        help="torch threads of an engine process (default: cores shared out)",
    )  # fmt: skip
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N",
        help="ranks that share each layer of a worker's model, a GPU each (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--pipeline-parallel", type=int, default=1, metavar="N",
        help="stages of layers of a worker's model, of as many ranks each (default %(default)s)",
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
        "--aliases", default="", metavar="FILE",
        help="names that stand for models, by weights, in this file ('baton route' makes it)",
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
    """Returns NIXL if it is installed."""
    return "nixl" if importlib.util.find_spec("nixl") else "loopback"


def run(args: argparse.Namespace) -> int:
    if args.name:
        state.choose(args.name)
    if running := state.who_runs():
        raise InvalidArgument(running)
    if args.demo and args.keys and not os.environ.get(KEY_VARIABLE):
        raise InvalidArgument(f"needs a key of --keys in ${KEY_VARIABLE}", field="demo")
    check_machine(_options(args))
    if args.detach:
        return _detach(args)
    notices = _Notices()
    code = 1
    try:
        code = asyncio.run(_supervise(args, notices))
    finally:
        if not notices.close():
            os._exit(code)  # The output of this process is not read any more.
    return code


def _options(args: argparse.Namespace) -> UpOptions:
    names = UpOptions.__dataclass_fields__.keys() & vars(args).keys()
    values: dict[str, Any] = {name: getattr(args, name) for name in names}
    values["model"], *more = args.model or [""]
    values["more_models"] = tuple(more)
    for name in ("served_model_name", "cors_origin", "embed_model", "adapters"):
        values[name] = tuple(values[name])
    return UpOptions(**values)


async def _supervise(args: argparse.Namespace, notices: _Notices) -> int:
    ca = throwaway_ca.make(state.make_folder()) if args.tls else None
    try:
        layout = plan(_options(args), ca)
        detached = args.report_fd >= 0
        reader = _Report(args.report_fd) if detached else _Terminal(args, layout)
        try:
            await _run(layout, notices, reader)
        except StartFailed as failure:
            if not detached:
                raise
            notices.add(partial(reader.show, "failed", failure.message))
            return 1
        finally:
            notices.add(reader.close)
        return 0
    finally:
        if ca is not None:
            shutil.rmtree(ca.folder, ignore_errors=True)


async def _run(layout: Layout, notices: _Notices, reader: _Report | _Terminal) -> None:
    """Runs until stopped. Raises StartFailed, and the reader's errors once all is ready."""
    loop = asyncio.get_running_loop()
    shown: asyncio.Future[None] = loop.create_future()

    def notify(what: str, *details: Any) -> None:
        notices.add(partial(reader.show, what, *details))
        if what == "ready":
            notices.add(partial(_greet, loop, shown, reader, supervisor.description()))

    supervisor = Supervisor(layout, notify)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, supervisor.stop)
    running = asyncio.create_task(supervisor.run())
    try:
        await asyncio.wait({running, shown}, return_when=asyncio.FIRST_COMPLETED)
        if shown.done():
            shown.result()
        await running
    finally:
        supervisor.stop()
        await asyncio.wait({running})
        shown.cancel()


def _greet(
    loop: asyncio.AbstractEventLoop,
    shown: asyncio.Future[None],
    reader: _Report | _Terminal,
    description: dict[str, Any],
) -> None:
    """Runs on the notices' thread: reports that all is ready, then resolves `shown`."""

    def settle(error: Exception | None) -> None:
        if shown.done():
            return
        if error is None:
            shown.set_result(None)
        else:
            shown.set_exception(error)

    failure: Exception | None = None
    try:
        reader.ready(description)
    except Exception as error:
        failure = error
    with contextlib.suppress(RuntimeError):  # the loop is closed: stopped meanwhile
        loop.call_soon_threadsafe(settle, failure)


class _Notices:
    """Delivers notices on a thread of its own.

    The reader of a terminal or pipe may be slow, stopped or gone, and the supervisor must not wait
    for it. If too many notices wait, the oldest are dropped.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque(maxlen=NOTICES)
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="notices", daemon=True)
        self._thread.start()

    def add(self, notice: Callable[[], None]) -> None:
        with self._changed:
            self._waiting.append(notice)
            self._changed.notify()

    def close(self) -> bool:
        """Returns whether all notices were delivered within NOTICES_S."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(NOTICES_S)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._closed):
                    self._changed.wait()
                if not self._waiting:
                    return
                notice = self._waiting.popleft()
            # A closed terminal or pipe has no reader.
            with contextlib.suppress(OSError, ValueError):
                notice()


class _Report:
    """Reports to the parent process by JSON lines. If the parent is gone, this process goes on."""

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "w", buffering=1)

    def show(self, *words: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.write(json.dumps(words) + "\n")

    def ready(self, description: dict[str, Any]) -> None:
        self.show("description", description)
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class _Terminal:
    """Reports to the user of this terminal."""

    def __init__(self, args: argparse.Namespace, layout: Layout) -> None:
        self._args = args
        self._progress = Progress(len(layout.processes), layout.note)
        self.show, self.close = self._progress.show, self._progress.close

    def ready(self, description: dict[str, Any]) -> None:
        _after_start(self._args, description)
        print("\nCtrl-C stops everything.", file=sys.stderr)


def _detach(args: argparse.Namespace) -> int:
    # By itself SIGTERM would end this process only, and leave what it started.
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return _start_supervisor(args)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminated(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _start_supervisor(args: argparse.Namespace) -> int:
    """Returns when all processes of the supervisor are ready. Raises StartFailed."""
    layout = plan(_options(args))
    reader, writer = os.pipe()
    flags = [a for a in sys.argv[1:] if a not in ("--detach", "--demo")]
    # A file, not a pipe: the supervisor would block on a pipe that is not read.
    with tempfile.TemporaryFile() as complaints, os.fdopen(reader, "rb", buffering=0) as reports:
        progress = Progress(len(layout.processes), layout.note)
        supervisor: subprocess.Popen[bytes] | None = None
        try:
            try:
                # An exception amid Popen would leave a process that nobody knows.
                early: list[int] = []
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, lambda number, _: early.append(number))
                supervisor = subprocess.Popen(
                    [sys.executable, "-m", "batonlm.cli.main", *flags, "--report-fd", str(writer)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=complaints,
                    pass_fds=(writer,),
                    start_new_session=True,
                )
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, _terminated)
                if early:
                    sys.exit(128 + early[0])
            finally:
                os.close(writer)
            for what, *details in _reported(reports.fileno()):
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
            complaints.seek(0)
            words = complaints.read().decode(errors="replace").strip().splitlines()
            raise StartFailed(words[-1].removeprefix("baton up: ") if words else "it ended")
        except BaseException as failure:
            if supervisor is not None:
                _end(supervisor)
            if isinstance(failure, KeyboardInterrupt | SystemExit):
                progress.close()
                print("Stopped: nothing runs any more", file=sys.stderr)
            raise
        finally:
            progress.close()


def _reported(reports: int) -> Iterator[list[Any]]:
    """Yields the supervisor's reports. Raises StartFailed if none arrives for too long."""
    deadline = time.monotonic() + START_TIMEOUT_S + STOP_BOUND_S
    held = b""
    while True:
        if not select.select([reports], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise StartFailed("the supervisor hangs")
        data = os.read(reports, 1 << 16)
        if not data:
            return
        *lines, held = (held + data).split(b"\n")
        yield from map(json.loads, lines)


def _end(supervisor: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        supervisor.terminate()
    try:
        supervisor.wait(STOP_BOUND_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait(KILL_S)


def _model_name(args: argparse.Namespace) -> str:
    return served_models(_options(args))[0].name


def _after_start(args: argparse.Namespace, description: dict[str, Any]) -> None:
    if args.demo:
        from batonlm.cli.chat import ask

        ca = Path(description["ca"]).read_bytes() if "ca" in description else None
        print(f"\n> {DEMO_PROMPT}\n")
        ask(Access(description["grpc"], ca, os.environ.get(KEY_VARIABLE, "")), DEMO_PROMPT)
    print(greeting(description, _model_name(args), keys=bool(args.keys)), file=sys.stderr)
