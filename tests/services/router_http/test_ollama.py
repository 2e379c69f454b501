"""Ollama's API: what becomes of a body, an answer, a stream and an error."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from batonlm.core.errors import BatonError, Internal, InvalidArgument, Overloaded, Unavailable
from batonlm.core.request.request import (
    Accepted,
    ChatPrompt,
    Delta,
    Finished,
    FinishReason,
    Grammar,
    GrammarKind,
    Message,
    Request,
    SamplingParams,
    TextPrompt,
    Tool,
    ToolCall,
    ToolCallDelta,
    join_deltas,
)
from batonlm.router.api.http import answer_schema as answers
from batonlm.router.api.http.app import running_route
from batonlm.router.api.http.ollama import (
    OLLAMA,
    REFUSED_ROUTES,
    OllamaChatAnswer,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    embed_prompt,
    embed_texts,
    parse_ollama_chat,
    parse_ollama_generate,
    write_ollama_embedding,
    write_ollama_embeddings,
)
from batonlm.router.api.http.schema import decode
from batonlm.router.api.http.server import serve_http
from batonlm.router.api.translation import ANY_OBJECT
from batonlm.router.workers.encoders import Vectors
from tests.services.router_http.scripted import ANYONE, MODEL, Scripted, http_app, whole_answer

CHAT, GENERATE = "/api/chat", "/api/generate"
USER = {"role": "user", "content": "ab"}
SAID = whole_answer("<user>ab", 0)
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], **fields}


def parsed(**fields: Any) -> Request:
    (request,) = parse_ollama_chat(msgspec.json.encode(chat(**fields))).requests
    return request


def prompted(**fields: Any) -> ChatPrompt:
    prompt = parsed(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def generated(**fields: Any) -> Request:
    body = msgspec.json.encode({"prompt": "ab", **fields})
    (request,) = parse_ollama_generate(body).requests
    return request


def lines_of(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def joined(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The answer that the lines of a stream make."""
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    whole = dict(lines[-1])
    for part in ("content", "thinking", "tool_calls"):
        found = [line["message"][part] for line in lines if part in line["message"]]
        if found:
            whole["message"][part] = (
                sum(found[1:], found[0]) if part == "tool_calls" else "".join(found)
            )
    return whole


async def test_a_stream_makes_the_same_answer(http: httpx.AsyncClient, frontend: Scripted) -> None:
    for fields in ({}, {"options": {"stop": "世"}}, {"options": {"num_predict": 4, "seed": 3}}):
        streamed = await http.post(CHAT, json=chat(**fields))
        assert streamed.headers["content-type"] == "application/x-ndjson"
        lines = lines_of(streamed.text)
        for line in lines:
            msgspec.convert(line, type=answers.OllamaChatLine)
        whole = (await http.post(CHAT, json=chat(stream=False, **fields))).json()
        for answer in (lines[-1], whole):
            answer.pop("created_at")
        assert joined(lines) == whole
    assert frontend.seen[0] == frontend.seen[1]


async def test_a_chat(http: httpx.AsyncClient) -> None:
    asked = chat(
        model=f"{MODEL.name}:latest", stream=False, keep_alive="5m", options={"num_ctx": 9}
    )
    response = await http.post(CHAT, json=asked)
    answer = msgspec.json.decode(response.content, type=answers.OllamaChatLine)
    assert (answer.model, answer.message.content) == (MODEL.name, SAID)
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert (answer.prompt_eval_count, answer.eval_count) == (8, len(SAID.encode()))
    assert response.headers["x-baton-ignored-params"] == "keep_alive, options.num_ctx"
    cut = await http.post(CHAT, json=chat(stream=False, options={"num_predict": 4}))
    assert (cut.json()["done_reason"], cut.json()["message"]["content"]) == ("length", SAID[:4])


async def test_a_text_is_answered_or_continued(http: httpx.AsyncClient) -> None:
    for fields, prompt in (
        ({}, "<user>ab"),
        ({"system": "S"}, "<system>S<user>ab"),
        ({"raw": True}, "ab"),
    ):
        said = whole_answer(prompt, 0)
        lines = lines_of((await http.post(GENERATE, json={"prompt": "ab", **fields})).text)
        for line in lines:
            msgspec.convert(line, type=answers.OllamaGenerateLine)
        assert "".join(line["response"] for line in lines) == said
        whole = (await http.post(GENERATE, json={"prompt": "ab", "stream": False, **fields})).json()
        assert whole["response"] == said and whole["done"]


