"""Builds the answers of one call, as documents and as chunks, for chats and text completions."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec

from batonlm.core.errors import BatonError
from batonlm.core.observe.stages import StageTimes
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.request.request import (
    Accepted,
    Delta,
    Event,
    Finished,
    FinishReason,
    TextLogprob,
    TokenLogprobs,
    ToolCallDelta,
)
from batonlm.router.api.http.parse import GenerationCall
from batonlm.router.api.http.responses import Header, Json

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.TOOL_CALLS: "tool_calls",
}

_LOWEST = -9999.0
"""The value that OpenAI and vLLM send for minus infinity, which JSON does not have."""


def call_arguments(call: ToolCallDelta) -> Json:
    """Returns the arguments of a whole call as an object, for APIs that do not have them as text.
    Those that the end of the answer cut are left out: they are no object."""
    try:
        arguments: Json = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return arguments


class AnswerWriter(ABC):
    """Builds JSON from the events of one call, and counts its usage.

    Prompts are numbered from 0 in the order of the call.
    """

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, call: GenerationCall, accepted: Sequence[Accepted], created: int):
        self._call = call
        self._accepted = accepted
        self._id = f"{self.id_prefix}-{call.stream_id(accepted[0])}"
        self._created = created
        self._finished: dict[int, Finished] = {}
        self._sampled = 0
        """Output tokens so far."""

    @abstractmethod
    def opening(self, prompt: int) -> list[Json]:
        """Returns the chunks that precede the prompt's first delta."""

    @abstractmethod
    def chunks(self, prompt: int, delta: Delta) -> list[Json]:
        """Returns the chunks of a delta; none when the client wants nothing of it."""

    @abstractmethod
    def document(self, whole: Sequence[Sequence[Delta]]) -> Json:
        """Returns the whole answer, from one Delta per choice: whole[prompt][choice]."""

    @property
    def has_plain_chunks(self) -> bool:
        """Whether a delta with only text has one chunk, which differs from those of other such
        deltas of its choice in its text only."""
        call = self._call
        return not (call.wants_token_ids or call.wants_logprobs or call.continuous_usage)

    def timings(self) -> Json:
        """Returns the timings of a call with one prompt, for a client that requests them; empty
        when the operator disables them."""
        entries = self._timings()
        return {"baton": entries[0]} if entries else {}

    def count(self, prompt: int, event: Event) -> None:
        """Counts an event in the usage."""
        if isinstance(event, Delta):
            self._sampled += len(event.token_ids)
        elif isinstance(event, Finished):
            self._finished[prompt] = event

    def chunk(self, choices: list[Json]) -> Json:
        """Returns one chunk without its usage."""
        return self._envelope(self.chunk_object, choices)

    def with_usage(self, chunks: list[Json]) -> list[Json]:
        """Adds the usage that the client wants to each chunk: null except in the last one, or the
        usage so far if the client wants it continuously."""
        if self._call.continuous_usage:
            return [chunk | {"usage": self._usage(self._sampled)} for chunk in chunks]
        if self._call.include_usage:
            return [chunk | {"usage": None} for chunk in chunks]
        return chunks

    def last_chunk(self, *, with_timings: bool) -> list[Json]:
        """Returns the chunk without choices that ends a stream, if the client wants one."""
        last: Json = {"usage": self._total_usage()} if self._call.include_usage else {}
        if with_timings:
            last |= self.timings()
        return [self.chunk([]) | last] if last else []

    def failure(self, error: BatonError) -> Json | None:
        """Returns the last event of a stream that fails after what was written; None: the document
        of the failure."""
        return None

    def timing_headers(self) -> list[Header]:
        """Returns a `Server-Timing` header, which browsers display, in milliseconds; only for a
        call with one prompt."""
        times = [finished.stages for finished in self._finished.values()]
        if len(times) != 1 or times[0] is None:
            return []
        spent = times[0].spent() | {"total": times[0].total_s}
        entries = [f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in spent.items()]
        return [(b"server-timing", ", ".join(entries).encode())]

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._accepted[0].model,
            "choices": choices,
        }

    def _usage(self, completion_tokens: int) -> Json:
        prompt_tokens = sum(each.prompt_tokens for each in self._accepted)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def _total_usage(self) -> Json:
        """Returns the usage of all prompts, which have finished."""
        ends = self._finished.values()
        cached, reasoning = (
            sum(end.cached_tokens for end in ends),
            sum(end.reasoning_tokens for end in ends),
        )
        usage = self._usage(sum(end.completion_tokens for end in ends)) | {
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }
        tried = sum(end.tried_tokens for end in ends)
        return usage | ({"tried_tokens": tried} if tried else {})

    def _timings(self) -> list[Json]:
        """Returns one entry per prompt, or none."""
        finished = [end.stages for _, end in sorted(self._finished.items())]
        return [_timings(times) for times in finished if times is not None]

    def _index(self, prompt: int, choice: int) -> int:
        return prompt * self._call.n + choice

    def _ending(self, delta: Delta) -> Json:
        """Returns finish_reason, which is null before the end, and vLLM's stop_reason, which is
        null when the model ends the answer."""
        reason = FINISH_REASONS[delta.finish_reason] if delta.finish_reason else None
        stop: str | int | None = delta.stop_string
        if stop is None and delta.stop_token_id in self._call.requests[0].stop_token_ids:
            stop = delta.stop_token_id
        return {"finish_reason": reason, "stop_reason": stop}

    def _prompt_logprobs(self, prompt: int) -> Json:
        """Returns vLLM's field `prompt_logprobs`, if the client wants it."""
        num_top = self._call.prompt_logprobs
        if num_top is None:
            return {}
        entries = enumerate(self._accepted[prompt].prompt_logprobs)
        ranked = [_ranked(entry, num_top) if position else None for position, entry in entries]
        return {"prompt_logprobs": ranked}

    def _prompt_ids(self, prompt: int) -> Json:
        if not self._call.wants_token_ids:
            return {}
        return {"prompt_token_ids": list(self._accepted[prompt].prompt_token_ids)}

    def _token_ids(self, delta: Delta) -> Json:
        return {"token_ids": list(delta.token_ids)} if self._call.wants_token_ids else {}

    def _is_empty(self, delta: Delta) -> bool:
        """Whether the delta has nothing new for this client except an end."""
        call = self._call
        seen: Any = delta.text or delta.tool_calls
        seen = seen or (call.include_reasoning and delta.reasoning)
        seen = seen or (call.wants_logprobs and delta.logprobs)
        return not (seen or (call.wants_token_ids and delta.token_ids))


