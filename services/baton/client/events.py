"""Events of `baton.v1.Inference` to core values."""

from __future__ import annotations

from baton.core.observe.stages import StageTimes
from baton.core.request.model import WorkerIdentity
from baton.core.request.request import (
    Accepted,
    Delta,
    Event,
    Finished,
    TextLogprob,
    TokenLogprobs,
    ToolCallDelta,
)
from baton.rpc.convert import finish_reason_from_proto
from baton.v1 import inference_pb2 as pb


def event_from_proto(message: pb.GenerationEvent) -> Event | None:
    """None for an event that a newer server knows and this client does not."""
    match message.WhichOneof("event"):
        case "delta":
            return _delta(message.delta)
        case "accepted":
            accepted = message.accepted
            return Accepted(
                request_id=accepted.request_id,
                model=accepted.model,
                prompt_tokens=accepted.prompt_tokens,
                seed=accepted.seed,
                prompt_token_ids=tuple(accepted.prompt_token_ids),
            )
        case "finished":
            finished = message.finished
            return Finished(
                prompt_tokens=finished.prompt_tokens,
                completion_tokens=finished.completion_tokens,
                cached_tokens=finished.cached_tokens,
                stages=_stages(finished.stages) if finished.HasField("stages") else None,
            )
        case _:
            return None


def _delta(message: pb.ChoiceDelta) -> Delta:
    return Delta(
        choice=message.choice,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(
            TokenLogprobs(_logprob(entry.token), tuple(_logprob(other) for other in entry.top))
            for entry in message.logprobs
        ),
        finish_reason=finish_reason_from_proto(message.finish_reason, "finish_reason"),
        stop_string=message.stop_string if message.HasField("stop_string") else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        reasoning=message.reasoning,
        tool_calls=tuple(
            ToolCallDelta(call.index, call.id, call.name, call.arguments)
            for call in message.tool_calls
        ),
    )


def _logprob(message: pb.TextLogprob) -> TextLogprob:
    return TextLogprob(message.token_id, message.text, message.logprob)


def _stages(message: pb.StageTimes) -> StageTimes:
    """Its instance ids are short."""
    times = (*StageTimes().spent(), "first_token", "total")
    return StageTimes(
        **{f"{name}_s": getattr(message, f"{name}_us") / 1e6 for name in times},
        prefill_cached_tokens=message.prefill_cached_tokens,
        decode_cached_tokens=message.decode_cached_tokens,
        kv_bytes=message.kv_bytes,
        attempts=message.attempts,
        moves=message.moves,
        workers=tuple(
            WorkerIdentity(worker.role, worker.instance_id, worker.address)
            for worker in message.workers
        ),
    )
