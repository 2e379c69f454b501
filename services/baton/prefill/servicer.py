"""The gRPC face of prefill: converts, calls, converts."""

from __future__ import annotations

import grpc

from baton.core.errors import InvalidArgument, Unavailable
from baton.core.request.attempt import AttemptKey
from baton.prefill.service import PrefillService
from baton.rpc.convert import (
    attempt_from_proto,
    choice_tokens_to_proto,
    prompt_logprobs_to_proto,
)
from baton.v1 import prefill_pb2, prefill_pb2_grpc

HANDOVER_ID_BYTES = 16


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves `baton.v1.Prefill` of one instance id."""

    def __init__(self, service: PrefillService, instance_id: str) -> None:
        self._service = service
        self._instance_id = instance_id

    async def Run(
        self,
        request: prefill_pb2.RunRequest,
        context: grpc.aio.ServicerContext[prefill_pb2.RunRequest, prefill_pb2.RunResponse],
    ) -> prefill_pb2.RunResponse:
        if request.prefill_instance_id not in ("", self._instance_id):
            raise Unavailable("this address now belongs to a newer prefill worker")
        if len(request.handover_id) not in (0, HANDOVER_ID_BYTES):
            raise InvalidArgument("must be empty or 16 bytes", field="handover_id")
        if request.handover_id and not request.decode_instance_id:
            raise InvalidArgument("is needed with a handover_id", field="decode_instance_id")
        first = await self._service.run(
            attempt_from_proto(request.attempt),
            request.handover_id,
            request.decode_instance_id,
            request.router_instance_id,
        )
        return prefill_pb2.RunResponse(
            choices=[choice_tokens_to_proto(tokens) for tokens in first.tokens],
            cached_tokens=first.cached_tokens,
            queue_us=round(first.queue_s * 1e6),
            prefill_us=round(first.prefill_s * 1e6),
            prompt_logprobs=prompt_logprobs_to_proto(first.prompt_logprobs),
        )

    async def Cancel(
        self,
        request: prefill_pb2.CancelRequest,
        context: grpc.aio.ServicerContext[prefill_pb2.CancelRequest, prefill_pb2.CancelResponse],
    ) -> prefill_pb2.CancelResponse:
        self._service.cancel(AttemptKey(request.request_id, request.attempt))
        return prefill_pb2.CancelResponse()
