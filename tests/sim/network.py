"""Calls without gRPC: an in-memory channel that the generated stubs take for a real one.

Streams are first in, first out; calls overtake each other freely. A connection may be reset, with
all that was on its way, a host may be unreachable in either direction, a message that the protocol
must bear twice may come twice, and tokens that it must miss may be lost. The router is the only
caller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from hashlib import blake2b
from random import Random
from typing import Any

import grpc

from batonlm.core.errors import BatonError, Internal, Unavailable
from batonlm.rpc.errors import DETAILS_KEY, grpc_code, to_status
from batonlm.v1.decode_pb2 import SessionRequest, SessionResponse
from tests.sim.hosts import CURRENT, Host

UP, DOWN = 0, 1
TWICE = "/baton.v1.Decode/Session"
"""The only stream whose messages carry what fences them."""
LOSS = 0.1


class Network:
    """All hosts by address, and what chance does to messages."""

    def __init__(self, draw: Random, *, twice: float, lost: int) -> None:
        """twice: share of the messages that may come twice and do. lost: how many of those that
        will be missed are lost."""
        self.draw = draw
        self.twice = twice
        self.lost = lost
        self.hosts: dict[str, Host] = {}
        self.faults: list[str] = []
        """What a handler raised and must not."""
        self._digest = blake2b(digest_size=8)
        self._calls = 0

    def delay(self) -> float:
        """Seconds that a message takes: mostly little, sometimes long."""
        return self.draw.uniform(0.0002, 0.004 if self.draw.random() < 0.9 else 0.08)

    def number(self) -> int:
        self._calls += 1
        return self._calls

    def loses(self, message: Any) -> bool:
        """Whether a frame with nothing but tokens that others follow is dropped."""
        if not self.lost or not isinstance(message, SessionResponse):
            return False
        frame = message.frame
        missed = frame.tokens and not (frame.failures or frame.started or frame.handed_over)
        if not missed or any(entry.finish_reason for entry in frame.tokens):
            return False
        drops = self.draw.random() < LOSS
        self.lost -= drops
        return drops

    def note(self, what: str) -> None:
        self._digest.update(f"{asyncio.get_running_loop().time():.6f} {what}\n".encode())

    @property
    def fingerprint(self) -> str:
        """Equal for two runs that delivered the same in the same order at the same times."""
        return self._digest.hexdigest()


class Pipe:
    """One direction of one call."""

    def __init__(
        self,
        network: Network,
        host: Host,
        direction: int,
        deliver: Callable[[Any], None],
        caller: Host | None,
    ) -> None:
        self._network, self._host, self._direction = network, host, direction
        self._deliver = deliver
        self._caller = caller
        if caller is not None:
            caller.wires[self] = None
        self._queue: deque[tuple[Any, int]] = deque()
        self._last = self._due = 0.0
        host.wires[self] = None

    def send(self, message: Any, times: int = 1) -> None:
        loop = asyncio.get_running_loop()
        self._queue.append((message, times))
        self._last = max(self._last, loop.time() + self._network.delay())
        loop.call_at(self._last, self._arrive)

    def flush(self) -> None:
        while self._due and self._queue and not self._blocked():
            self._due -= 1
            message, times = self._queue.popleft()
            self._network.note(f"{self._host.address} {self._direction}")
            for _ in range(times):
                self._deliver(message)

    def close(self) -> None:
        self._queue.clear()
        self._host.wires.pop(self, None)
        if self._caller is not None:
            self._caller.wires.pop(self, None)

    def _blocked(self) -> bool:
        caller, direction = self._caller, self._direction
        at_caller = caller is not None and caller.blocks(DOWN if direction == UP else UP)
        return at_caller or self._host.blocks(direction)

    def _arrive(self) -> None:
        self._due += 1
        self.flush()


class _End:
    """The last thing that comes down. error: None for a stream that ended well."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Context:
    """What handlers may ask of a call."""

    def __init__(self, send: Callable[[Any], None], metadata: Any) -> None:
        self._send = send
        self._metadata = metadata

    def invocation_metadata(self) -> Any:
        return self._metadata

    async def write(self, message: Any) -> None:
        self._send(message)
        await asyncio.sleep(0)


