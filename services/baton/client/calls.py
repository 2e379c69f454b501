"""What both clients are made of: how a call is begun, and what is kept of its stream. Waits for
nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from baton.client.answer import Gathered
from baton.client.tries import Retries, Tries
from baton.core.request.request import Accepted, Finished
from baton.rpc import api_key as api_keys
from baton.rpc.address import split
from baton.v1 import inference_pb2_grpc

Begin = Callable[[float | None], Any]
"""Begins a call that may take so many seconds."""


class Calls:
    """The calls to the router at "host:port". open_channel: given the address, and the PEM of the
    CA to trust (empty: the usual ones; None: no TLS). Raises InvalidArgument naming the argument.
    """

    def __init__(
        self,
        open_channel: Callable[[str, bytes | None], Any],
        address: str,
        api_key: str,
        tls: bool | bytes,
        timeout_s: float | None,
        retries: Retries,
    ) -> None:
        host, _ = split(address, "address")
        api_keys.check(api_key, host, tls=bool(tls))
        self._metadata = api_keys.metadata(api_key)
        ca = tls if isinstance(tls, bytes) else b"" if tls else None
        self.channel = open_channel(address, ca)
        self._stub: Any = inference_pb2_grpc.InferenceStub(self.channel)
        self._timeout_s = timeout_s
        self._retries = retries

    def begin(self, method: str, request: object) -> Begin:
        call = getattr(self._stub, method)
        return lambda timeout_s: call(request, timeout=timeout_s, metadata=self._metadata)

    def tries(self, timeout_s: float | None) -> Callable[[], Tries]:
        """timeout_s: None stands for the client's own."""
        allowed_s = self._timeout_s if timeout_s is None else timeout_s
        return lambda: Tries(self._retries, allowed_s, time.monotonic())


class Progress:
    """A stream, as far as it was read."""

    def __init__(self, begin: Begin, tries: Callable[[], Tries]) -> None:
        self._begin = begin
        self._tries = tries
        self._gathered = Gathered()

    @property
    def accepted(self) -> Accepted | None:
        """Once it came."""
        return self._gathered.accepted

    @property
    def finished(self) -> Finished | None:
        """Once it came."""
        return self._gathered.finished
