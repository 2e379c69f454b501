"""Anthropic's Messages API: what becomes of a body, an answer, a stream and an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batonlm.core.errors import (
    BatonError,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    Overloaded,
    Unavailable,
)
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
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolUse,
    join_deltas,
)
from batonlm.core.request.validation import validate
from batonlm.router.api.http import answer_schema as answers
from batonlm.router.api.http.anthropic import (
    SIGNATURE,
    MessagesAnswer,
    MessagesBody,
    parse_messages,
)
from batonlm.router.api.http.schema import REFUSED, ChatBody
from tests.services.router_http.scripted import ADAPTER, MODEL, Scripted, whole_answer

PATH = "/v1/messages"
USER = {"role": "user", "content": "ab"}
SAID = whole_answer("<user>ab", 0)
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": CITY}


def body(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 100, "messages": [USER], **fields}


def parsed(**fields: Any) -> Request:
    (request,) = parse_messages(msgspec.json.encode(body(**fields))).requests
    return request


def chat(**fields: Any) -> ChatPrompt:
    prompt = parsed(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def events_of(text: str) -> list[dict[str, Any]]:
    """Events, whose names are their types."""
    events = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        events.append(document)
    return events


def joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream make, in the only order that they may have."""
    message: dict[str, Any] = {}
    texts: dict[int, str] = {}
    opened = False
    for event in events:
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
                assert message["content"] == [] and message["stop_reason"] is None
            case "content_block_start":
                assert not opened and event["index"] == len(message["content"])
                opened = True
                message["content"].append(event["content_block"])
                texts[event["index"]] = ""
            case "content_block_delta":
                assert opened and event["index"] == len(message["content"]) - 1
                match event["delta"]:
                    case {"type": "signature_delta", "signature": signature}:
                        message["content"][-1]["signature"] = signature
                    case {"type": kind}:
                        field = kind.removesuffix("_delta").replace("input", "partial")
                        texts[event["index"]] += event["delta"][field]
            case "content_block_stop":
                assert opened and event["index"] == len(message["content"]) - 1
                opened = False
            case "message_delta":
                assert not opened
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case "message_stop":
                assert event is events[-1]
    for index, block in enumerate(message["content"]):
        if block["type"] == "tool_use":
            block["input"] = json.loads(texts[index])
        else:
            block[block["type"]] = texts[index]
    return message


async def test_a_stream_makes_the_same_message(http: httpx.AsyncClient, frontend: Scripted) -> None:
    for asked in (body(), body(stop_sequences=["世"]), body(max_tokens=4), body(seed=3)):
        whole = (await http.post(PATH, json=asked)).json()
        streamed = await http.post(PATH, json=asked | {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        events = events_of(streamed.text)
        for event in events:
            msgspec.convert(event, type=_Event)
        message = joined(events)
        assert message.pop("id") != whole.pop("id")
        assert message == whole
    assert frontend.seen[0] == frontend.seen[1]


_Event = (
    answers.MessageStart
    | answers.ContentBlockStart
    | answers.ContentBlockDelta
    | answers.ContentBlockStop
    | answers.MessageDelta
    | answers.MessageStop
)


async def test_a_message(http: httpx.AsyncClient) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-2026-01-01"}
    asked = body(metadata={"user_id": "me"}, service_tier="auto")
    response = await http.post(PATH, json=asked, headers=headers)
    message = msgspec.json.decode(response.content, type=answers.MessagesMessage)
    assert message.model == MODEL.name and message.id.startswith("msg_")
    assert message.content == [answers.AnsweredText(SAID)]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    # Half of the prompt's tokens were cached.
    assert message.usage.input_tokens == message.usage.cache_read_input_tokens == 4
    assert message.usage.output_tokens == len(SAID.encode())
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert response.headers["x-baton-ignored-params"] == "metadata, service_tier"
    stopped = (await http.post(PATH, json=body(stop_sequences=["世"]))).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "世")
    cut = (await http.post(PATH, json=body(max_tokens=4))).json()
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", SAID[:4])


async def test_tokens_are_counted(http: httpx.AsyncClient, frontend: Scripted) -> None:
    counted = await http.post(f"{PATH}/count_tokens", json={"messages": [USER], "tools": [WEATHER]})
    assert msgspec.json.decode(counted.content, type=answers.CountedTokens).input_tokens == 8
    (request,) = frontend.seen
    assert request.prompt == chat(tools=[WEATHER])
    wrong: Any = [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "", **CALL}]}]
    wrong.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": ""}]})
    refused = await http.post(f"{PATH}/count_tokens", json={"messages": wrong})
    assert "messages[1].content[0] must not be empty" in refused.text


CALL: Any = {"name": "weather", "input": {"city": "Bern"}}