async def test_what_is_served(http: httpx.AsyncClient) -> None:
    tags = await http.get("/api/tags")
    models = msgspec.json.decode(tags.content, type=answers.OllamaModels).models
    assert [model.name for model in models] == [MODEL.name, "org/adapter"]
    running = await http.get("/api/ps")
    models = msgspec.json.decode(running.content, type=answers.OllamaModels).models
    assert models[0].context_length == MODEL.max_model_len
    for name in ("model", "name"):
        shown = await http.post("/api/show", json={name: f"{MODEL.name}:latest"})
        found = msgspec.json.decode(shown.content, type=answers.OllamaShown)
        assert found.capabilities == ["completion", "tools"]
        assert found.model_info["baton.context_length"] == MODEL.max_model_len
    version = await http.get("/api/version")
    msgspec.json.decode(version.content, type=answers.Version)
    missing = await http.post("/api/show", json={"model": "other"})
    assert missing.status_code == 404 and MODEL.name in missing.json()["error"]
    assert (await http.post("/api/show", json={})).json() == {"error": "model is required"}


async def test_a_model_that_thinks_says_so(http: httpx.AsyncClient, frontend: Scripted) -> None:
    frontend.thinks = True
    shown = await http.post("/api/show", json={"model": MODEL.name})
    found = msgspec.json.decode(shown.content, type=answers.OllamaShown)
    assert found.capabilities == ["completion", "tools", "thinking"]


@pytest.mark.parametrize(
    ("path", "asked", "kind"),
    [
        (CHAT, {}, answers.OllamaChatLine),
        (CHAT, {"messages": []}, answers.OllamaChatLine),
        (GENERATE, {}, answers.OllamaGenerateLine),
        (GENERATE, {"prompt": "", "keep_alive": 0, "raw": True}, answers.OllamaGenerateLine),
    ],
)
async def test_without_a_prompt_a_model_is_loaded(
    http: httpx.AsyncClient,
    frontend: Scripted,
    path: str,
    asked: dict[str, Any],
    kind: type[answers.OllamaLine],
) -> None:
    loaded = await http.post(path, json={"model": MODEL.name, **asked})
    assert loaded.headers["content-type"] == "application/json"
    line = msgspec.json.decode(loaded.content, type=kind)
    assert (line.model, line.done, line.done_reason) == (MODEL.name, True, "load")
    missing = await http.post(path, json={"model": "other", **asked})
    assert missing.status_code == 404 and missing.json().keys() == {"error"}
    frontend.refusal = Unavailable("no worker is ready")
    away = await http.post(path, json={"model": MODEL.name, **asked})
    assert (away.status_code, away.json()) == (503, {"error": "no worker is ready"})


def test_penalties_look_at_all_tokens_or_at_none() -> None:
    penalty = {"repeat_penalty": 1.5}
    assert parsed(options={**penalty, "repeat_last_n": -1}) == parsed(options=penalty)
    assert parsed(options={**penalty, "repeat_last_n": 0}) == parsed()
    assert parsed(options={"temperature": 1, "repeat_last_n": 64}) == parsed()


async def test_a_server_is_found(frontend: Scripted) -> None:
    """Where there is no page."""
    app = http_app(frontend, CollectorRegistry(), ANYONE, [running_route()])
    server = await serve_http(app, "127.0.0.1:0")
    try:
        base = f"http://{server.address}"
        async with httpx.AsyncClient(base_url=base, timeout=120, trust_env=False) as client:
            found = await client.get("/")
            assert (found.status_code, found.text) == (200, "Ollama is running")
            assert (await client.head("/")).status_code == 200
    finally:
        await server.close()


async def test_models_are_not_managed_here(http: httpx.AsyncClient, frontend: Scripted) -> None:
    for name, (method, why) in REFUSED_ROUTES.items():
        refused = await http.request(method, f"/api/{name}", json={"model": "m"})
        assert refused.status_code == 400
        assert refused.json() == {"error": f"/api/{name} is not supported: {why}"}


