"""The OpenAPI document of the HTTP API, made from the types that bodies are read into and from the
validator's own ranges, so that it says what is so.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import msgspec

from baton.core.request.validation import REQUEST_RANGES, SAMPLING_RANGES, Range
from baton.router.api.http import answer_schema as answers
from baton.router.api.http.answer_schema import Explained, ReplayFile
from baton.router.api.http.responses import Json
from baton.router.api.http.schema import (
    REFUSED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

_ERRORS = {
    400: "A parameter has a value that it cannot have; `param` names it.",
    401: "The key is missing or wrong.",
    403: "The key is not an operator's.",
    404: "There is no such model, or no such request of the caller's.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    421: "The router asks for no keys, and does not answer under this Host.",
    422: "Workers died of this request; it must not be sent again.",
    429: "Too much is asked for at once; `retry-after` says when to come back.",
    500: "A fault of Baton's own.",
    501: "Not offered by this server.",
    503: "No worker is ready, or it was lost; `retry-after` says when to come back.",
    504: "The request ran out of time.",
}
_READ_ERRORS = (400, 401, 404, 408, 413, 415, 421, 429, 500, 503)

_POSTS: dict[str, tuple[str, str, type, type, type | None]] = {
    "/v1/chat/completions": (
        "createChatCompletion",
        "Answer a conversation",
        ChatBody,
        answers.ChatCompletion,
        answers.ChatCompletionChunk,
    ),
    "/v1/completions": (
        "createCompletion",
        "Continue texts or token ids",
        CompletionBody,
        answers.TextCompletion,
        answers.TextCompletion,
    ),
    "/tokenize": (
        "tokenize",
        "A prompt or a conversation as tokens",
        TokenizeBody,
        answers.Tokenized,
        None,
    ),
    "/detokenize": (
        "detokenize",
        "Tokens as text",
        DetokenizeBody,
        answers.Detokenized,
        None,
    ),
}
_DESCRIPTION = """OpenAI's API for text, with vLLM's extra parameters.

A parameter with a value of `null` counts as absent. Parameters that are not listed here are
accepted; those without effect are named in the response header `x-baton-ignored-params`. These
would change the answer and are not offered, so they are refused: {refused}; in a chat also
{refused_in_chats}.

Paths that begin with `/v1` are served without it, too, and `/tokenize` and `/detokenize` also with
it. A streamed answer is a series of server-sent events; each but the last, `[DONE]`, is a chunk or
an error document. A stream that ends without `[DONE]` has failed.
"""
_HEADERS = {
    "x-request-id": "The client's own `request_id`, or the one that this server gave.",
    "x-baton-seed": "The seed in use; sent as `seed`, it gives the same answer again.",
    "x-baton-ignored-params": "Parameters that had no effect.",
}


def openapi_document() -> Json:
    """The whole document, version 3.1."""
    bodies = [entry[2] for entry in _POSTS.values()]
    told = [kind for entry in _POSTS.values() for kind in entry[3:] if kind is not None]
    others = [
        answers.ModelList,
        answers.ModelAnswer,
        answers.Version,
        answers.ErrorAnswer,
        Explained,
        ReplayFile,
    ]
    kinds = list(dict.fromkeys([*bodies, *told, *others]))
    _, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    completion_fields = set(CompletionBody.__struct_encode_fields__)
    for body in (ChatBody, CompletionBody):
        _bound(components[body.__name__]["properties"], body)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": version("baton"),
            "description": _DESCRIPTION.format(
                refused=_listed(REFUSED.keys() - completion_fields),
                refused_in_chats=_listed(REFUSED.keys() & completion_fields),
            ),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"key": []}, {}],
        "paths": {**{path: {"post": _post(*entry)} for path, entry in _POSTS.items()}, **_gets()},
        "components": {
            "schemas": components,
            "responses": {str(status): _error(text) for status, text in _ERRORS.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _post(name: str, summary: str, body: type, answer: type, chunk: type | None) -> Json:
    content: Json = {"application/json": {"schema": _ref(answer)}}
    headers: Json = {}
    if chunk is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": f"Events, each a {chunk.__name__}."}
        }
        headers = {
            each: {"schema": {"type": "string"}, "description": text}
            for each, text in _HEADERS.items()
        }
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
        "responses": {
            "200": {"description": "The answer.", "content": content, "headers": headers},
            **_responses(_ERRORS.keys() - {403}),
        },
    }


def _gets() -> Json:
    model = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
        "description": "Its name, which may have slashes.",
    }
    request_id = {
        "name": "id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
        "description": "Of an answer, or of its header `x-baton-request-id` or `x-request-id`.",
    }
    replay = {
        "name": "replay",
        "in": "query",
        "required": False,
        "schema": {"type": "string", "enum": ["ids", "text"]},
        "description": "What makes its tokens again, where that is kept: ids alone, or with the "
        "grammar that the request named.",
    }
    text = {"text/plain": {"schema": {"type": "string"}}}
    ready = {"200": {"description": "A request sent now can be answered."}}
    ready["503"] = {"description": "It cannot."}
    return {
        "/v1/models": _get("listModels", "The models served", _json(answers.ModelList)),
        "/v1/models/{model}": _get("showModel", "One model", _json(answers.ModelAnswer))
        | {"parameters": [model]},
        "/requests/{id}": _get(
            "explainRequest",
            "What this router remembers of one request, running or over: the caller's own, to an "
            "operator anybody's",
            {"application/json": {"schema": {"oneOf": [_ref(Explained), _ref(ReplayFile)]}}},
        )
        | {"parameters": [request_id, replay]},
        "/version": _get("showVersion", "Baton's version", _json(answers.Version)),
        "/metrics": _get(
            "showMetrics",
            "Metrics in Prometheus' format, to operators",
            text,
            errors=(403, *_READ_ERRORS),
        ),
        "/health": {"get": _ready("showHealth", ready)},
        "/ping": {"get": _ready("ping", ready)},
    }


def _ready(name: str, responses: Json) -> Json:
    summary = "Whether requests can be answered"
    return {"operationId": name, "summary": summary, "security": [], "responses": responses}


def _get(name: str, summary: str, content: Json, *, errors: Iterable[int] = _READ_ERRORS) -> Json:
    answer = {"description": "The answer.", "content": content}
    responses = {"200": answer, **_responses(errors)}
    return {"get": {"operationId": name, "summary": summary, "responses": responses}}


def _responses(statuses: Iterable[int]) -> Json:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}


def _error(text: str) -> Json:
    return {"description": text, "content": _json(answers.ErrorAnswer)}


def _json(kind: type) -> Json:
    return {"application/json": {"schema": _ref(kind)}}


def _ref(kind: type) -> Json:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _bound(properties: dict[str, Any], body: type) -> None:
    """Adds the validator's ranges to numbers that mean the same there and here."""
    ranges = {**REQUEST_RANGES, **SAMPLING_RANGES}
    if body is CompletionBody:
        ranges["logprobs"] = ranges["top_logprobs"]
    else:
        ranges["max_completion_tokens"] = ranges["max_tokens"]
    # -1 means 0 here, a negative seed keeps its bits.
    ranges["top_k"] = Range(-1, ranges["top_k"].high)
    del ranges["seed"]
    for name, bounds in ranges.items():
        for kind in properties.get(name, {}).get("anyOf", ()):
            if kind.get("type") in ("integer", "number"):
                kind["exclusiveMinimum" if bounds.above else "minimum"] = bounds.low
                kind["maximum"] = bounds.high
