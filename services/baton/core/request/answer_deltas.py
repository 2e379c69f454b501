"""Deltas of one choice of a chat, their text split into parts."""

from __future__ import annotations

from dataclasses import replace

from baton.core.request.answer_parts import AnswerParts
from baton.core.request.request import Delta, FinishReason


class AnswerDeltas:
    """calls_finish: whether an answer that ends in calls says so by its finish reason.

    reasoning_end: the token that ends reasoning, if one does.
    """

    def __init__(
        self,
        parts: AnswerParts,
        *,
        calls_finish: bool,
        reasoning_end: int | None,
    ) -> None:
        self._parts = parts
        self._calls_finish = calls_finish
        self._reasoning_end = reasoning_end
        self._num_tokens = 0
        self._ended_at: int | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Told so far, markers included. Without a token that ends reasoning: up to the delta whose
        text did."""
        if not self._parts.reasoned:
            return 0
        return self._num_tokens if self._ended_at is None else self._ended_at

    def of(self, delta: Delta) -> Delta:
        """The same delta; what may be part of a marker comes with a later one."""
        parts = self._parts.feed(delta.text, last=delta.finish_reason is not None)
        self._count(delta)
        return replace(
            delta,
            text=parts.content,
            reasoning=parts.reasoning,
            tool_calls=parts.tool_calls,
            finish_reason=self._reason(delta),
        )

    def _count(self, delta: Delta) -> None:
        if self._ended_at is None:
            if self._reasoning_end is None:
                if self._parts.reasoning_ended:
                    self._ended_at = self._num_tokens + len(delta.token_ids)
            elif self._reasoning_end in delta.token_ids:
                end = list(delta.token_ids).index(self._reasoning_end) + 1
                self._ended_at = self._num_tokens + end
        self._num_tokens += len(delta.token_ids)

    def _reason(self, delta: Delta) -> FinishReason | None:
        """An answer that was cut, by a stop string or within a call, does not end in calls."""
        whole = delta.finish_reason is FinishReason.STOP and delta.stop_string is None
        called = self._parts.num_calls and not self._parts.in_call
        if whole and called and self._calls_finish:
            return FinishReason.TOOL_CALLS
        return delta.finish_reason