def test_a_body_is_a_request() -> None:
    options = {
        "num_predict": 9,
        "seed": 7,
        "stop": ["x"],
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 5,
        "min_p": 0.25,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    assert parsed(model="m", options=options, tools=[WEATHER]) == Request(
        ChatPrompt(
            (Message("user", "ab"),),
            tools=(Tool("weather", "", json.dumps(CITY, separators=(",", ":"))),),
        ),
        model="m",
        sampling=SamplingParams(0.5, 0.75, 5, 0.25, 1.5, 0.5, -0.5),
        seed=7,
        max_tokens=9,
        cap_max_tokens=True,
        stop_strings=("x",),
    )
    assert parsed(options={"num_predict": -1, "seed": -1}) == parsed()
    assert generated(raw=True).prompt == TextPrompt("ab")


def test_results_find_their_calls() -> None:
    """Calls of this API need no ids."""
    city = {"function": {"name": "weather", "arguments": {"city": "Bern"}}}
    time = {"function": {"name": "time", "arguments": {}}}
    messages = prompted(
        messages=[
            USER,
            {"role": "assistant", "thinking": "hm", "tool_calls": [city, time, city]},
            {"role": "tool", "tool_name": "time", "content": "noon"},
            {"role": "tool", "content": "rain"},
            {"role": "tool", "tool_name": "weather", "content": "sun"},
        ]
    ).messages
    assert messages[1] == Message(
        "assistant",
        "",
        (
            ToolCall("call_0", "weather", '{"city":"Bern"}'),
            ToolCall("call_1", "time", "{}"),
            ToolCall("call_2", "weather", '{"city":"Bern"}'),
        ),
        reasoning="hm",
    )
    assert [(one.tool_call_id, one.name, one.content) for one in messages[2:]] == [
        ("call_1", "time", "noon"),
        ("call_0", "weather", "rain"),
        ("call_2", "weather", "sun"),
    ]


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (None, ""),
        (True, '{"enable_thinking":true}'),
        (False, '{"enable_thinking":false}'),
        ("low", '{"enable_thinking":true,"reasoning_effort":"low"}'),
        ("max", '{"enable_thinking":true,"reasoning_effort":"high"}'),
    ],
)
def test_thinking_is_variables_of_the_template(think: Any, variables: str) -> None:
    assert prompted(think=think).template_kwargs == variables


def test_formats_are_grammars() -> None:
    text = json.dumps(CITY, separators=(",", ":"))
    assert parsed(format=CITY).grammar == Grammar(GrammarKind.JSON_SCHEMA, text)
    assert generated(format="json").grammar == ANY_OBJECT
    assert parsed(format="").grammar is None


def test_an_answer_that_has_begun_goes_on() -> None:
    prompt = prompted(messages=[USER, {"role": "assistant", "content": "It is"}])
    assert prompt.continue_final_message and not prompt.add_generation_prompt


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, chat(messages=[{"role": "wizard", "content": "x"}]), "messages[0].role"),
        (CHAT, chat(messages=[{**USER, "images": ["aa"]}]), "messages[0].images"),
        (CHAT, chat(messages=[USER, {"role": "tool", "content": "x"}]), "messages[1]"),
        (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [{}]}]),
         "messages[0].tool_calls[0].function"),
        (CHAT, chat(stream="yes"), "stream"),
        (CHAT, chat(think="much"), "think"),
        (CHAT, chat(format="yaml"), "format"),
        (CHAT, chat(format=[1]), "format"),
        (CHAT, chat(options=[1]), "options"),
        (CHAT, chat(options={"temperature": 3}), "options.temperature"),
        (CHAT, chat(options={"temperature": "hot"}), "options.temperature"),
        (CHAT, chat(options={"num_predict": 0}), "options.num_predict"),
        (CHAT, chat(options={"repeat_penalty": 0}), "options.repeat_penalty"),
        (CHAT, chat(options={"stop": [""]}), "options.stop"),
        (CHAT, chat(options={"mirostat": 1}), "options.mirostat"),
        (CHAT, chat(options={"repeat_last_n": 64, "repeat_penalty": 1.1}), "options.repeat_last_n"),
        (CHAT, chat(temperature=1), "temperature"),
        (CHAT, chat(system="x"), "system"),
        (CHAT, chat(logprobs=True), "logprobs"),
        (CHAT, chat(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].name"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "suffix"),
        (GENERATE, {"prompt": "x", "images": ["aa"]}, "images"),
        (GENERATE, {"prompt": "x", "template": "y"}, "template"),
        (GENERATE, {"prompt": "x", "context": [1]}, "context"),
        (GENERATE, {"prompt": "x", "raw": True, "system": "y"}, "system"),
        (GENERATE, {"prompt": "x", "messages": [USER]}, "messages"),
        ("/api/embed", {}, "input"),
    ],
)  # fmt: skip
async def test_the_field_at_fault_is_named(
    http: httpx.AsyncClient, frontend: Scripted, path: str, body: dict[str, Any], name: str
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == 400
    error = msgspec.json.decode(response.content, type=answers.OllamaError)
    assert error.error.startswith(f"{name} ")
    assert frontend.seen == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidArgument("no"), 400),
        (Overloaded("busy", retry_after_s=2.0), 429),
        (Unavailable("away"), 503),
        (Internal("ouch"), 500),
    ],
)
async def test_failures(
    http: httpx.AsyncClient, frontend: Scripted, error: BatonError, status: int
) -> None:
    frontend.refusal = error
    response = await http.post(CHAT, json=chat())
    assert (response.status_code, response.json()) == (status, {"error": error.message})
    frontend.refusal, frontend.failure = None, error
    response = await http.post(CHAT, json=chat())
    *lines, last = lines_of(response.text)
    assert response.status_code == 200 and last == {"error": error.message}
    assert not any(line["done"] for line in lines)
    missing = await http.post("/api/chats", json={})
    assert missing.json()["error"].endswith("the nearest is /api/chat")


