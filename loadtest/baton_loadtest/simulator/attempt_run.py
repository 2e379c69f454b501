"""AttemptRun, one attempt on its workers: both legs, the hand-over, and what the router is told.

Decides nothing.

    prefill plans its first chunk ──► decode reserves ──► prefill may send ──► KV, chunk by chunk
    the last chunk has arrived ──► the hand-over's end (handover_s) ──► decode goes on

When decode has no room the attempt is over, and the router finds another place for the request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.core.errors import BatonError, Overloaded
from baton.core.request.attempt import Attempt
from baton_loadtest.simulator.decode_worker import DecodeWorker
from baton_loadtest.simulator.link import Link, moved
from baton_loadtest.simulator.prefill_worker import PrefillWorker
from baton_loadtest.simulator.queue import EventQueue
from baton_loadtest.simulator.requests import Record


class Owner(Protocol):
    """The router's side of an attempt. Each is called when the router hears of it."""

    def answered(self, queue_s: float, compute_s: float) -> None:
        """The first token is there, or all KV. May come twice."""

    def ended(self) -> None:
        """All its tokens are there."""

    def failed(self, error: BatonError, *, full: bool, where: str) -> None:
        """It is over. full: there was no room at the worker of that role."""


class SimulatedSender:
    """A prefill worker and its end of the network."""

    def __init__(self, worker: PrefillWorker, link: Link) -> None:
        self.worker = worker
        self.link = link


class SimulatedReceiver:
    """A decode worker and its end of the network."""

    def __init__(self, worker: DecodeWorker, link: Link) -> None:
        self.worker = worker
        self.link = link


class AttemptRun:
    """Implements `Run`. receiver None: prefill alone makes the only token. sender None: decode
    computes the prompt. At least one is set."""

    def __init__(
        self,
        queue: EventQueue,
        hop_s: float,
        kv_bytes: int,
        record: Record,
        attempt: Attempt,
        sender: SimulatedSender | None,
        receiver: SimulatedReceiver | None,
        owner: Owner,
    ) -> None:
        self.record = record
        self._queue = queue
        self._hop_s = hop_s
        self._kv_bytes = kv_bytes
        self._attempt = attempt
        self._size = len(attempt.token_ids)
        self._sender = sender
        self._receiver = receiver
        self._owner = owner
        self._over = False
        self._granted = False
        self._computed = self._sent = 0

    def start(self) -> None:
        """The router sends it off."""
        self._queue.after(self._hop_s, self._arrive)

    def planned(self) -> None:
        if self._receiver is not None:
            self._queue.after(self._hop_s, self._reserve)

    def computed(self, end: int, cached: int) -> None:
        if self._over:
            return
        self._computed = end
        self.record.cached_tokens = cached
        self._send()

    def first_token(self, queue_s: float, compute_s: float) -> None:
        if self._over:
            return
        self.record.token(self._queue.now + self._hop_s)
        self._tell(self._owner.answered, queue_s, compute_s)
        if self._receiver is None:
            self.ended()
            self._unpin()

    def started(self, cached: int) -> None:
        if self._sender is None:
            self.record.cached_tokens = cached
        self._tell(self._owner.answered, 0.0, 0.0)

    def ended(self) -> None:
        self._over = True
        self._tell(self._owner.ended)

    def failed(self, error: BatonError) -> None:
        self._fail(error, full=False, where="")

    def _tell(self, what: Callable[..., None], *args: object) -> None:
        self._queue.after(self._hop_s, what, *args)

    def _fail(self, error: BatonError, *, full: bool, where: str) -> None:
        if not self._over:
            self._over = True
            self._queue.after(self._hop_s, self._gave_up, error, full, where)

    def _gave_up(self, error: BatonError, full: bool, where: str) -> None:
        self._owner.failed(error, full=full, where=where)

    def _arrive(self) -> None:
        try:
            if self._sender is not None:
                receiver = "" if self._receiver is None else str(self._receiver.worker.number)
                self._sender.worker.add(
                    self._attempt, self, keep=self._receiver is not None, receiver=receiver
                )
            else:
                assert self._receiver is not None
                self._receiver.worker.add(self._attempt, self)
        except BatonError as error:
            where = "decode" if self._sender is None else "prefill"
            self._fail(error, full=isinstance(error, Overloaded), where=where)

    def _reserve(self) -> None:
        assert self._receiver is not None
        try:
            needed = self._receiver.worker.reserve(self._attempt, self)
        except BatonError as error:
            self._unpin()
            self._fail(error, full=False, where="decode")
            return
        if needed is None:
            self._unpin()
            self._fail(Overloaded("There is no room for its KV."), full=True, where="decode")
            return
        self._sent = needed
        self._queue.after(self._hop_s, self._may_send)

    def _may_send(self) -> None:
        assert self._sender is not None
        self._granted = True
        self._sender.worker.grant(self._attempt.key)
        self._send()

    def _send(self) -> None:
        """What is computed and was not sent; with the last of it the hand-over comes to its end."""
        if not self._granted or self._sender is None or self._receiver is None:
            return
        positions = max(0, self._computed - self._sent)
        last = self._computed == self._size
        if not positions and not last:
            return
        self._sent += positions
        self.record.moved_tokens += positions
        now = self._queue.now
        arrived = moved(now, positions * self._kv_bytes, self._sender.link, self._receiver.link)
        if last:
            self._granted = False
            tail_s = self._receiver.worker.facts.speed.handover_s
            self._queue.at(arrived + tail_s, self._complete)

    def _complete(self) -> None:
        assert self._receiver is not None
        self._receiver.worker.admit(self._attempt)
        self._unpin()

    def _unpin(self) -> None:
        """Prefill hears a moment later that nobody wants its KV any more."""
        assert self._sender is not None
        self._queue.after(self._hop_s, self._sender.worker.release, self._attempt.key)