class ChatAnswer(AnswerWriter):
    """The answer of POST /v1/chat/completions. A call has one prompt."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, prompt: int) -> list[Json]:
        role = {"role": "assistant", "content": ""}
        chunks = [
            self.chunk([{"index": i, "delta": role, "logprobs": None, "finish_reason": None}])
            for i in range(self._call.n)
        ]
        chunks[0] |= self._prompt_ids(0)
        return chunks

    def chunks(self, prompt: int, delta: Delta) -> list[Json]:
        found = []
        if not self._is_empty(delta):
            new = {"index": delta.choice, "delta": self._delta(delta), "finish_reason": None}
            found.append(self.chunk([new | self._logprobs(delta) | self._token_ids(delta)]))
        if delta.finish_reason is not None:
            end = {"index": delta.choice, "delta": {}, "logprobs": None}
            found.append(self.chunk([end | self._ending(delta)]))
        return found

    def document(self, whole: Sequence[Sequence[Delta]]) -> Json:
        choices = [
            {
                "index": delta.choice,
                "message": self._message(delta),
                **self._logprobs(delta),
                **self._ending(delta),
                **self._token_ids(delta),
            }
            for delta in whole[0]
        ]
        document = self._envelope(self.object, choices) | {"usage": self._total_usage()}
        return document | self._prompt_ids(0) | self._prompt_logprobs(0)

    def _delta(self, delta: Delta) -> Json:
        if not (delta.reasoning or delta.tool_calls):
            return {"content": delta.text}
        new = self._reasoning(delta)
        if delta.text:
            new["content"] = delta.text
        if delta.tool_calls:
            new["tool_calls"] = [
                {"index": call.index, **_tool_call(call)}
                if call.id
                else {"index": call.index, "function": {"arguments": call.arguments}}
                for call in delta.tool_calls
            ]
        return new

    def _message(self, delta: Delta) -> Json:
        """Returns a whole message. Its content is null when it has calls only."""
        content = None if delta.tool_calls and not delta.text else delta.text
        new: Json = {"role": "assistant", "content": content, "refusal": None}
        new |= self._reasoning(delta)
        if delta.tool_calls:
            new["tool_calls"] = [_tool_call(call) for call in delta.tool_calls]
        return new

    def _reasoning(self, delta: Delta) -> Json:
        """Returns the reasoning under both names that clients use."""
        if not (delta.reasoning and self._call.include_reasoning):
            return {}
        return {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}

    def _logprobs(self, delta: Delta) -> Json:
        if not self._call.wants_logprobs:
            return {"logprobs": None}
        content = [token_logprobs(self._call, entry) for entry in delta.logprobs]
        return {"logprobs": {"content": content, "refusal": None}}


def token_logprobs(call: GenerationCall, entry: TokenLogprobs) -> Json:
    def shown(token: TextLogprob) -> Json:
        as_ids = call.tokens_as_ids
        return {
            "token": _id_name(token) if as_ids else token.text.decode(errors="replace"),
            "logprob": max(token.logprob, _LOWEST),
            "bytes": list(token.text),
        }

    return shown(entry.token) | {"top_logprobs": [shown(top) for top in entry.top]}


class CompletionAnswer(AnswerWriter):
    """The answer of POST /v1/completions. A call may have several prompts."""

    id_prefix = "cmpl"
    object = chunk_object = "text_completion"

    def __init__(self, call: GenerationCall, accepted: Sequence[Accepted], created: int):
        super().__init__(call, accepted, created)
        token_name = _id_name if call.tokens_as_ids else _text_name
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(
            lambda: CompletionLogprobs(token_name)
        )
        self._begun: set[int] = set()
        """Indices of choices that have output."""

    def opening(self, prompt: int) -> list[Json]:
        if not self._call.requests[0].echo:
            return []
        none = {"finish_reason": None, "stop_reason": None}
        indices = [self._index(prompt, choice) for choice in range(self._call.n)]
        return [self.chunk([self._echo(prompt, index) | none]) for index in indices]

    def chunks(self, prompt: int, delta: Delta) -> list[Json]:
        if self._is_empty(delta) and delta.finish_reason is None:
            return []
        return [self.chunk([self._choice(prompt, delta)])]

    def document(self, whole: Sequence[Sequence[Delta]]) -> Json:
        choices = [
            self._whole(prompt, delta) for prompt, deltas in enumerate(whole) for delta in deltas
        ]
        return self._envelope(self.object, choices) | {"usage": self._total_usage()}

    def timings(self) -> Json:
        entries = self._timings()
        return {"baton": entries} if entries else {}

    def _whole(self, prompt: int, delta: Delta) -> Json:
        echo: Json = {}
        if self._call.requests[0].echo:
            echo = self._echo(prompt, self._index(prompt, delta.choice))
        choice = self._choice(prompt, delta) | self._prompt_logprobs(prompt)
        if echo:
            choice["text"] = echo["text"] + choice["text"]
        if echo and echo["logprobs"]:
            own = choice["logprobs"]
            choice["logprobs"] = {name: part + own[name] for name, part in echo["logprobs"].items()}
        return choice

    def _echo(self, prompt: int, index: int) -> Json:
        """Returns the prompt as the beginning of a choice."""
        accepted, num_top = self._accepted[prompt], self._call.requests[0].sampling.top_logprobs
        logprobs = None
        if num_top is not None:
            logprobs = self._logprobs[index].add_prompt(accepted.prompt_logprobs, num_top)
        return {"index": index, "text": accepted.prompt_text, "logprobs": logprobs}

    def _choice(self, prompt: int, delta: Delta) -> Json:
        index = self._index(prompt, delta.choice)
        logprobs = self._logprobs[index].add(delta.logprobs) if self._call.wants_logprobs else None
        new = {"index": index, "text": delta.text, "logprobs": logprobs}
        new |= self._ending(delta) | self._token_ids(delta)
        if index not in self._begun:
            self._begun.add(index)
            new |= self._prompt_ids(prompt)
        return new


class CompletionLogprobs:
    """The log-probabilities of one choice, and the text offset of its next token."""

    def __init__(self, token_name: Callable[[TextLogprob], str]) -> None:
        self._token_name = token_name
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def add(self, entries: Sequence[TokenLogprobs]) -> Json:
        """Appends entries. text_offset counts characters; a token inside a character has that
        character's offset."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(entry.token.text))
        return {
            "tokens": [self._token_name(entry.token) for entry in entries],
            "token_logprobs": [max(entry.token.logprob, _LOWEST) for entry in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def add_prompt(self, entries: Sequence[TokenLogprobs], num_top: int) -> Json:
        """Returns the entries of an echoed prompt, whose first token has null."""
        document = self.add([TokenLogprobs(entry.token, entry.top[:num_top]) for entry in entries])
        document["token_logprobs"][0] = document["top_logprobs"][0] = None
        return document

    def _alternatives(self, entry: TokenLogprobs) -> Json:
        """Returns the best tokens, best first, then the token itself if it is not among them, as
        OpenAI does."""
        found: Json = {}
        for token in (*entry.top, entry.token):
            found.setdefault(self._token_name(token), max(token.logprob, _LOWEST))
        return found


def _id_name(token: TextLogprob) -> str:
    return f"token_id:{token.token_id}"


def _text_name(token: TextLogprob) -> str:
    """Returns the token's text. Incomplete characters are written as bytes, so that different
    tokens have different names."""
    try:
        return token.text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.text)


def _ranked(entry: TokenLogprobs, num_top: int) -> Json:
    """Returns the best num_top tokens and the prompt's own, by token id. rank: 1 for the most
    likely token, null for one that is not among the best."""
    ranks = {top.token_id: rank for rank, top in enumerate(entry.top, 1)}
    return {
        str(token.token_id): {
            "logprob": max(token.logprob, _LOWEST),
            "rank": ranks.get(token.token_id),
            "decoded_token": token.text.decode(errors="replace"),
        }
        for token in (*entry.top[:num_top], entry.token)
    }


def _tool_call(call: ToolCallDelta) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _timings(times: StageTimes) -> Json:
    """Returns seconds, rounded to microseconds."""
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
        "workers": [serving_worker(worker) for worker in times.workers],
    }


def serving_worker(worker: WorkerIdentity) -> Json:
    """Describes a worker. address: "" for clients that are not operators."""
    return {"role": worker.role, "instance_id": worker.short, "address": worker.address}
