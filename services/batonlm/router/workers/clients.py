"""Unary calls to prefill, tokenizer and encode workers. Each client serves one instance id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from batonlm.core.errors import BatonError, Internal, WorkerLost
from batonlm.core.kvcache.prefix import HASH_BYTES
from batonlm.core.observe.stages import UNTRACED, TraceContext
from batonlm.core.request.attempt import Attempt, AttemptKey
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.routing.routing import PrefixPlan
from batonlm.rpc.calls import cancelled_here
from batonlm.rpc.convert import attempt_to_proto, error_from_proto, identity_to_proto
from batonlm.rpc.errors import REQUEST_ID_KEY, from_rpc_error
from batonlm.rpc.tracing import metadata_of
from batonlm.v1.encode_pb2 import EncodeRunRequest, EncodeRunResponse, VectorOutput
from batonlm.v1.encode_pb2_grpc import EncodeStub
from batonlm.v1.prefill_pb2 import CancelRequest, RunRequest, RunResponse
from batonlm.v1.prefill_pb2_grpc import PrefillStub
from batonlm.v1.tokenizer_pb2 import (
    DecodeInput,
    DecodeRequest,
    EncodeInput,
    EncodeOutput,
    EncodeRequest,
)
from batonlm.v1.tokenizer_pb2_grpc import TokenizerStub

CANCEL_TIMEOUT_S = 2.0

TOKENIZE_TIMEOUT_S = 30.0
"""Seconds; more than the largest prompt takes."""

TOKEN_ID_BYTES = 4
"""Bytes on the wire."""


class UnaryClient:
    """Runs unary calls to one worker. The pool runs `run` while the instance id lives, and cancels
    it afterwards.

    A call ends when its answer arrives, when its caller is cancelled, or when the worker is lost.
    """

    ready = True

    def __init__(self) -> None:
        self._running: set[Any] = set()

    async def run(self) -> None:
        """Never returns. When it is cancelled, all running calls end with WorkerLost."""
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
        """Returns the answer or raises BatonError. The worker's log names the request and its
        trace."""
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


class PrefillClient(UnaryClient):
    """The `baton.v1.Prefill` service of one instance id."""

    def __init__(
        self, channel: grpc.aio.Channel, worker: WorkerIdentity, router: WorkerIdentity
    ) -> None:
        super().__init__()
        self._router = router
        self._stub = PrefillStub(channel)
        self._worker = worker

    async def prefill(
        self,
        attempt: Attempt,
        *,
        handover_id: bytes,
        decode_instance_id: str,
        plan: PrefixPlan | None = None,
    ) -> RunResponse:
        """Prefills an attempt, behind what the worker collects by the plan. Without a handover_id
        nothing is handed over. Raises BatonError."""
        prefix_sender = None if plan is None else identity_to_proto(plan.sender)
        answer: RunResponse = await self.call(
            self._stub.Run,
            RunRequest(
                attempt=attempt_to_proto(attempt),
                handover_id=handover_id,
                decode_instance_id=decode_instance_id,
                prefill_instance_id=self._worker.instance_id,
                router_instance_id=self._router.instance_id,
                prefix_sender=prefix_sender,
            ),
            request_id=attempt.request_id,
            timeout_s=attempt.remaining_s,
            trace=TraceContext(attempt.traceparent),
        )
        return answer

    async def cancel(self, key: AttemptKey) -> None:
        """Frees what the worker holds for an attempt. A worker that cannot be reached is gone with
        its blocks; one that only missed the message frees them by the attempt's deadline."""
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


class TokenizerClient(UnaryClient):
    """The `baton.v1.Tokenizer` service of one instance id, with one input per call."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__()
        self._stub = TokenizerStub(channel)

    async def encode(
        self, item: EncodeInput, request_id: str, remaining_s: float, trace: TraceContext = UNTRACED
    ) -> EncodeOutput:
        """Raises BatonError, naming the field if the prompt or the grammar is invalid."""
        request = EncodeRequest(inputs=[item])
        output: EncodeOutput = await self._only(
            self._stub.Encode, request, request_id, remaining_s, trace
        )
        names = len(output.token_ids) // TOKEN_ID_BYTES if item.with_token_strings else 0
        cut = len(output.token_ids) % TOKEN_ID_BYTES or len(output.prefix_hashes) % HASH_BYTES
        if cut or len(output.token_strings) != names:
            raise _astray()
        return output

    async def decode(
        self, item: DecodeInput, request_id: str, remaining_s: float, trace: TraceContext = UNTRACED
    ) -> str:
        """Returns the text of a whole list of ids. Raises BatonError; it names `tokens` if they are
        invalid."""
        request = DecodeRequest(inputs=[item])
        output = await self._only(self._stub.Decode, request, request_id, remaining_s, trace)
        return str(output.text)

    async def _only(
        self,
        method: Callable[..., Any],
        request: Any,
        request_id: str,
        remaining_s: float,
        trace: TraceContext,
    ) -> Any:
        """Returns the one output."""
        timeout_s = max(0.0, min(remaining_s, TOKENIZE_TIMEOUT_S))
        answer = await self.call(
            method, request, request_id=request_id, timeout_s=timeout_s, trace=trace
        )
        if len(answer.outputs) != 1:
            raise _astray()
        output = answer.outputs[0]
        if output.HasField("error"):
            raise error_from_proto(output.error)
        return output


NUMBER_BYTES = 4
"""Of a float32 on the wire."""

CALL_TIMEOUT_S = 120.0
"""Seconds; more than the largest group takes on a slow machine that does something else, too."""


class EncodeClient(UnaryClient):
    """The `baton.v1.Encode` service of one instance id."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__()
        self._stub = EncodeStub(channel)

    async def run_batch(
        self,
        request: EncodeRunRequest,
        request_id: str,
        remaining_s: float,
        trace: TraceContext = UNTRACED,
    ) -> Sequence[VectorOutput]:
        """Returns an output for each input, each with numbers or with an error. Raises
        BatonError."""
        timeout_s = max(0.0, min(remaining_s, CALL_TIMEOUT_S))
        answer: EncodeRunResponse = await self.call(
            self._stub.Run, request, request_id=request_id, timeout_s=timeout_s, trace=trace
        )
        sizes = {len(output.numbers) for output in answer.outputs if not output.HasField("error")}
        if (
            len(answer.outputs) != len(request.inputs)
            or len(sizes) > 1
            or any(not size or size % NUMBER_BYTES for size in sizes)
        ):
            raise Internal("The encode worker answered something else.")
        return answer.outputs


def _astray() -> Internal:
    return Internal("The tokenizer answered something else.")
