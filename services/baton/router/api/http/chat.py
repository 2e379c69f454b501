"""POST /v1/chat/completions: how a chat answer is worded."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.request.request import Accepted, Delta
from baton.router.api.http.answer import Envelope
from baton.router.api.http.logprobs import chat_logprobs
from baton.router.api.http.parse import Call
from baton.router.api.http.respond import Json
from baton.router.api.http.tools import message, said


class ChatAnswer(Envelope):
    def __init__(self, call: Call, accepted: Sequence[Accepted], created: int):
        super().__init__(call, accepted, "chatcmpl", created)

    def opening(self, prompt: int) -> list[Json]:
        role = {"role": "assistant", "content": ""}
        choices = [
            {"index": i, "delta": role, "logprobs": None, "finish_reason": None}
            for i in range(self._call.n)
        ]
        return [
            self.chunk([choice]) | (self._prompt_ids() if i == 0 else {})
            for i, choice in enumerate(choices)
        ]

    def chunks(self, prompt: int, delta: Delta) -> list[Json]:
        index, found = self.index(prompt, delta), []
        if not self.is_empty(delta):
            new = {"index": index, "delta": self._said(delta), "finish_reason": None}
            found.append(self.chunk([new | self._logprobs(delta) | self.token_ids(delta)]))
        if delta.finish_reason is not None:
            end = {"index": index, "delta": {}, "logprobs": None}
            found.append(self.chunk([end | self.ending(delta)]))
        return found

    def chunk(self, choices: list[Json]) -> Json:
        return self.envelope("chat.completion.chunk", choices)

    def document(self, whole: Sequence[Sequence[Delta]], usage: Json) -> Json:
        choices = [
            {
                "index": self.index(0, delta),
                "message": message(delta, reasoning=self._call.include_reasoning),
                **self._logprobs(delta),
                **self.ending(delta),
                **self.token_ids(delta),
            }
            for delta in whole[0]
        ]
        answer = self.envelope("chat.completion", choices)
        return answer | {"usage": usage} | self._prompt_ids() | self.prompt_logprobs(0)

    def timings(self, prompts: list[Json]) -> Json:
        return {"baton": prompts[0]} if prompts else {}

    def _said(self, delta: Delta) -> Json:
        if not (delta.reasoning or delta.tool_calls):
            return {"content": delta.text}
        return said(delta, reasoning=self._call.include_reasoning)

    def _logprobs(self, delta: Delta) -> Json:
        if not self._call.wants_logprobs:
            return {"logprobs": None}
        return {"logprobs": chat_logprobs(delta.logprobs, as_ids=self._call.tokens_as_ids)}

    def _prompt_ids(self) -> Json:
        if not self._call.wants_token_ids:
            return {}
        return {"prompt_token_ids": list(self._accepted[0].prompt_token_ids)}
