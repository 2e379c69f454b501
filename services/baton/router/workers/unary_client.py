"""Calls to one worker that has no stream of its own to tell when it is gone.

A call ends when its answer comes, when its caller is cancelled, or when the worker is given up by
whoever watches it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from baton.core.errors import WorkerLost
from baton.core.observe.stages import UNTRACED, TraceContext
from baton.rpc.calls import cancelled_here
from baton.rpc.errors import from_rpc_error
from baton.rpc.interceptors import REQUEST_ID_KEY
from baton.rpc.tracing import metadata_of


class UnaryClient:
    """The pool runs `run` while the worker's instance id lives and cancels it afterwards."""

    ready = True

    def __init__(self) -> None:
        self._running: set[Any] = set()

    async def run(self) -> None:
        """Returns never; on the way out all running calls end with WorkerLost."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            for call in list(self._running):
                call.cancel()

    async def call(
        self,
        method: Callable[..., Any],
        request: Any,
        *,
        request_id: str,
        timeout_s: float | None,
        trace: TraceContext = UNTRACED,
    ) -> Any:
        """The answer, or a BatonError. The worker's log names the request and its trace."""
        metadata = ((REQUEST_ID_KEY, request_id), *metadata_of(trace))
        call = method(request, timeout=timeout_s, metadata=metadata)
        self._running.add(call)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            if cancelled_here():
                raise
            raise WorkerLost("A worker of this request was lost.") from None
        finally:
            self._running.discard(call)
            call.cancel()