def test_a_body_is_a_request() -> None:
    request = parsed(
        model="m",
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        stop_sequences=["x"],
        temperature=0.5,
        top_p=0.75,
        top_k=5,
        seed=7,
        tools=[WEATHER],
    )
    assert request == Request(
        ChatPrompt(
            (Message("system", "Be\nbrief."), Message("user", "ab")),
            tools=(Tool("weather", "of a city", json.dumps(CITY, separators=(",", ":"))),),
        ),
        model="m",
        sampling=SamplingParams(0.5, 0.75, 5),
        seed=7,
        max_tokens=100,
        cap_max_tokens=True,
        stop_strings=("x",),
    )


def test_a_conversation_with_tools() -> None:
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "c2VjcmV0"},
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "one", **CALL},
                {"type": "tool_use", "id": "two", "name": "time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "one", "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "two",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "clock"}],
                },
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    calls = (ToolCall("one", "weather", '{"city":"Bern"}'), ToolCall("two", "time", "{}"))
    assert chat(messages=turns).messages == (
        Message("user", "a\nb"),
        Message("assistant", "Look.", calls, reasoning="hm"),
        Message("tool", "rain", tool_call_id="one", name="weather"),
        Message("tool", "no\nclock", tool_call_id="two", name="time"),
        Message("user", "And?"),
    )


def test_as_many_tools_as_clients_of_this_api_have() -> None:
    names = [f"mcp__{'server' * 18}__{index:04}" for index in range(200)]
    assert {len(name) for name in names} == {119}
    tools = [{**WEATHER, "name": name} for name in names]
    request = validate(parsed(tools=tools, tool_choice={"type": "tool", "name": names[-1]}))
    assert isinstance(request.prompt, ChatPrompt)
    assert [tool.name for tool in request.prompt.tools] == names


async def test_models_have_the_form_that_a_client_expects(http: httpx.AsyncClient) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = await http.get("/v1/models", headers=headers, params={"limit": 20})
    models = msgspec.json.decode(listed.content, type=answers.ModelsOfMessages)
    assert [model.id for model in models.data] == [MODEL.name, ADAPTER.name]
    assert (models.first_id, models.last_id) == (MODEL.name, ADAPTER.name)
    assert not models.has_more
    shown = await http.get(f"/v1/models/{MODEL.name}", headers=headers)
    assert msgspec.json.decode(shown.content, type=answers.ModelOfMessages) == models.data[0]
    missing = await http.get("/v1/models/other", headers=headers)
    assert missing.status_code == 404
    error = msgspec.json.decode(missing.content, type=answers.MessagesError).error
    assert error.type == "not_found_error"


def test_an_answer_that_has_begun_goes_on() -> None:
    prompt = chat(messages=[USER, {"role": "assistant", "content": "It is"}])
    assert prompt.continue_final_message and not prompt.add_generation_prompt
    assert not chat().continue_final_message and chat().add_generation_prompt


@pytest.mark.parametrize(
    ("choice", "is_"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
        ({"type": "any"}, ToolChoice(ToolUse.REQUIRED)),
        ({"type": "tool", "name": "weather"}, ToolChoice(ToolUse.REQUIRED, "weather")),
        ({"type": "none"}, ToolChoice(ToolUse.NONE)),
    ],
)
def test_choices_of_tools(choice: Any, is_: ToolChoice) -> None:
    assert chat(tools=[WEATHER], tool_choice=choice).tool_choice == is_


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            {"enable_thinking": True, "thinking_budget": 2000},
        ),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
    ],
)
def test_thinking_is_variables_of_the_template(fields: Any, variables: Any) -> None:
    kwargs = chat(**fields).template_kwargs
    assert (json.loads(kwargs) if kwargs else None) == variables


def test_a_schema_is_a_grammar() -> None:
    form = {"format": {"type": "json_schema", "schema": CITY}}
    text = json.dumps(CITY, separators=(",", ":"))
    assert parsed(output_config=form).grammar == Grammar(GrammarKind.JSON_SCHEMA, text)


def blocks(*given: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(given)}]}


