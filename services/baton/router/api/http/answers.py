"""How the answers of one call are written: as documents and as chunks, of chats and of texts."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from baton.core.observe.stages import StageTimes
from baton.core.request.model import WorkerIdentity
from baton.core.request.request import (
    Accepted,
    Delta,
    Finished,
    FinishReason,
    TextLogprob,
    TokenLogprobs,
    ToolCallDelta,
)
from baton.router.api.http.parse import Call
from baton.router.api.http.responses import Header, Json

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


def said(delta: Delta, *, reasoning: bool) -> Json:
    """What a chunk's delta says. reasoning: whether that is told, under both names it goes by."""
    new: Json = {}
    if delta.reasoning and reasoning:
        new["reasoning"] = new["reasoning_content"] = delta.reasoning
    if delta.text:
        new["content"] = delta.text
    if delta.tool_calls:
        new["tool_calls"] = [_more(call) for call in delta.tool_calls]
    return new


def message(delta: Delta, *, reasoning: bool) -> Json:
    """A whole answer. Its content is null when it is nothing but calls."""
    content = None if delta.tool_calls and not delta.text else delta.text
    new: Json = {"role": "assistant", "content": content, "refusal": None}
    if delta.reasoning and reasoning:
        new["reasoning"] = new["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        new["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in delta.tool_calls
        ]
    return new


def joined(parts: Sequence[Delta]) -> tuple[ToolCallDelta, ...]:
    """The calls of a choice, whole."""
    begun: dict[int, ToolCallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for call in (call for part in parts for call in part.tool_calls):
        begun.setdefault(call.index, call)
        arguments.setdefault(call.index, []).append(call.arguments)
    return tuple(
        ToolCallDelta(index, call.id, call.name, "".join(arguments[index]))
        for index, call in begun.items()
    )


def _more(call: ToolCallDelta) -> Json:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


# JSON has no minus infinity; this is what OpenAI and vLLM send for "never".
_LOWEST = -9999.0


def chat_logprobs(entries: Sequence[TokenLogprobs], *, as_ids: bool = False) -> Json:
    """as_ids: tokens are named by their ids."""
    content = [
        _chat_token(entry.token, as_ids)
        | {"top_logprobs": [_chat_token(top, as_ids) for top in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[TokenLogprobs], num_top: int) -> list[Json | None]:
    """One a token of the prompt, null for the first: by token id, the best num_top and its own.
    rank: 1 for the most likely one, null for one that is not among those looked at."""
    return [_ranked(entry, num_top) if i else None for i, entry in enumerate(entries)]


def _ranked(entry: TokenLogprobs, num_top: int) -> Json:
    ranks = {top.token_id: rank for rank, top in enumerate(entry.top, 1)}
    return {
        str(token.token_id): {
            "logprob": max(token.logprob, _LOWEST),
            "rank": ranks.get(token.token_id),
            "decoded_token": token.text.decode(errors="replace"),
        }
        for token in (*entry.top[:num_top], entry.token)
    }


def _named(token: TextLogprob) -> str:
    return f"token_id:{token.token_id}"


def _chat_token(token: TextLogprob, as_ids: bool) -> Json:
    return {
        "token": _named(token) if as_ids else token.text.decode(errors="replace"),
        "logprob": max(token.logprob, _LOWEST),
        "bytes": list(token.text),
    }


class CompletionLogprobs:
    """One choice's log-probabilities; remembers where in the text the next token begins."""

    def __init__(self, *, as_ids: bool = False) -> None:
        self._word = _named if as_ids else _completion_token
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def add(self, entries: Sequence[TokenLogprobs]) -> Json:
        """text_offset: in characters; a token inside a character has that character's offset."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(entry.token.text))
        return {
            "tokens": [self._word(entry.token) for entry in entries],
            "token_logprobs": [max(entry.token.logprob, _LOWEST) for entry in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def add_prompt(self, entries: Sequence[TokenLogprobs], num_top: int) -> Json:
        """What comes first when the prompt is echoed; the first token's numbers are null."""
        told = self.add([TokenLogprobs(entry.token, entry.top[:num_top]) for entry in entries])
        told["token_logprobs"][0] = told["top_logprobs"][0] = None
        return told

    def _alternatives(self, entry: TokenLogprobs) -> Json:
        """Best first, then the token itself if it is not among them, as OpenAI does."""
        found: Json = {}
        for token in (*entry.top, entry.token):
            found.setdefault(self._word(token), max(token.logprob, _LOWEST))
        return found


def _completion_token(token: TextLogprob) -> str:
    """Bytes that are no whole characters are spelt out, so that no two tokens look the same."""
    try:
        return token.text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.text)


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


ASK = b"x-baton-timings"


def timings_asked_for(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(ASK, b"").strip().lower() in (b"true", b"1")


def timings_described(finished: Sequence[Finished]) -> list[Json]:
    """One entry a prompt; none when the operator wants it not told."""
    return [_entry(each.stages) for each in finished if each.stages is not None]


def timings_headers(finished: Sequence[Finished]) -> list[Header]:
    """`Server-Timing`, which browsers show: milliseconds, of a call with one prompt only."""
    times = finished[0].stages if len(finished) == 1 else None
    if times is None:
        return []
    spent = times.spent() | {"total": times.total_s}
    entries = [f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in spent.items()]
    return [(b"server-timing", ", ".join(entries).encode())]


def _entry(times: StageTimes) -> Json:
    """Seconds, rounded to microseconds."""
    return {
        "stages": {f"{stage}_s": round(seconds, 6) for stage, seconds in times.spent().items()},
        "first_token_s": round(times.first_token_s, 6),
        "total_s": round(times.total_s, 6),
        "cached_tokens": {
            "prefill": times.prefill_cached_tokens,
            "decode": times.decode_cached_tokens,
        },
        "kv_bytes": times.kv_bytes,
        "attempts": times.attempts,
        "moves": times.moves,
        "workers": [worker_words(worker) for worker in times.workers],
    }


def worker_words(worker: WorkerIdentity) -> Json:
    """address: "" for clients that are no operators."""
    return {"role": worker.role, "instance_id": worker.short, "address": worker.address}
