"""Builds the OpenAPI document of the HTTP API from the types of bodies and answers and from the
ranges of the validator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from batonlm.core.request.validation import REQUEST_RANGES, SAMPLING_RANGES, Range
from batonlm.router.api.http import answer_schema as answers
from batonlm.router.api.http.anthropic import CountTokensBody, MessagesBody
from batonlm.router.api.http.ollama import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from batonlm.router.api.http.openai_responses import ResponsesBody
from batonlm.router.api.http.parse import LAST_EVENT_ID_HEADER, RESUME_HEADER
from batonlm.router.api.http.responses import Json
from batonlm.router.api.http.schema import (
    REFUSED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbedBody,
    GenerationBody,
    LoadAdapterBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from batonlm.router.api.translation import IDEMPOTENCY_KEY

_ERRORS = {
    400: "A parameter has a value that it cannot have; `param` names it.",
    401: "The key is missing or wrong.",
    403: "The key is not an operator's.",
    404: "There is no such model, or no such request or response of the caller's.",
    408: "The request did not arrive in time.",
    409: "The request with this Idempotency-Key runs, and its answer cannot be told twice.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    421: "The router asks for no keys, and does not answer under this Host.",
    422: "Workers died of this request, which must not be sent again, or its Idempotency-Key was "
    "sent with another one.",
    429: "Too much is asked for at once; `retry-after` says when to come back.",
    500: "A fault of Baton's own.",
    501: "Not offered by this server.",
    503: "No worker is ready, or it was lost; `retry-after` says when to come back.",
    504: "The request ran out of time.",
}
_GET_ERRORS = (400, 401, 404, 408, 413, 415, 421, 429, 500, 503)

_DESCRIPTION = """OpenAI's API with vLLM's parameters, Anthropic's Messages, and Ollama's API.

A parameter with a value of `null` counts as absent. Parameters that are not listed here are
accepted; those without effect are named in the response header `x-baton-ignored-params`. These
would change the answer and are not offered, so they are refused: {refused}; in a chat also
{refused_in_chats}.

Paths that begin with `/v1` are served without it, too, and `/tokenize`, `/detokenize` and `/score`
also with it. A streamed answer is a series of server-sent events; each but the last, `[DONE]`, is a
chunk or an error document. A stream that ends without `[DONE]` has failed. Events of messages have
names and end with `message_stop`, those of responses with `response.completed`, `.incomplete` or
`.failed`.
"""
_STREAM_HEADERS = {
    "x-request-id": "The client's own `request_id`, or the one that this server gave.",
    "x-baton-seed": "The seed in use; sent as `seed`, it gives the same answer again.",
    "x-baton-ignored-params": "Parameters that had no effect.",
}
_RESUMING = {
    RESUME_HEADER: "`true`: the events of a stream have ids.",
    LAST_EVENT_ID_HEADER: "The stream goes on after the event with this id.",
    IDEMPOTENCY_KEY: "While a request with this key runs, the same one is answered by its run.",
}
_STRING: Json = {"type": "string"}
_MESSAGES = "messages-"
_OLLAMA = "ollama-"
"""They begin the names of other APIs' responses."""


