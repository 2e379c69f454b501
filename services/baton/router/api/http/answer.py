"""How an API words one call: the part that chat and text completions share.

Knows core's events and JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from baton.core.request.request import Accepted, Delta, FinishReason
from baton.router.api.http.logprobs import prompt_logprobs
from baton.router.api.http.parse import Call
from baton.router.api.http.respond import Json

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.TOOL_CALLS: "tool_calls",
}


class Answer(Protocol):
    """Words events of one call. Prompts count from 0 in the order of the call."""

    @property
    def id(self) -> str: ...

    def opening(self, prompt: int) -> list[Json]:
        """Chunks that go before the prompt's first delta."""

    def chunks(self, prompt: int, delta: Delta) -> list[Json]:
        """Chunks that say what is new; none when nothing is that the client asked for."""

    def chunk(self, choices: list[Json]) -> Json:
        """The envelope of one chunk; without choices it carries the usage."""

    def document(self, whole: Sequence[Sequence[Delta]], usage: Json) -> Json:
        """The answer at once, from one Delta a choice: whole[prompt][choice]."""

    def timings(self, prompts: list[Json]) -> Json:
        """What goes beside the usage when timings are asked for: one entry a prompt, or none."""


class Envelope:
    """The fields around the choices, and what a choice says of its end."""

    def __init__(self, call: Call, accepted: Sequence[Accepted], prefix: str, created: int):
        self.id = f"{prefix}-{accepted[0].request_id}"
        self._call = call
        self._accepted = accepted
        self._created = created

    def envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._accepted[0].model,
            "choices": choices,
        }

    def index(self, prompt: int, delta: Delta) -> int:
        return prompt * self._call.n + delta.choice

    def ending(self, delta: Delta) -> Json:
        """finish_reason is null before the end; stop_reason is vLLM's, null for the model's end."""
        reason = FINISH_REASONS[delta.finish_reason] if delta.finish_reason else None
        return {"finish_reason": reason, "stop_reason": self._stop_reason(delta)}

    def prompt_logprobs(self, prompt: int) -> Json:
        """vLLM's field of that name, when asked for."""
        num_top = self._call.prompt_logprobs
        if num_top is None:
            return {}
        entries = self._accepted[prompt].prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(entries, num_top)}

    def token_ids(self, delta: Delta) -> Json:
        return {"token_ids": list(delta.token_ids)} if self._call.wants_token_ids else {}

    def is_empty(self, delta: Delta) -> bool:
        """Whether nothing is new that this client sees; an end counts apart."""
        told: Any = delta.text or delta.tool_calls
        told = told or (delta.reasoning and self._call.include_reasoning)
        news: Any = told or (self._call.wants_logprobs and delta.logprobs)
        return not (news or (self._call.wants_token_ids and delta.token_ids))

    def _stop_reason(self, delta: Delta) -> str | int | None:
        if delta.stop_string is not None:
            return delta.stop_string
        named = delta.stop_token_id in self._call.requests[0].stop_token_ids
        return delta.stop_token_id if named else None
