"""Counts tokens of one HTTP call over all its prompts and choices, in OpenAI's words."""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.request.request import Accepted, Delta, Finished
from baton.router.api.http.respond import Json


class Usage:
    def __init__(self, accepted: Iterable[Accepted]):
        self._prompt = sum(each.prompt_tokens for each in accepted)
        self._running = 0
        self._finished = 0
        self._cached = 0
        self._reasoning = 0

    def add(self, event: Delta | Finished) -> None:
        if isinstance(event, Delta):
            self._running += len(event.token_ids)
        else:
            self._finished += event.completion_tokens
            self._cached += event.cached_tokens
            self._reasoning += event.reasoning_tokens

    def so_far(self) -> Json:
        """While it runs: output counts what was sampled, cached tokens are not known yet."""
        return _words(self._prompt, self._running)

    def total(self) -> Json:
        """When all have finished."""
        return _words(self._prompt, self._finished) | {
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning},
        }


def _words(prompt: int, completion: int) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