def openapi_document() -> Json:
    """Returns the whole document, version 3.1."""
    # Stream chunks have a name in the document, but no reference.
    kinds: list[type] = [answers.ChatCompletionChunk, *answers.MESSAGE_EVENTS]

    def reference(kind: type) -> Json:
        kinds.append(kind)
        return {"$ref": f"#/components/schemas/{kind.__name__}"}

    # Until here, types stand for references to them.
    paths = msgspec.to_builtins(_paths(), enc_hook=reference)
    errors = {
        f"{prefix}{status}": {"description": text, "content": _json(kind)}
        for prefix, kind in (
            ("", answers.ErrorAnswer),
            (_MESSAGES, answers.MessagesError),
            (_OLLAMA, answers.OllamaError),
        )
        for status, text in _ERRORS.items()
    }
    responses = msgspec.to_builtins(errors, enc_hook=reference)
    _, schemas = msgspec.json.schema_components(
        dict.fromkeys(kinds), ref_template="#/components/schemas/{name}"
    )
    for body in (ChatBody, CompletionBody, MessagesBody, ResponsesBody):
        _add_ranges(schemas[body.__name__]["properties"], body)
    completion_fields = set(CompletionBody.__struct_encode_fields__)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": version("batonlm"),
            "description": _DESCRIPTION.format(
                refused=_listed(REFUSED.keys() - completion_fields),
                refused_in_chats=_listed(REFUSED.keys() & completion_fields),
            ),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"key": []}, {"x-api-key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": responses,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _paths() -> Json:
    model = _parameter("model", "path", "Its name, which may have slashes.")
    request_id = _parameter(
        "id", "path", "Of an answer, or of its header `x-baton-request-id` or `x-request-id`."
    )
    stream_id = _parameter("id", "path", "Of its chunks: the part of an event's id before the dot.")
    response_id = _parameter("id", "path", "Of a response.")
    replay = _parameter(
        "replay",
        "query",
        "What makes its tokens again, where that is kept: ids alone, or with the grammar that the "
        "request named.",
        enum=["ids", "text"],
    )
    text = {"text/plain": {"schema": _STRING}}
    return {
        "/v1/chat/completions": _post(
            "createChatCompletion",
            "Answer a conversation",
            ChatBody,
            answers.ChatCompletion,
            (answers.ChatCompletionChunk,),
        ),
        "/v1/completions": _post(
            "createCompletion",
            "Continue texts or token ids",
            CompletionBody,
            answers.TextCompletion,
            (answers.TextCompletion,),
        ),
        "/v1/responses": _post(
            "createResponse",
            "Answer a conversation, and store the answer, in the form of OpenAI's Responses",
            ResponsesBody,
            answers.ResponseDocument,
            (answers.ResponseEvent,),
            resumable=False,
        ),
        "/v1/responses/{id}": {
            **_get(
                "showResponse",
                "One stored response of the caller's",
                {
                    **_json(answers.ResponseDocument),
                    "text/event-stream": {"schema": _STRING},
                },
                response_id,
                _parameter(
                    "stream",
                    "query",
                    "Its events, where they are still kept.",
                    enum=["true", "false"],
                ),
                _parameter(
                    "starting_after",
                    "query",
                    "The stream goes on after the event with this number.",
                    type="integer",
                ),
            ),
            "delete": {
                "operationId": "deleteResponse",
                "summary": "Forget a response",
                "parameters": [response_id],
                "responses": {
                    "200": {
                        "description": "It is gone.",
                        "content": _json(answers.ResponseDeleted),
                    },
                    **_errors(_GET_ERRORS),
                },
            },
        },
        "/v1/responses/{id}/cancel": {
            "post": {
                "operationId": "cancelResponse",
                "summary": "End a response that runs in the background",
                "parameters": [response_id],
                "responses": {
                    "200": {
                        "description": "The response, which is over.",
                        "content": _json(answers.ResponseDocument),
                    },
                    **_errors(_GET_ERRORS),
                },
            }
        },
        "/v1/responses/input_tokens": _post(
            "countResponseTokens",
            "How many tokens a response would begin with",
            ResponsesBody,
            answers.ResponseTokens,
        ),
        "/v1/responses/{id}/input_items": _get(
            "listInputItems",
            "The input of a stored response",
            _json(answers.ResponseInputItems),
            response_id,
            _parameter("after", "query", "The list goes on after the item with this id."),
            _parameter("limit", "query", "So many at most.", type="integer"),
            _parameter("order", "query", "The newest first, or last.", enum=["asc", "desc"]),
        ),
        "/v1/messages": _post(
            "createMessage",
            "Answer a conversation, in Anthropic's form",
            MessagesBody,
            answers.MessagesMessage,
            answers.MESSAGE_EVENTS,
            _MESSAGES,
        ),
        "/v1/messages/count_tokens": _post(
            "countTokens",
            "How many tokens a conversation has",
            CountTokensBody,
            answers.CountedTokens,
            prefix=_MESSAGES,
        ),
        "/api/chat": _post(
            "ollamaChat",
            "Answer a conversation, in Ollama's form",
            OllamaChatBody,
            answers.OllamaChatLine,
            (answers.OllamaChatLine,),
            _OLLAMA,
        ),
        "/api/generate": _post(
            "ollamaGenerate",
            "Answer or continue a text, in Ollama's form",
            OllamaGenerateBody,
            answers.OllamaGenerateLine,
            (answers.OllamaGenerateLine,),
            _OLLAMA,
        ),
        "/api/embed": _post(
            "ollamaEmbed",
            "The vectors of texts, in Ollama's form",
            OllamaEmbedBody,
            answers.OllamaEmbeddings,
            prefix=_OLLAMA,
        ),
        "/api/embeddings": _post(
            "ollamaEmbedding",
            "The vector of one text, in Ollama's older form",
            OllamaEmbeddingsBody,
            answers.OllamaEmbedding,
            prefix=_OLLAMA,
        ),
        "/api/show": _post(
            "ollamaShow",
            "One model, in Ollama's form",
            OllamaShowBody,
            answers.OllamaShown,
            prefix=_OLLAMA,
        ),
        "/api/tags": _get(
            "ollamaList",
            "The models served, in Ollama's form",
            _json(answers.OllamaModels),
            prefix=_OLLAMA,
        ),
        "/api/ps": _get(
            "ollamaRunning",
            "The models that have workers, in Ollama's form",
            _json(answers.OllamaModels),
            prefix=_OLLAMA,
        ),
        "/api/version": _get(
            "ollamaVersion", "Baton's version", _json(answers.Version), prefix=_OLLAMA
        ),
        "/tokenize": _post(
            "tokenize", "A prompt or a conversation as tokens", TokenizeBody, answers.Tokenized
        ),
        "/detokenize": _post("detokenize", "Tokens as text", DetokenizeBody, answers.Detokenized),
        "/v1/embeddings": _post(
            "createEmbedding", "The vectors of texts", EmbedBody, answers.Embeddings
        ),
        "/v1/rerank": _post(
            "rerank", "Documents by how well each answers a query", RerankBody, answers.Ranking
        ),
        "/score": _post("score", "How well texts answer queries", ScoreBody, answers.Scores),
        "/v1/load_lora_adapter": _operators(
            "loadAdapter", "Load a LoRA adapter on all workers", LoadAdapterBody
        ),
        "/v1/unload_lora_adapter": _operators(
            "unloadAdapter", "Unload a LoRA adapter; what runs with it goes on", UnloadAdapterBody
        ),
        "/v1/models": _get(
            "listModels",
            "The models served, in Anthropic's form for clients that send `anthropic-version`",
            _json({"oneOf": [answers.ModelList, answers.ModelsOfMessages]}),
        ),
        "/v1/models/{model}": _get(
            "showModel",
            "One model, in the same forms",
            _json({"oneOf": [answers.ModelAnswer, answers.ModelOfMessages]}),
            model,
        ),
        "/requests/{id}": _get(
            "explainRequest",
            "What this router remembers of one request, running or over: the caller's own, to an "
            "operator anybody's",
            _json({"oneOf": [answers.Explained, answers.ReplayFile]}),
            request_id,
            replay,
        ),
        "/v1/streams/{id}": _get(
            "readStream",
            "A stream of the caller's, with ids of events, that this router runs or has just run",
            {"text/event-stream": {"schema": _STRING}},
            stream_id,
            _parameter(LAST_EVENT_ID_HEADER, "header", _RESUMING[LAST_EVENT_ID_HEADER]),
        )
        | {
            "delete": {
                "operationId": "leaveStream",
                "summary": "End a stream of the caller's with its last reader, at once",
                "parameters": [stream_id],
                "responses": {
                    "204": {"description": "So it does, if this router has it."},
                    **_errors(_GET_ERRORS),
                },
            }
        },
        "/version": _get("showVersion", "Baton's version", _json(answers.Version)),
        "/metrics": _get(
            "showMetrics",
            "Metrics in Prometheus' format, to operators",
            text,
            errors=(403, *_GET_ERRORS),
        ),
        "/health": _ready("showHealth"),
        "/ping": _ready("ping"),
    }


def _post(
    name: str,
    summary: str,
    body: type,
    answer: type,
    chunks: Sequence[type] = (),
    prefix: str = "",
    *,
    resumable: bool = True,
) -> dict[str, Any]:
    """chunks: the events of a stream. prefix: begins the names of its errors. resumable: whether
    events may have ids, where the prefix is empty."""
    content, headers, parameters = _json(answer), {}, []
    if chunks:
        if not prefix:
            parameters = [
                _parameter(name, "header", text)
                for name, text in _RESUMING.items()
                if resumable or name == IDEMPOTENCY_KEY
            ]
        kinds = " or ".join(chunk.__name__ for chunk in chunks)
        events = {**_STRING, "description": f"Events, each a {kinds}."}
        stream = "application/x-ndjson" if prefix == _OLLAMA else "text/event-stream"
        content[stream] = {"schema": events}
        headers = {
            each: {"schema": _STRING, "description": text} for each, text in _STREAM_HEADERS.items()
        }
    ok = {"description": "The answer.", "content": content, "headers": headers}
    operation = {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": _json(body)},
        "responses": {"200": ok, **_errors(_ERRORS.keys() - {403}, prefix)},
    }
    return {"post": operation | ({"parameters": parameters} if parameters else {})}


def _operators(name: str, summary: str, body: type) -> Json:
    """A POST that only operators may send, answered in words."""
    content = {"text/plain": {"schema": _STRING}}
    return {
        "post": {
            "operationId": name,
            "summary": f"{summary}, for operators",
            "requestBody": {"required": True, "content": _json(body)},
            "responses": {
                "200": {"description": "It is done.", "content": content},
                **_errors((403, *_GET_ERRORS, 504)),
            },
        }
    }


def _get(
    name: str,
    summary: str,
    content: Json,
    *parameters: Json,
    errors: Iterable[int] = _GET_ERRORS,
    prefix: str = "",
) -> Json:
    responses = {
        "200": {"description": "The answer.", "content": content},
        **_errors(errors, prefix),
    }
    operation: Json = {"operationId": name, "summary": summary, "responses": responses}
    return {"get": operation | ({"parameters": list(parameters)} if parameters else {})}


def _ready(name: str) -> Json:
    return {
        "get": {
            "operationId": name,
            "summary": "Whether requests can be answered",
            "security": [],
            "responses": {
                "200": {"description": "A request sent now can be answered."},
                "503": {"description": "It cannot."},
            },
        }
    }


def _parameter(name: str, place: str, description: str, **schema: Any) -> Json:
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "schema": _STRING | (schema or {"minLength": 1}),
        "description": description,
    }


