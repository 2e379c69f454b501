"""The messages of one request, made from its events in order.

A stream has a chunk for whatever is new of a choice, which counts the new tokens only. Every choice
ends with a `complete`, which has all tokens and counts them all. Of log-probabilities it has those
that no chunk has told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from baton.core.request.request import Accepted, Delta, FinishReason, TextLogprob, TokenLogprobs
from baton.router.api.vllm.calls import Call

REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.TOOL_CALLS: "stop",
}


class Answer:
    """See the module. The first event is given to `accepted`."""

    def __init__(self, call: Call) -> None:
        self._stream = call.stream
        self._tops = bool(call.request.sampling.top_logprobs)
        self._prompt_tops = bool(call.request.prompt_logprobs)
        self._prompt_tokens = 0
        self._choices = [_Choice(index) for index in range(call.request.n)]

    def accepted(self, event: Accepted) -> None:
        self._prompt_tokens = event.prompt_tokens
        if event.prompt_logprobs:
            told = _of_prompt(event.prompt_logprobs, self._prompt_tops)
            for choice in self._choices:
                choice.prompt_logprobs = told

    def delta(self, delta: Delta, cached_tokens: int) -> Iterator[pb.GenerateResponse]:
        choice = self._choices[delta.choice]
        choice.token_ids.extend(delta.token_ids)
        logprobs = _of_output(delta.logprobs, self._tops)
        if not self._stream:
            choice.logprobs.MergeFrom(logprobs)
        elif delta.token_ids:
            chunk = pb.GenerateStreamChunk(
                token_ids=delta.token_ids,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(delta.token_ids),
                cached_tokens=cached_tokens,
                output_logprobs=logprobs if delta.logprobs else None,
                input_logprobs=choice.take_prompt_logprobs(),
                index=choice.index,
            )
            yield pb.GenerateResponse(chunk=chunk)
        if delta.finish_reason is not None:
            yield self._complete(choice, REASONS[delta.finish_reason], cached_tokens, delta)

    def aborted(self, cached_tokens: int = 0) -> Iterator[pb.GenerateResponse]:
        """Of the choices that have not ended."""
        for choice in self._choices:
            if not choice.ended:
                yield self._complete(choice, "abort", cached_tokens)

    def _complete(
        self, choice: _Choice, reason: str, cached_tokens: int, last: Delta | None = None
    ) -> pb.GenerateResponse:
        choice.ended = True
        complete = pb.GenerateComplete(
            output_ids=choice.token_ids,
            finish_reason=reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(choice.token_ids),
            cached_tokens=cached_tokens,
            output_logprobs=choice.logprobs if choice.logprobs.token_ids else None,
            input_logprobs=choice.take_prompt_logprobs(),
            index=choice.index,
        )
        if last is not None and last.stop_string is not None:
            complete.matched_stop_str = last.stop_string
        elif last is not None and last.stop_token_id is not None:
            complete.matched_token_id = last.stop_token_id
        return pb.GenerateResponse(complete=complete)


class _Choice:
    """What was not told yet, or is told again at the end."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.ended = False
        self.token_ids: list[int] = []
        self.logprobs = pb.OutputLogProbs()
        self.prompt_logprobs: pb.InputLogProbs | None = None

    def take_prompt_logprobs(self) -> pb.InputLogProbs | None:
        """Once: they go with a choice's first message."""
        told, self.prompt_logprobs = self.prompt_logprobs, None
        return told


def _of_output(entries: Sequence[TokenLogprobs], tops: bool) -> pb.OutputLogProbs:
    return pb.OutputLogProbs(
        token_logprobs=[entry.token.logprob for entry in entries],
        token_ids=[entry.token.token_id for entry in entries],
        top_logprobs=[_top(entry.top) for entry in entries] if tops else (),
    )


def _of_prompt(entries: Sequence[TokenLogprobs], tops: bool) -> pb.InputLogProbs:
    """The first token has none: nothing comes before it."""
    numbers = [pb.InputTokenLogProb(value=entry.token.logprob) for entry in entries[1:]]
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *numbers],
        token_ids=[entry.token.token_id for entry in entries],
        top_logprobs=[_top(entry.top) for entry in entries] if tops else (),
    )


def _top(entries: Sequence[TextLogprob]) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        values=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
    )