def test_an_idle_line_is_a_part_without_text() -> None:
    line = json.loads(OLLAMA.keep_alive)
    msgspec.convert({**line, "response": ""}, type=_WithBoth)
    assert line["message"]["content"] == line["response"] == "" and not line["done"]


class _WithBoth(answers.OllamaChatLine, kw_only=True):
    response: str


def test_embeddings() -> None:
    body, _ = decode(b'{"input": "a", "keep_alive": 5}', OllamaEmbedBody)
    assert embed_texts(body) == ("a",) and body.truncate
    body, _ = decode(b'{"input": ["a", "b"]}', OllamaEmbedBody)
    assert embed_texts(body) == ("a", "b")
    numbers = tuple(array("f", each).tobytes() for each in ([1, 0.5], [0, -2]))
    vectors = Vectors(replace(MODEL, vector_size=2), numbers, 5)
    text = b"".join(write_ollama_embeddings(body, vectors))
    assert msgspec.json.decode(text, type=answers.OllamaEmbeddings) == answers.OllamaEmbeddings(
        MODEL.name, [[1, 0.5], [0, -2]], 5
    )


def test_one_embedding() -> None:
    body, ignored = decode(b'{"prompt": "a", "options": {}}', OllamaEmbeddingsBody)
    assert embed_prompt(body) == ("a",) and body.truncate and ignored == ("options",)
    numbers = array("f", [1, 0.5]).tobytes()
    vectors = Vectors(replace(MODEL, vector_size=2), (numbers,), 5)
    text = b"".join(write_ollama_embedding(body, vectors))
    assert msgspec.json.decode(text, type=answers.OllamaEmbedding).embedding == [1, 0.5]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(texts, max_size=3),
    st.lists(texts, max_size=3),
    st.lists(
        st.tuples(
            st.sampled_from(['{"a": 1}', "{}", '{"é": [1.5, null]}', '{"cu']), st.integers(0, 8)
        ),
        max_size=3,
    ),
    st.integers(1, 6),
)
def test_any_cut_makes_the_same_answer(
    thinking: list[str], said: list[str], calls: list[tuple[str, int]], together: int
) -> None:
    deltas = [Delta(0, reasoning=text) for text in thinking]
    deltas += [Delta(0, text) for text in said]
    for index, (arguments, cut) in enumerate(calls):
        first = ToolCallDelta(index, f"id{index}", "f", arguments[:cut])
        deltas.append(Delta(0, tool_calls=(first,)))
        deltas.append(Delta(0, tool_calls=(ToolCallDelta(index, arguments=arguments[cut:]),)))
    deltas.append(Delta(0, finish_reason=FinishReason.STOP))
    writers = [
        OllamaChatAnswer(
            parse_ollama_chat(msgspec.json.encode(chat())), [Accepted("r", "m", 10, 7)], 5
        )
        for _ in range(2)
    ]
    lines = []
    for start in range(0, len(deltas), together):
        lines += writers[0].chunks(0, join_deltas(0, deltas[start : start + together]))
    for writer in writers:
        writer.count(0, Finished(10, 5, 3))
    lines += writers[0].last_chunk(with_timings=False)
    assert joined(lines) == writers[1].document([[join_deltas(0, deltas)]])


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 20) | st.text(max_size=5) | st.just("json"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "function", "stop", "top_k"]), inner
        )
    ),
    max_leaves=8,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.dictionaries(
        st.sampled_from(
            sorted(
                {
                    *OllamaChatBody.__struct_encode_fields__,
                    *OllamaGenerateBody.__struct_encode_fields__,
                }
            )
        ),
        values,
        max_size=5,
    ),
    path=st.sampled_from([CHAT, GENERATE]),
)
async def test_any_json_object_gets_an_answer_or_a_client_error(
    http: httpx.AsyncClient, fields: dict[str, Any], path: str
) -> None:
    response = await http.post(path, json=fields)
    assert response.status_code == 200 or 400 <= response.status_code < 500
    if response.headers["content-type"] == "application/x-ndjson":
        assert lines_of(response.text)[-1]["done"]
    else:
        assert response.json().keys() & {"error", "done"}
