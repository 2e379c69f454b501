"""Converts what clients of `baton.v1.Inference` send and receive.

A router is such a client where another Baton serves the large model of a name.
"""

from __future__ import annotations

from batonlm.core.observe.stages import StageTimes
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.request.request import (
    Accepted,
    Delta,
    Event,
    Finished,
    TextLogprob,
    TokenLogprobs,
    ToolCallDelta,
    ToolChoice,
)
from batonlm.rpc.convert import finish_reason_from_proto, parsed
from batonlm.v1 import inference_pb2 as pb


def tool_choice_to_proto(choice: ToolChoice) -> pb.ToolChoice:
    use = pb.ToolChoice.Use.Value(f"USE_{choice.use.name}")
    return pb.ToolChoice(use=use, name=choice.name, single=not choice.parallel)


def event_from_proto(message: pb.GenerationEvent) -> Event | None:
    """Returns None for an event kind that this client does not know (from a newer server)."""
    match message.WhichOneof("event"):
        case "delta":
            return _delta(message.delta)
        case "accepted":
            return parsed(Accepted, message.accepted)
        case "finished":
            finished = message.finished
            stages = _stages(finished.stages) if finished.HasField("stages") else None
            return parsed(Finished, finished, stages=stages)
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
        tool_calls=tuple(parsed(ToolCallDelta, call) for call in message.tool_calls),
    )


def _logprob(message: pb.TextLogprob) -> TextLogprob:
    return TextLogprob(message.token_id, message.text, message.logprob)


def _stages(message: pb.StageTimes) -> StageTimes:
    """Converts stage times. Instance ids are the short ones."""
    times = (*StageTimes().spent(), "first_token", "total")
    return parsed(
        StageTimes,
        message,
        **{f"{name}_s": getattr(message, f"{name}_us") / 1e6 for name in times},
        workers=tuple(parsed(WorkerIdentity, worker) for worker in message.workers),
    )
