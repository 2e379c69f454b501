"""POST /v1/completions: how a text completion is worded. One call may have several prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from baton.core.request.request import Accepted, Delta
from baton.router.api.http.answer import Envelope
from baton.router.api.http.logprobs import CompletionLogprobs
from baton.router.api.http.parse import Call
from baton.router.api.http.respond import Json


class CompletionAnswer(Envelope):
    def __init__(self, call: Call, accepted: Sequence[Accepted], created: int):
        super().__init__(call, accepted, "cmpl", created)
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(
            lambda: CompletionLogprobs(as_ids=call.tokens_as_ids)
        )
        self._begun: set[int] = set()

    def opening(self, prompt: int) -> list[Json]:
        if not self._call.requests[0].echo:
            return []
        none = {"finish_reason": None, "stop_reason": None}
        return [
            self.chunk([self._echo(prompt, prompt * self._call.n + i) | none])
            for i in range(self._call.n)
        ]

    def chunks(self, prompt: int, delta: Delta) -> list[Json]:
        if self.is_empty(delta) and delta.finish_reason is None:
            return []
        return [self.chunk([self._choice(prompt, delta)])]

    def chunk(self, choices: list[Json]) -> Json:
        return self.envelope("text_completion", choices)

    def document(self, whole: Sequence[Sequence[Delta]], usage: Json) -> Json:
        choices = [
            self._whole(prompt, delta) for prompt, deltas in enumerate(whole) for delta in deltas
        ]
        return self.envelope("text_completion", choices) | {"usage": usage}

    def _whole(self, prompt: int, delta: Delta) -> Json:
        echoed: Json = {}
        if self._call.requests[0].echo:
            echoed = self._echo(prompt, self.index(prompt, delta))
        choice = self._choice(prompt, delta) | self.prompt_logprobs(prompt)
        if echoed:
            choice["text"] = echoed["text"] + choice["text"]
        if echoed and echoed["logprobs"]:
            own = choice["logprobs"]
            choice["logprobs"] = {
                name: told + own[name] for name, told in echoed["logprobs"].items()
            }
        return choice

    def _echo(self, prompt: int, index: int) -> Json:
        """The prompt at the head of a choice."""
        accepted, num_top = self._accepted[prompt], self._call.requests[0].sampling.top_logprobs
        told = None
        if num_top is not None:
            told = self._logprobs[index].add_prompt(accepted.prompt_logprobs, num_top)
        return {"index": index, "text": accepted.prompt_text, "logprobs": told}

    def timings(self, prompts: list[Json]) -> Json:
        return {"baton": prompts} if prompts else {}

    def _choice(self, prompt: int, delta: Delta) -> Json:
        index = self.index(prompt, delta)
        logprobs = self._logprobs[index].add(delta.logprobs) if self._call.wants_logprobs else None
        words = {"index": index, "text": delta.text, "logprobs": logprobs}
        return words | self.ending(delta) | self.token_ids(delta) | self._prompt_ids(prompt, index)

    def _prompt_ids(self, prompt: int, index: int) -> Json:
        """Only with the first that is said of a choice."""
        if index in self._begun or not self._call.wants_token_ids:
            return {}
        self._begun.add(index)
        return {"prompt_token_ids": list(self._accepted[prompt].prompt_token_ids)}
