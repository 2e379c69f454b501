"""One running sequence on its way to another decode worker; a value that is passed along.

The mover makes it, the attempt that runs the sequence asks its worker, and the attempt that is to
go on takes it over.
"""

from __future__ import annotations

import asyncio
import secrets
from enum import Enum

from baton.core.handover.messages import HANDOVER_ID_BYTES
from baton.core.request.attempt import AttemptKey, SequenceKey
from baton.core.request.model import WorkerIdentity
from baton.router.workers.decode_session import DecodeSession
from baton.router.workers.worker import Worker


class MigrationOutcome(Enum):
    STAYED = "stayed"
    """It goes on where it is, or ended there."""
    MOVED = "moved"
    FAILED = "failed"
    """Its KV was on offer and did not arrive: its request goes on by prefilling again."""
    DROPPED = "dropped"
    """Its request ended on the way."""


class Migration:
    """key: the sequence as its present worker knows it. The first outcome counts."""

    def __init__(
        self, key: SequenceKey, sender: Worker[DecodeSession], receiver: WorkerIdentity
    ) -> None:
        self.key = key
        self.receiver = receiver
        self.handover_id = secrets.token_bytes(HANDOVER_ID_BYTES)
        self.outcome: MigrationOutcome | None = None
        self._sender = sender
        self._over = asyncio.Event()

    @property
    def sender(self) -> WorkerIdentity:
        return self._sender.identity

    def ask(self) -> None:
        """Has the worker put the sequence on offer. The answer comes to the attempt."""
        self._sender.client.hand_over(self.key, self.handover_id, self.receiver)

    def stayed(self) -> None:
        self._end(MigrationOutcome.STAYED)

    def moved(self) -> None:
        self._end(MigrationOutcome.MOVED)

    def failed(self) -> None:
        self._take_back(MigrationOutcome.FAILED)

    def dropped(self) -> None:
        self._take_back(MigrationOutcome.DROPPED)

    async def over(self) -> MigrationOutcome:
        """Returns the outcome when there is one."""
        await self._over.wait()
        assert self.outcome is not None
        return self.outcome

    def _take_back(self, outcome: MigrationOutcome) -> None:
        """Nobody collects it (any more); the sender is told."""
        if self.outcome is None:
            whole = AttemptKey(self.key.request_id, self.key.attempt)
            self._sender.client.cancel(whole, self.key.choice)
        self._end(outcome)

    def _end(self, outcome: MigrationOutcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
        self._over.set()
