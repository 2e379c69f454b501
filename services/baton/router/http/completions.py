"""POST /v1/completions: how a text completion is worded. One call may have several prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from baton.core.request import Accepted, Delta
from baton.router.http.answer import Envelope
from baton.router.http.logprobs import CompletionLogprobs
from baton.router.http.parse import Call
from baton.router.http.respond import Json


class CompletionAnswer(Envelope):
    def __init__(self, call: Call, accepted: Sequence[Accepted], created: int):
        super().__init__(call, accepted, "cmpl", created)
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(CompletionLogprobs)
        self._begun: set[int] = set()

    def opening(self, prompt: int) -> list[Json]:
        return []

    def chunks(self, prompt: int, delta: Delta) -> list[Json]:
        if self.is_empty(delta) and delta.finish_reason is None:
            return []
        return [self.chunk([self._choice(prompt, delta)])]

    def chunk(self, choices: list[Json]) -> Json:
        return self.envelope("text_completion", choices)

    def document(self, whole: Sequence[Sequence[Delta]], usage: Json) -> Json:
        choices = [
            self._choice(prompt, delta) for prompt, deltas in enumerate(whole) for delta in deltas
        ]
        return self.envelope("text_completion", choices) | {"usage": usage}

    def _choice(self, prompt: int, delta: Delta) -> Json:
        index = self.index(prompt, delta)
        logprobs = self._logprobs[index].add(delta.logprobs) if self.wants_logprobs() else None
        words = {"index": index, "text": delta.text, "logprobs": logprobs}
        return words | self.ending(delta) | self.token_ids(delta) | self._prompt_ids(prompt, index)

    def _prompt_ids(self, prompt: int, index: int) -> Json:
        """Only with the first that is said of a choice."""
        if index in self._begun or not self._call.wants_token_ids:
            return {}
        self._begun.add(index)
        return {"prompt_token_ids": list(self._accepted[prompt].prompt_token_ids)}