def after_call(**call: Any) -> dict[str, Any]:
    used = {"type": "tool_use", "id": "one", **CALL, **call}
    result = {"type": "tool_result", "tool_use_id": used["id"]}
    return {"messages": [*blocks(used, role="assistant")["messages"], *blocks(result)["messages"]]}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (blocks(), "messages[0].content"),
        (blocks({"type": "image", "source": {}}), "messages[0].content[0].type"),
        (blocks({"type": "document", "source": {}}), "messages[0].content[0].type"),
        (blocks({"type": "text"}), "messages[0].content[0].text"),
        (blocks({"type": "text", "text": 5}), "messages[0].content[0].text"),
        (blocks({"type": "thinking", "thinking": "x"}), "messages[0].content[0].type"),
        (blocks({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
        (
            blocks({"type": "tool_result", "tool_use_id": "none"}),
            "messages[0].content[0].tool_use_id",
        ),
        (blocks({"type": "redacted_thinking"}), "messages[0].content[0].type"),
        (blocks({"type": "tool_use", "id": "a", "name": "f"}, role="assistant"),
         "messages[0].content[0].input"),
        (blocks({"type": "tool_use", "id": "a", **CALL}, role="assistant"),
         "messages[0].content[0]"),
        (after_call(name=""), "messages[0].content[0]"),
        (after_call(id="x" * 300), "messages[0].content[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search_20260318", "name": "w"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stop": "x"}, "stop"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)  # fmt: skip
async def test_the_field_at_fault_is_named(
    http: httpx.AsyncClient, frontend: Scripted, fields: dict[str, Any], name: str
) -> None:
    response = await http.post(PATH, json=body(**fields))
    assert response.status_code == 400
    error = msgspec.json.decode(response.content, type=answers.MessagesError)
    assert error.error.type == "invalid_request_error"
    assert error.error.message.startswith(f"{name} ")
    assert error.request_id == response.headers["request-id"] == response.headers["x-request-id"]
    assert frontend.seen == []


async def test_null_means_absent(http: httpx.AsyncClient, frontend: Scripted) -> None:
    names = {*MessagesBody.__struct_encode_fields__, *ChatBody.__struct_encode_fields__, *REFUSED}
    nothing = dict.fromkeys(names - {"messages", "max_tokens"})
    assert (await http.post(PATH, json=body(**nothing))).status_code == 200
    assert (await http.post(PATH, json=body())).status_code == 200
    assert frontend.seen[0] == frontend.seen[1]


@pytest.mark.parametrize("header", ["x-baton-resume", "last-event-id"])
async def test_its_streams_do_not_go_on(http: httpx.AsyncClient, header: str) -> None:
    refused = await http.post(PATH, json=body(stream=True), headers={header: "true"})
    assert refused.status_code == 400 and header in refused.text.lower()


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidArgument("no"), 400, "invalid_request_error"),
        (Overloaded("busy", retry_after_s=2.0), 429, "rate_limit_error"),
        (Unavailable("away"), 503, "overloaded_error"),
        (DeadlineExceeded("late"), 504, "timeout_error"),
        (Internal("ouch"), 500, "api_error"),
    ],
)
async def test_failures(
    http: httpx.AsyncClient, frontend: Scripted, error: BatonError, status: int, kind: str
) -> None:
    frontend.refusal = error
    response = await http.post(PATH, json=body(stream=True))
    refused = msgspec.json.decode(response.content, type=answers.MessagesError)
    assert (response.status_code, refused.error.type) == (status, kind)
    assert refused.error.message == error.message
    assert response.headers.get("retry-after") == {429: "2", 503: "1"}.get(status)
    frontend.refusal, frontend.failure = None, error
    response = await http.post(PATH, json=body(stream=True))
    events = events_of(response.text)
    failed = msgspec.convert(events[-1], type=answers.MessagesError)
    assert (response.status_code, failed.error.type) == (200, kind)
    assert failed.request_id == response.headers["request-id"]
    assert "message_stop" not in {event["type"] for event in events}


async def test_failures_of_the_exchange(http: httpx.AsyncClient, frontend: Scripted) -> None:
    for method, path, content, status, kind in (
        ("POST", PATH, b"{", 400, "invalid_request_error"),
        ("POST", PATH, b" " * (2 << 20), 413, "request_too_large"),
        ("GET", PATH, b"", 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", b"{}", 404, "not_found_error"),
        ("POST", PATH, json.dumps(body(model="other")).encode(), 404, "not_found_error"),
    ):
        response = await http.request(method, path, content=content)
        error = msgspec.json.decode(response.content, type=answers.MessagesError)
        assert (response.status_code, error.error.type) == (status, kind)
    near = await http.post("/v1/message", content=b"{}")
    assert near.json()["error"]["message"].endswith("the nearest is /v1/messages")


ACCEPTED = [Accepted("r", "m", 10, 7)]


def answer(**fields: Any) -> MessagesAnswer:
    return MessagesAnswer(parse_messages(msgspec.json.encode(body(**fields))), ACCEPTED, 5)


def told(writer: MessagesAnswer, parts: Sequence[Delta]) -> list[dict[str, Any]]:
    """The events of a stream with these deltas."""
    events = writer.opening(0)
    for part in parts:
        writer.count(0, part)
        events += writer.chunks(0, part)
    writer.count(0, Finished(10, 5, 3))
    return events + writer.last_chunk(with_timings=False)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
PARTS = st.tuples(
    st.lists(texts, max_size=3),
    st.lists(texts, max_size=3),
    st.lists(
        st.tuples(st.sampled_from(['{"a": 1}', "{}", '{"é": [1.5, null]}']), st.integers(0, 8)),
        max_size=3,
    ),
    st.sampled_from([FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.LENGTH]),
    st.integers(1, 6),
    st.sampled_from([{}, {"thinking": {"type": "adaptive", "display": "omitted"}}]),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(PARTS)
def test_any_cut_makes_the_same_message(given_: Any) -> None:
    """Thinking, then text, then calls, in deltas of any size."""
    thinking, said, calls, reason, together, fields = given_
    deltas = [Delta(0, reasoning=text) for text in thinking]
    deltas += [Delta(0, text) for text in said]
    for index, (arguments, cut) in enumerate(calls):
        first = ToolCallDelta(index, f"id{index}", "f", arguments[:cut])
        deltas.append(Delta(0, tool_calls=(first,)))
        deltas.append(Delta(0, tool_calls=(ToolCallDelta(index, arguments=arguments[cut:]),)))
    deltas.append(Delta(0, finish_reason=reason))
    parts = [
        join_deltas(0, deltas[start : start + together])
        for start in range(0, len(deltas), together)
    ]
    whole = answer(**fields)
    for event in (join_deltas(0, deltas), Finished(10, 5, 3)):
        whole.count(0, event)
    message = joined(told(answer(**fields), parts))
    assert message == whole.document([[join_deltas(0, deltas)]])


def test_why_an_answer_ended() -> None:
    call = Delta(0, tool_calls=(ToolCallDelta(0, "a", "f", "{}"),))
    for ending, calls, reason in (
        (Delta(0, finish_reason=FinishReason.STOP), False, "end_turn"),
        # A forced call ends as OpenAI has it, in a plain stop.
        (Delta(0, finish_reason=FinishReason.STOP), True, "tool_use"),
        (Delta(0, finish_reason=FinishReason.TOOL_CALLS), True, "tool_use"),
        (Delta(0, finish_reason=FinishReason.LENGTH, token_ids=(1,) * 100), True, "max_tokens"),
        (
            Delta(0, finish_reason=FinishReason.LENGTH, token_ids=(1,) * 99),
            False,
            "model_context_window_exceeded",
        ),
        (
            Delta(0, finish_reason=FinishReason.STOP, stop_string="x"),
            True,
            "stop_sequence",
        ),
    ):
        events = told(answer(), [call, ending] if calls else [ending])
        assert joined(events)["stop_reason"] == reason


def test_arguments_that_the_end_cut_are_no_input() -> None:
    cut = Delta(
        0,
        tool_calls=(ToolCallDelta(0, "a", "f", '{"ci'),),
        finish_reason=FinishReason.LENGTH,
    )
    writer = answer()
    for event in (cut, Finished(10, 5, 3)):
        writer.count(0, event)
    (block,) = writer.document([[cut]])["content"]
    assert block == {"type": "tool_use", "id": "a", "name": "f", "input": {}}


def test_thinking_has_a_signature() -> None:
    thought = Delta(0, reasoning="hm", text="x", finish_reason=FinishReason.STOP)
    (first, second) = joined(told(answer(), [thought]))["content"]
    assert first == {"type": "thinking", "thinking": "hm", "signature": SIGNATURE}
    assert second == {"type": "text", "text": "x"}


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 20) | st.text(max_size=5) | st.just("text"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "id", "tool_use_id", "name"]), inner
        )
    ),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.dictionaries(
        st.sampled_from(sorted(MessagesBody.__struct_encode_fields__)), values, max_size=5
    ),
    content=values,
)
async def test_any_json_object_gets_an_answer_or_a_client_error(
    http: httpx.AsyncClient, fields: dict[str, Any], content: Any
) -> None:
    turns = [{"role": "user", "content": content}]
    response = await http.post(PATH, json={"max_tokens": 3, "messages": turns} | fields)
    assert response.status_code == 200 or 400 <= response.status_code < 500
    if response.headers["content-type"].startswith("text/event-stream"):
        assert events_of(response.text)[-1] == {"type": "message_stop"}
    else:
        assert response.json()["type"] in ("message", "error")


def test_text_behind_the_end_of_a_call_comes_after_it() -> None:
    """Both may come in one piece, when the call has begun in an earlier one."""
    begun = ToolCallDelta(0, "one", "weather", '{"city":')
    rest = (ToolCallDelta(0, arguments='"Bern"}'), ToolCallDelta(1, "two", "time", "{}"))
    parts = [Delta(0, tool_calls=(begun,)), Delta(0, "Wait.", tool_calls=rest)]
    parts.append(Delta(0, finish_reason=FinishReason.STOP))
    assert joined(told(answer(), parts))["content"] == [
        {"type": "tool_use", "id": "one", "name": "weather", "input": {"city": "Bern"}},
        {"type": "text", "text": "Wait."},
        {"type": "tool_use", "id": "two", "name": "time", "input": {}},
    ]