def _errors(statuses: Iterable[int], prefix: str = "") -> Json:
    return {
        str(status): {"$ref": f"#/components/responses/{prefix}{status}"} for status in statuses
    }


def _json(schema: Any) -> Json:
    return {"application/json": {"schema": schema}}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _add_ranges(properties: Json, body: type) -> None:
    """Adds the validator's ranges to numbers that have the same meaning in core and in the body."""
    ranges = {**REQUEST_RANGES, **SAMPLING_RANGES}
    if body is CompletionBody:
        ranges["logprobs"] = ranges["top_logprobs"]
    elif body is ResponsesBody:
        ranges["max_output_tokens"] = ranges["max_tokens"]
    elif body is ChatBody:
        ranges["max_completion_tokens"] = ranges["max_tokens"]
    if issubclass(body, GenerationBody):
        # In bodies, -1 means 0 for top_k, and a negative seed keeps its bits.
        ranges["top_k"] = Range(-1, ranges["top_k"].high)
        del ranges["seed"]
    for name, bounds in ranges.items():
        schema = properties.get(name, {})
        for kind in schema.get("anyOf", (schema,)):
            if kind.get("type") in ("integer", "number"):
                kind["exclusiveMinimum" if bounds.above else "minimum"] = bounds.low
                kind["maximum"] = bounds.high
