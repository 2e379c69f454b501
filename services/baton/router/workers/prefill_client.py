"""Speaks to one prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from baton.core.errors import BatonError
from baton.core.observe.stages import TraceContext
from baton.core.request.attempt import Attempt, AttemptKey, ChoiceTokens
from baton.core.request.model import WorkerIdentity
from baton.core.request.prompt_logprobs import PromptLogprobs
from baton.router.workers.unary_client import UnaryClient
from baton.rpc.convert import (
    attempt_to_proto,
    choice_tokens_from_proto,
    prompt_logprobs_from_proto,
)
from baton.v1.prefill_pb2 import CancelRequest, RunRequest
from baton.v1.prefill_pb2_grpc import PrefillStub

CANCEL_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """Token 0 of every choice, and what prefill says of itself. Times in seconds."""

    tokens: tuple[ChoiceTokens, ...]
    cached_tokens: int
    queue_s: float
    prefill_s: float
    prompt_logprobs: PromptLogprobs | None = None


class PrefillClient(UnaryClient):
    """`baton.v1.Prefill` of one instance id."""

    def __init__(
        self, channel: grpc.aio.Channel, worker: WorkerIdentity, router: WorkerIdentity
    ) -> None:
        super().__init__()
        self._router = router
        self._stub = PrefillStub(channel)
        self._worker = worker

    async def prefill(
        self, attempt: Attempt, *, handover_id: bytes, decode_instance_id: str
    ) -> PrefillAnswer:
        """Raises BatonError. Without a handover_id nothing is handed over. Only tokens of this
        attempt are returned.
        """
        answer = await self.call(
            self._stub.Run,
            RunRequest(
                attempt=attempt_to_proto(attempt),
                handover_id=handover_id,
                decode_instance_id=decode_instance_id,
                prefill_instance_id=self._worker.instance_id,
                router_instance_id=self._router.instance_id,
            ),
            request_id=attempt.request_id,
            timeout_s=attempt.remaining_s,
            trace=TraceContext(attempt.traceparent),
        )
        keys = attempt.keys()
        tokens = [choice_tokens_from_proto(entry) for entry in answer.choices]
        return PrefillAnswer(
            tokens=tuple(entry for entry in tokens if entry.key in keys),
            cached_tokens=answer.cached_tokens,
            queue_s=answer.queue_us / 1e6,
            prefill_s=answer.prefill_us / 1e6,
            prompt_logprobs=(
                prompt_logprobs_from_proto(answer.prompt_logprobs)
                if answer.HasField("prompt_logprobs")
                else None
            ),
        )

    async def cancel(self, key: AttemptKey) -> None:
        """Frees what the worker holds for an attempt. A worker that cannot be told is gone, and its
        blocks with it; one that only missed the message frees them by the attempt's deadline.
        """
        request = CancelRequest(request_id=key.request_id, attempt=key.attempt)
        try:
            await self.call(
                self._stub.Cancel,
                request,
                request_id=key.request_id,
                timeout_s=CANCEL_TIMEOUT_S,
            )
        except BatonError:
            return
