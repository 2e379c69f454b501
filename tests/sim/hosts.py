"""A simulated machine: one process with its tasks, what it serves, and how it can be disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from itertools import count
from typing import Any, Protocol

from batonlm.rpc.tracing import OFF, Tracer

CURRENT: ContextVar[Host | None] = ContextVar("host", default=None)


class Wire(Protocol):
    """A call's way to or from the host."""

    def flush(self) -> None:
        """What is due may pass now."""


class Breakable(Protocol):
    """A call to the host."""

    def reset(self) -> None:
        """Both ends find the connection gone."""


class Handlers:
    """What a servicer registers, as a gRPC server would take it."""

    def __init__(self) -> None:
        self.by_path: dict[str, Callable[..., Any]] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass

    def add_registered_method_handlers(self, service: str, methods: Any) -> None:
        for name, handler in methods.items():
            behaviour = handler.unary_unary or handler.unary_stream or handler.stream_stream
            self.by_path[f"/{service}/{name}"] = behaviour


class Host:
    """One process at an address. held: messages do not pass, (to it, from it)."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.alive = False
        self.boots = 0
        self.frozen = False
        self.held = [False, False]
        self.handlers: Any = Handlers()
        self.tracer: Tracer = OFF
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.calls: dict[Breakable, None] = {}
        self.outgoing: dict[Breakable, None] = {}
        """Calls that this process makes, if it is a router that may be disturbed."""
        self.wires: dict[Wire, None] = {}
        self.on_thaw: Callable[[], None] = lambda: None

    def blocks(self, direction: int) -> bool:
        return self.frozen or self.held[direction]

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls a function as code of this process: the tasks it makes die with it."""
        context = Context()
        context.run(CURRENT.set, self)
        return context.run(function)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = self.run(lambda: asyncio.ensure_future(coroutine))
        return task

    def boot(self) -> None:
        """A new process: whatever was served before is gone."""
        self.alive, self.frozen = True, False
        self.boots += 1
        self.handlers = Handlers()

    def kill(self) -> None:
        """All connections break, and nothing of the process runs on."""
        self.alive = False
        self.reset()
        for task in list(self.tasks):
            task.cancel()

    def reset(self) -> None:
        """All connections break."""
        for call in [*self.calls, *self.outgoing]:
            call.reset()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        self.on_thaw()
        self.flush()

    def hold(self, directions: tuple[int, ...]) -> None:
        for direction in directions:
            self.held[direction] = True

    def release(self, *, reset: bool) -> None:
        """Messages pass again; reset: what was on its way is lost with its connections."""
        self.held = [False, False]
        if reset:
            self.reset()
        self.flush()

    def flush(self) -> None:
        for wire in list(self.wires):
            wire.flush()


class _Task(asyncio.Task[Any]):
    """asyncio keeps tasks in sets: with hashes that are numbers in order, these have one order."""

    made = count()

    def __init__(self, coroutine: Any, **options: Any) -> None:
        self._number = next(self.made)
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


def start_tracking(loop: asyncio.AbstractEventLoop) -> None:
    """From now on a task belongs to the process whose code made it."""
    _Task.made = count()
    loop.set_task_factory(_track)


def _track(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    task = _Task(coroutine, loop=loop, **options)
    host = CURRENT.get()
    if host is not None:
        host.tasks[task] = None
        task.add_done_callback(lambda done: host.tasks.pop(done, None))
    return task