class StreamCall:
    """A call as its client holds it, and its other end."""

    def __init__(
        self, network: Network, host: Host, path: str, first: Any = None, metadata: Any = ()
    ) -> None:
        self._metadata = metadata
        self._network, self._host, self._path = network, host, path
        self._inbox: deque[Any] = deque()
        self._news = asyncio.Event()
        self._end: _End | None = None
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._unary_request = first
        self._serving: asyncio.Task[None] | None = None
        self._caller = caller = CURRENT.get()
        self._up = Pipe(network, host, UP, self._reach, caller)
        self._down = Pipe(network, host, DOWN, self._come, caller)
        host.calls[self] = None
        if caller is not None:
            caller.outgoing[self] = None
            if not caller.alive:
                self.reset()
                return
        # Who has nobody to talk to is told so, like who talks to somebody.
        self._up.send(self._open)

    async def write(self, message: Any) -> None:
        if self._end is not None:
            raise self._end.error or asyncio.InvalidStateError("the call is over")
        self._up.send(message, self._times(message))
        await asyncio.sleep(0)

    async def read(self) -> Any:
        while not self._inbox:
            if self._end is not None:
                if self._end.error is not None:
                    raise self._end.error
                return grpc.aio.EOF
            self._news.clear()
            await self._news.wait()
        return self._inbox.popleft()

    def cancel(self) -> bool:
        if self._end is None:
            self._finish(asyncio.CancelledError())
            self._up.send(self._abandoned)
        return True

    def reset(self) -> None:
        self._finish(_status(grpc.StatusCode.UNAVAILABLE))
        self._up.close()
        if self._serving is not None and self._host.alive:
            # The other end finds out on its own, a little later.
            loop = asyncio.get_running_loop()
            loop.call_later(self._network.delay(), self._serving.cancel)

    def _times(self, message: Any) -> int:
        """A stream begins only once, whatever else comes again."""
        may = self._path == TWICE and not (
            isinstance(message, SessionRequest) and message.HasField("hello")
        )
        return 2 if may and self._network.draw.random() < self._network.twice else 1

    def _reach(self, message: Any) -> None:
        """At the host."""
        if callable(message):
            message()
        else:
            self._requests.put_nowait(message)

    def _open(self) -> None:
        if not self._host.alive or self._path not in self._host.handlers.by_path:
            self.reset()
        else:
            self._serving = self._host.spawn(self._serve(self._host.handlers.by_path[self._path]))

    def _abandoned(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
        self._up.close()

    def _come(self, message: Any) -> None:
        """At the client."""
        if isinstance(message, _End):
            self._finish(message.error)
            self._up.close()
        elif self._end is None:
            self._inbox.append(message)
            self._news.set()

    def _finish(self, error: BaseException | None) -> None:
        if self._end is None:
            self._end = _End(error)
            self._news.set()
        self._down.close()
        self._host.calls.pop(self, None)
        if self._caller is not None:
            self._caller.outgoing.pop(self, None)

    async def _serve(self, handler: Callable[..., Any]) -> None:
        def send(message: Any) -> None:
            if not self._network.loses(message):
                self._down.send(message, self._times(message))

        try:
            given = self._iterate() if self._unary_request is None else self._unary_request
            result = handler(given, Context(send, self._metadata))
            if isinstance(result, AsyncIterator):
                async with aclosing(result) as responses:  # type: ignore[type-var]
                    async for response in responses:
                        send(response)
                        await asyncio.sleep(0)
            elif (answer := await result) is not None:
                send(answer)
            self._down.send(_End(None))
        except BatonError as error:
            self._down.send(_End(_told(error)))
        except Exception as error:
            self._network.faults.append(f"{self._path} raised {error!r}")
            self._down.send(_End(_told(Internal("internal error"))))

    async def _iterate(self) -> AsyncIterator[Any]:
        while True:
            yield await self._requests.get()


class UnaryCall:
    """A call with one answer. Awaited once."""

    def __init__(
        self,
        network: Network,
        host: Host,
        path: str,
        request: Any,
        timeout_s: float | None,
        metadata: Any,
    ) -> None:
        self._number = network.number()
        self._stream = StreamCall(network, host, path, request, metadata)
        self._task = asyncio.ensure_future(self._answer(timeout_s))

    def __hash__(self) -> int:
        """The router keeps calls in a set: so it has one order."""
        return self._number

    def __await__(self) -> Any:
        return self._task.__await__()

    def cancel(self) -> bool:
        return self._task.cancel()

    async def _answer(self, timeout_s: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._stream.read()
        except TimeoutError:
            raise _status(grpc.StatusCode.DEADLINE_EXCEEDED) from None
        finally:
            self._stream.cancel()
        return answer


class Channel:
    """The part of `grpc.aio.Channel` that stubs use."""

    def __init__(self, network: Network, host: Host) -> None:
        self._network, self._host = network, host

    def unary_unary(self, path: str, *_: Any, **__: Any) -> Callable[..., UnaryCall]:
        def call(request: Any, *, timeout: float | None = None, metadata: Any = ()) -> UnaryCall:
            return UnaryCall(self._network, self._host, path, request, timeout, metadata)

        return call

    def unary_stream(self, path: str, *_: Any, **__: Any) -> Callable[..., StreamCall]:
        return lambda request: StreamCall(self._network, self._host, path, request)

    def stream_stream(self, path: str, *_: Any, **__: Any) -> Callable[..., StreamCall]:
        return lambda: StreamCall(self._network, self._host, path)


class SimChannels:
    """In place of `batonlm.rpc.channels.Channels`."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def get(self, target: str, role: str = "") -> Channel:
        if target not in self._network.hosts:
            raise Unavailable("there is no such host")
        return Channel(self._network, self._network.hosts[target])

    async def drop(self, target: str, role: str = "") -> None:
        pass

    async def close(self) -> None:
        pass


def _status(code: grpc.StatusCode, trailing: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details="", debug_error_string=""
    )


def _told(error: BatonError) -> grpc.aio.AioRpcError:
    """As the server's interceptor puts it on the wire."""
    return _status(grpc_code(error), ((DETAILS_KEY, to_status(error).SerializeToString()),))
