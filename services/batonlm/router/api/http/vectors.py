"""POST /embeddings as in OpenAI's API, /rerank as in Jina's and Cohere's, /score as in vLLM's."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Send

from batonlm.core.admission.admission import Holding
from batonlm.core.request.request import Request, TextPair, VectorInput, VectorPrompt
from batonlm.core.request.validation import wrong
from batonlm.router.api.http.json_route import JsonRoute
from batonlm.router.api.http.responses import Header, encode
from batonlm.router.api.http.schema import (
    EmbedBody,
    RerankBody,
    ScoreBody,
    VectorBody,
)
from batonlm.router.workers.encoders import Vectors, floats

AT_ONCE = 1 << 15
"""Numbers that are written between two turns of other tasks: about two milliseconds."""

AnyBody = TypeVar("AnyBody", bound=VectorBody)


@dataclass(frozen=True, slots=True)
class VectorRoute(JsonRoute[AnyBody]):
    """Answers bodies of one kind with vectors or scores."""

    read: Callable[[AnyBody], tuple[VectorInput, ...]]
    """Returns a body's inputs."""
    write: Callable[[AnyBody, Vectors], Iterator[bytes]]
    """Yields an answer in parts."""

    def request(self, given: AnyBody) -> Request:
        prompt = VectorPrompt(
            self.read(given),
            getattr(given, "dimensions", None) or 0,
            _truncate(given),
            given.prompt_name or "",
        )
        return Request(prompt, model=given.model or "", priority=given.priority or 0)

    async def respond(
        self,
        given: AnyBody,
        request: Request,
        holding: Holding,
        headers: list[Header],
        send: Send,
    ) -> None:
        vectors = await self.pipeline.vectors(request, holding)
        # Before anything is sent: such an answer is larger than its request.
        holding.grow(sum(map(len, vectors.numbers)))
        head = [
            (b"content-type", b"application/json"),
            (b"x-request-id", vectors.request_id.encode()),
            *headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for part in self.write(given, vectors):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def embed_inputs(body: EmbedBody) -> tuple[VectorInput, ...]:
    """One text, one list of ids, or a list of either."""
    given = body.inputs
    if isinstance(given, str):
        return (given,)
    if given and all(isinstance(each, int) for each in given):
        return (tuple(each for each in given if isinstance(each, int)),)
    if any(isinstance(each, int) for each in given):
        raise wrong("inputs", "must be a text, token ids, or a list of either")
    return tuple(each if isinstance(each, str) else tuple(each) for each in given)  # type: ignore[arg-type]


def rerank_inputs(body: RerankBody) -> tuple[VectorInput, ...]:
    if body.top_n is not None and body.top_n < 1:
        raise wrong("top_n", "must be at least 1")
    if not body.documents:
        raise wrong("documents", "must not be empty")
    return tuple(TextPair(body.query, _text(each)) for each in body.documents)


def score_inputs(body: ScoreBody) -> tuple[VectorInput, ...]:
    """One query with each document, or as many queries as documents."""
    queries = [body.queries] if isinstance(body.queries, str) else body.queries
    documents = [body.documents] if isinstance(body.documents, str) else body.documents
    if not documents:
        raise wrong("documents", "must not be empty")
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        raise wrong("queries", "must be one text, or as many as documents")
    return tuple(map(TextPair, queries, documents))


def write_embeddings(body: EmbedBody, vectors: Vectors) -> Iterator[bytes]:
    yield b'{"object":"list","id":%s,"model":%s,"data":[' % (
        encode(vectors.request_id),
        encode(vectors.model.name),
    )
    parts: list[bytes] = []
    together = max(1, AT_ONCE // max(1, vectors.model.vector_size))
    for index, numbers in enumerate(vectors.numbers):
        if body.encoding_format == "base64":
            vector: object = base64.b64encode(numbers).decode()
        else:
            vector = floats(numbers).tolist()
        document = {"object": "embedding", "index": index, "embedding": vector}
        parts.append(b"," * (index > 0) + encode(document))
        if len(parts) >= together:
            yield b"".join(parts)
            parts.clear()
    usage = {"prompt_tokens": vectors.num_tokens, "total_tokens": vectors.num_tokens}
    yield b"".join(parts) + b'],"usage":%s}' % encode(usage)


def write_ranking(body: RerankBody, vectors: Vectors) -> Iterator[bytes]:
    """Best first; of equal ones the earlier."""
    scores = [floats(numbers)[0] for numbers in vectors.numbers]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = []
    for index in order[: body.top_n]:
        found: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents is not False:
            found["document"] = {"text": _text(body.documents[index])}
        results.append(found)
    usage = {"prompt_tokens": vectors.num_tokens, "total_tokens": vectors.num_tokens}
    yield encode(
        {
            "id": vectors.request_id,
            "model": vectors.model.name,
            "results": results,
            "usage": usage,
        }
    )


def write_scores(_: ScoreBody, vectors: Vectors) -> Iterator[bytes]:
    data = [
        {"index": index, "object": "score", "score": floats(numbers)[0]}
        for index, numbers in enumerate(vectors.numbers)
    ]
    usage = {"prompt_tokens": vectors.num_tokens, "total_tokens": vectors.num_tokens}
    yield encode(
        {
            "id": vectors.request_id,
            "object": "list",
            "created": int(time.time()),
            "model": vectors.model.name,
            "data": data,
            "usage": usage,
        }
    )


def _text(document: Any) -> str:
    return document if isinstance(document, str) else str(document.text)


def _truncate(body: VectorBody) -> int | None:
    if body.truncate is None or body.truncate_tokens is not None:
        return body.truncate_tokens
    return -1 if body.truncate else None
