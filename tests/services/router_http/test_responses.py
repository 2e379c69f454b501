"""OpenAI's Responses API: what becomes of a body, an answer, a stream, and of what is stored."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from batonlm.core.admission.admission import Holding
from batonlm.core.errors import Cancelled, InvalidArgument, Overloaded, Unavailable
from batonlm.core.request.request import (
    Accepted,
    ChatPrompt,
    Delta,
    Event,
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
)
from batonlm.router.api.http import answer_schema as answers
from batonlm.router.api.http import response_routes
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.openai_responses import (
    ResponsesAnswer,
    ResponsesBody,
    ResponsesCall,
    input_items,
    responses_call,
)
from batonlm.router.api.http.schema import REFUSED_ELSEWHERE
from batonlm.router.api.http.server import serve_http
from batonlm.router.request.response_store import (
    Dropped,
    MemoryStore,
    ResponseStore,
    StoredResponse,
)
from tests.services.router_http.scripted import (
    MODEL,
    Scripted,
    http_app,
    prompt_ids,
    whole_answer,
)
from tests.services.router_http.test_resuming import Named

PATH = "/v1/responses"
SAID = whole_answer("<user>ab", 0)
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"type": "function", "name": "weather", "description": "of", "parameters": CITY}
ALWAYS_S = 3600.0
BACKGROUND: Any = {"input": "ab", "background": True}


def call_of(before: Sequence[Any] = (), **fields: Any) -> ResponsesCall:
    body = msgspec.json.decode(msgspec.json.encode({"input": "ab", **fields}), type=ResponsesBody)
    return responses_call(body, (), before, input_items(body.input))


def parsed(before: Sequence[Any] = (), **fields: Any) -> Request:
    (request,) = call_of(before, **fields).requests
    return request


def chat(before: Sequence[Any] = (), **fields: Any) -> ChatPrompt:
    prompt = parsed(before, **fields).prompt
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
    """The response that the events of a stream make, in the only order that they may have."""
    output: list[dict[str, Any]] = []
    opened = False
    for number, event in enumerate(deepcopy(events)):
        assert event["sequence_number"] == number
        kind = event["type"].removeprefix("response.")
        if "item_id" in event:
            assert opened and event["output_index"] == len(output) - 1
            assert event["item_id"] == output[-1]["id"]
        match kind:
            case "created" | "in_progress":
                assert number < 2 and event["response"]["output"] == []
                assert event["response"]["status"] == "in_progress"
            case "output_item.added":
                assert not opened and event["output_index"] == len(output)
                assert event["item"]["status"] == "in_progress"
                opened = True
                output.append(event["item"])
            case "content_part.added":
                assert event["content_index"] == len(output[-1]["content"])
                output[-1]["content"].append(event["part"])
            case "reasoning_summary_part.added":
                assert event["summary_index"] == len(output[-1]["summary"])
                output[-1]["summary"].append(event["part"])
            case "output_text.delta":
                output[-1]["content"][0]["text"] += event["delta"]
                output[-1]["content"][0]["logprobs"] += event["logprobs"]
            case "reasoning_text.delta":
                output[-1]["content"][0]["text"] += event["delta"]
            case "reasoning_summary_text.delta":
                output[-1]["summary"][0]["text"] += event["delta"]
            case "function_call_arguments.delta":
                output[-1]["arguments"] += event["delta"]
            case "output_text.done":
                assert event["text"] == output[-1]["content"][0]["text"]
                assert event["logprobs"] == output[-1]["content"][0]["logprobs"]
            case "reasoning_text.done":
                assert event["text"] == output[-1]["content"][0]["text"]
            case "reasoning_summary_text.done":
                assert event["text"] == output[-1]["summary"][0]["text"]
            case "function_call_arguments.done":
                assert event["arguments"] == output[-1]["arguments"]
                assert event["name"] == output[-1]["name"]
            case "content_part.done":
                assert event["part"] == output[-1]["content"][0]
            case "reasoning_summary_part.done":
                assert event["part"] == output[-1]["summary"][0]
            case "output_item.done":
                assert opened and event["output_index"] == len(output) - 1
                opened = False
                kept = {"status", "encrypted_content"}
                for name in event["item"].keys() - kept:
                    assert event["item"][name] == output[-1][name]
                output[-1] = event["item"]
            case _:
                assert not opened and event == events[-1]
                assert kind == event["response"]["status"]
                assert event["response"]["output"] == output
    whole: dict[str, Any] = events[-1]["response"]
    return whole


async def test_a_stream_makes_the_same_response(
    http: httpx.AsyncClient, frontend: Scripted
) -> None:
    logprobs: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    asked: Any
    for asked in ({}, {"max_output_tokens": 4}, {"seed": 3}, logprobs):
        body = {"input": "ab", **asked}
        whole = (await http.post(PATH, json=body)).json()
        streamed = await http.post(PATH, json=body | {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        events = events_of(streamed.text)
        for event in events:
            msgspec.convert(event, type=answers.ResponseEvent)
        response = joined(events)
        for changing in ("id", "created_at", "completed_at"):
            response.pop(changing), whole.pop(changing)
        for item in (*response["output"], *whole["output"]):
            item.pop("id")
        assert response == whole
    assert frontend.seen[0] == frontend.seen[1]


async def test_a_response(http: httpx.AsyncClient) -> None:
    asked: Any = {"input": "ab", "instructions": "", "metadata": {"a": "b"}, "service_tier": "auto"}
    asked |= {"user": "me", "prompt_cache_key": "k", "tools": [WEATHER], "temperature": 0.5}
    answer = await http.post(PATH, json=asked)
    response = msgspec.json.decode(answer.content, type=answers.ResponseDocument)
    assert response.model == MODEL.name and response.id.startswith("resp_")
    (message,) = response.output
    assert isinstance(message, answers.ResponseOutputMessage)
    assert message.content == [answers.ResponseText(SAID, [], [])]
    assert (response.status, message.status) == ("completed", "completed")
    assert response.metadata == {"a": "b"} and response.tools[0]["parameters"] == CITY
    assert (response.temperature, response.top_p) == (0.5, 1.0)
    usage = response.usage
    assert usage is not None
    # Half of the prompt's tokens were cached.
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (8, 4)
    assert usage.output_tokens == len(SAID.encode())
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert answer.headers["x-baton-ignored-params"] == "prompt_cache_key, service_tier, user"
    cut = (await http.post(PATH, json={"input": "ab", "max_output_tokens": 4})).json()
    assert cut["status"] == cut["output"][0]["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut["output"][0]["content"][0]["text"] == SAID[:4]


def test_a_body_is_a_request() -> None:
    request = parsed(
        model="m",
        instructions="Be brief.",
        temperature=0.5,
        top_p=0.75,
        top_k=5,
        min_p=0.25,
        top_logprobs=2,
        seed=7,
        max_output_tokens=9,
        truncation="auto",
        tools=[WEATHER],
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        reasoning={"effort": "high", "summary": "auto"},
    )
    assert request == Request(
        ChatPrompt(
            (Message("system", "Be brief."), Message("user", "ab")),
            tools=(Tool("weather", "of", json.dumps(CITY, separators=(",", ":"))),),
            tool_choice=ToolChoice(parallel=False),
            template_kwargs='{"reasoning_effort":"high"}',
            needed_variables=("reasoning_effort",),
        ),
        model="m",
        sampling=SamplingParams(0.5, 0.75, 5, 0.25, top_logprobs=2),
        seed=7,
        max_tokens=9,
        cap_max_tokens=True,
        truncate_prompt_tokens=-1,
        grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
    )
    assert parsed() == Request(ChatPrompt((Message("user", "ab"),)), cap_max_tokens=True)
    assert parsed(include=["message.output_text.logprobs"]).sampling.top_logprobs == 0
    assert chat(reasoning={"effort": "none"}).template_kwargs == '{"enable_thinking":false}'


def test_what_tools_may_be_called() -> None:
    clock = WEATHER | {"name": "clock"}
    named = {"type": "function", "name": "clock"}
    asked = chat(tools=[WEATHER, clock], tool_choice=named)
    assert asked.tool_choice == ToolChoice(ToolUse.REQUIRED, "clock")
    some = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    asked = chat(tools=[WEATHER, clock], tool_choice=some)
    assert asked.tool_choice == ToolChoice(ToolUse.REQUIRED)
    assert [tool.name for tool in asked.tools] == ["clock"]
    # A call that must be made is no text, which the format is of.
    form = {"format": {"type": "json_object"}}
    assert parsed(tools=[WEATHER], tool_choice="required", text=form).grammar is None


def said(text: str) -> Any:
    return {"role": "assistant", "content": [{"type": "output_text", "text": text}]}


def called(call_id: str, city: str = "Bern") -> Any:
    arguments = json.dumps({"city": city})
    return {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": arguments}


def output(call_id: str, text: Any = "sunny") -> Any:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def thought(text: str, kind: str = "content") -> Any:
    part = {"content": "reasoning_text", "summary": "summary_text"}[kind]
    return {"type": "reasoning", "id": "rs_1", "summary": [], kind: [{"type": part, "text": text}]}


def core_call(call_id: str) -> ToolCall:
    return ToolCall(call_id, "weather", '{"city": "Bern"}')


def test_items_of_one_turn_are_one_message() -> None:
    texts = [{"type": "input_text", "text": "on"}, {"type": "input_text", "text": "e"}]
    items = [
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": texts},
        thought("Hm."),
        said("Let me see."),
        called("a"),
        called("b"),
        output("a"),
        output("b", [{"type": "input_text", "text": "rain"}]),
        thought("So.", "summary"),
        said("It rains."),
        said("It does."),
        {"type": "message", "role": "user", "content": "Thanks"},
    ]
    assert chat(input=items, instructions="Be brief.").messages == (
        Message("system", "Be brief.\nRules."),
        Message("user", "one"),
        Message(
            "assistant",
            "Let me see.",
            tool_calls=(core_call("a"), core_call("b")),
            reasoning="Hm.",
        ),
        Message("tool", "sunny", tool_call_id="a", name="weather"),
        Message("tool", "rain", tool_call_id="b", name="weather"),
        Message("assistant", "It rains.", reasoning="So."),
        Message("assistant", "It does."),
        Message("user", "Thanks"),
    )


def test_calls_with_their_outputs_between_are_two_turns() -> None:
    items = [called("a"), output("a"), called("b"), said("Wait."), output("b")]
    assert chat(input=items).messages == (
        Message("assistant", "", tool_calls=(core_call("a"),)),
        Message("tool", "sunny", tool_call_id="a", name="weather"),
        Message("assistant", "Wait.", tool_calls=(core_call("b"),)),
        Message("tool", "sunny", tool_call_id="b", name="weather"),
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role"),
        ({"input": [{"type": "message", "content": ""}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [output("none")]}, "input[0].call_id"),
        ({"input": [said("")] * 5000}, "input"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA_"}]},
            "input[0].encrypted_content",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]}},
            "tool_choice.tools[0]",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"include": ["everything"]}, "include[0]"),
        ({"truncation": "middle"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ],
)
def test_what_cannot_be_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        call_of(**fields)
    assert refused.value.field == field
    assert field in refused.value.message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"input": [called(""), output("")]}, "input[0]"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER | {"parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"stop": ["x"]}, "stop"),
        ({"logprobs": True}, "logprobs"),
    ],
)
async def test_clients_see_their_names(
    http: httpx.AsyncClient, fields: dict[str, Any], field: str
) -> None:
    for more in ({}, {"stream": True}, {"background": True}):
        refused = await http.post(PATH, json={"input": "ab", **fields, **more})
        error = msgspec.json.decode(refused.content, type=answers.ErrorAnswer).error
        assert (refused.status_code, error.param) == (400, field)
        assert error.message.startswith(field)


async def test_no_field_of_the_other_routes_is_dropped(http: httpx.AsyncClient) -> None:
    for name in REFUSED_ELSEWHERE.keys() - {*ResponsesBody.__struct_encode_fields__}:
        refused = await http.post(PATH, json={"input": "ab", name: "odd"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


# The answer, event by event.


def answer_of(deltas: Sequence[Delta], **fields: Any) -> tuple[list[Any], dict[str, Any]]:
    """The events of a stream, and the whole response."""
    events: list[Any] = []
    whole: dict[str, Any] = {}
    for streams in (True, False):
        call = call_of(**fields, stream=streams)
        answer = ResponsesAnswer(call, [Accepted("0a", "m", 3, 7)], 0)
        events = answer.opening(0) if streams else events
        all_of_it: list[Event] = [*deltas, Finished(3, 5, 1, reasoning_tokens=2)]
        for event in all_of_it:
            answer.count(0, event)
            if streams and isinstance(event, Delta):
                events += answer.chunks(0, event)
        if streams:
            events += answer.last_chunk(with_timings=False)
        else:
            whole = answer.document([])
    return events, whole


def told(deltas: Sequence[Delta], **fields: Any) -> dict[str, Any]:
    events, whole = answer_of(deltas, **fields)
    for event in events:
        msgspec.convert(event, type=answers.ResponseEvent)
    # As JSON, because a client's schema is in them as it came.
    response = joined(json.loads(msgspec.json.encode(events)))
    whole = json.loads(msgspec.json.encode(whole))
    for changing in ("created_at", "completed_at"):
        response.pop(changing), whole.pop(changing)
    assert response == whole
    return response


CALL = ToolCallDelta(0, "call_1", "weather")
DELTAS = [
    Delta(0, reasoning="Hm, "),
    Delta(0, reasoning="well.", text="Let "),
    Delta(0, text="me.", tool_calls=(CALL,)),
    Delta(0, tool_calls=(ToolCallDelta(0, arguments='{"city":'),)),
    Delta(
        0,
        tool_calls=(
            ToolCallDelta(0, arguments='"Bern"}'),
            ToolCallDelta(1, "call_2", "weather", "{}"),
        ),
        finish_reason=FinishReason.TOOL_CALLS,
    ),
]


def test_reasoning_text_and_calls_are_items() -> None:
    response = told(DELTAS, tools=[WEATHER])
    reasoning, message, first, second = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm, well."}]
    assert reasoning["summary"] == [] and "encrypted_content" not in reasoning
    assert message["content"][0]["text"] == "Let me."
    assert (first["call_id"], first["arguments"]) == ("call_1", '{"city":"Bern"}')
    assert (second["call_id"], second["arguments"]) == ("call_2", "{}")
    assert [item["id"] for item in response["output"]] == [
        "rs_0a_0",
        "msg_0a_1",
        "fc_0a_2",
        "fc_0a_3",
    ]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_reasoning_is_its_summary_where_one_is_asked_for() -> None:
    encrypted = ["reasoning.encrypted_content"]
    response = told(DELTAS, reasoning={"summary": "auto"}, include=encrypted, store=False)
    reasoning = response["output"][0]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Hm, well."}]
    assert reasoning["content"] == []
    assert base64.b64decode(reasoning["encrypted_content"]) == b"Hm, well."
    back = [reasoning | {"summary": []}, *response["output"][1:], output("call_1")]
    assert chat(input=back).messages[0].reasoning == "Hm, well."


def test_a_call_that_was_cut_is_incomplete_and_not_continued() -> None:
    cut = [Delta(0, tool_calls=(CALL,)), Delta(0, finish_reason=FinishReason.LENGTH)]
    response = told(cut, tools=[WEATHER])
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert chat(response["output"]).messages == (Message("user", "ab"),)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["r", "t", "c", "a"]), max_size=12), st.booleans())
def test_any_order_of_parts_is_told(order: list[str], summary: bool) -> None:
    deltas, calls = [], 0
    for number, part in enumerate(order):
        match part:
            case "r":
                deltas.append(Delta(0, reasoning=f"r{number}"))
            case "t":
                deltas.append(Delta(0, text=f"t{number}"))
            case "c":
                deltas.append(Delta(0, tool_calls=(ToolCallDelta(calls, f"c{calls}", "weather"),)))
                calls += 1
            case "a" if calls:
                deltas.append(Delta(0, tool_calls=(ToolCallDelta(calls - 1, arguments=" "),)))
    deltas.append(Delta(0, finish_reason=FinishReason.STOP))
    told(deltas, reasoning={"summary": "auto"} if summary else None)


async def test_a_failure_ends_a_stream(http: httpx.AsyncClient, frontend: Scripted) -> None:
    frontend.failure = Unavailable("gone", retry_after_s=1.0)
    events = events_of((await http.post(PATH, json={"input": "ab", "stream": True})).text)
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert failed["error"] == {"code": "server_error", "message": "gone"}
    assert failed["output"][0]["content"][0]["text"] == SAID[0]
    assert (await http.get(f"{PATH}/{failed['id']}")).status_code == 404
    whole = await http.post(PATH, json={"input": "ab"})
    assert whole.status_code == 503
    assert msgspec.json.decode(whole.content, type=answers.ErrorAnswer).error.message == "gone"
    frontend.failure, frontend.refusal = None, Overloaded("busy", retry_after_s=2.0)
    assert (await http.post(PATH, json=BACKGROUND)).status_code == 429


# What is stored.


async def test_a_response_is_continued(client: openai.AsyncOpenAI, frontend: Scripted) -> None:
    ask = client.responses.create
    first = await ask(model="", input="ab", instructions="Be brief.")
    second = await ask(model="", input="cd", previous_response_id=first.id)
    third = await ask(model="", input="ef", previous_response_id=second.id, instructions="Now.")
    assert second.previous_response_id == first.id
    prompt = frontend.seen[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == (
        Message("system", "Now."),
        Message("user", "ab"),
        Message("assistant", first.output_text),
        Message("user", "cd"),
        Message("assistant", second.output_text),
        Message("user", "ef"),
    )
    listed = await client.responses.input_items.list(third.id)
    assert [item.to_dict()["content"] for item in listed.data] == [
        [{"type": "input_text", "text": "ef"}]
    ]
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as gone:
        await ask(model="", input="x", previous_response_id=third.id)
    assert gone.value.param == "previous_response_id" and first.id in gone.value.message


async def test_an_item_can_be_named(client: openai.AsyncOpenAI, frontend: Scripted) -> None:
    first = await client.responses.create(model="", input="ab")
    (asked,) = (await client.responses.input_items.list(first.id)).data
    references: Any = [{"type": "item_reference", "id": asked.id}, {"id": first.output[0].id}]
    references.append({"role": "user", "content": "cd"})
    await client.responses.create(model="", input=references)
    prompt = frontend.seen[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    texts = [message.content for message in prompt.messages]
    assert texts == ["ab", first.output_text, "cd"]
    for wrong in ("msg_1", f"{first.output[0].id}9", "none", ""):
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.create(model="", input=[{"type": "item_reference", "id": wrong}])
        assert unknown.value.param == "input[0].id"


async def test_input_tokens_are_counted(client: openai.AsyncOpenAI, frontend: Scripted) -> None:
    first = await client.responses.create(model="", input="ab")
    counted = await client.responses.input_tokens.count(
        model="", input="cd", previous_response_id=first.id, tools=[WEATHER]
    )
    assert counted.object == "response.input_tokens"
    prompt = frontend.seen[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [message.content for message in prompt.messages] == ["ab", first.output_text, "cd"]
    assert [tool.name for tool in prompt.tools] == ["weather"]
    assert counted.input_tokens == len(prompt_ids(frontend.seen[-1]))
    for wrong, field in (({"input": []}, "input"), ({"tools": [{"type": "mcp"}]}, "tools[0].type")):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.input_tokens.count(model="", **({"input": "ab"} | wrong))
        assert refused.value.param == field
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_tokens.count(
            model="", input="a", previous_response_id="resp_0"
        )


async def test_compaction_is_refused_in_words(http: httpx.AsyncClient) -> None:
    refused = await http.post(f"{PATH}/compact", json={"model": "", "input": "ab"})
    error = msgspec.json.decode(refused.content, type=answers.ErrorAnswer).error
    assert refused.status_code == 400 and "/responses/compact is not supported" in error.message


class Counting(MemoryStore):
    """Counts what is read."""

    num_read = 0

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        self.num_read += 1
        return await super().get(tenant, response_id)


async def test_a_response_is_read_once_however_often_its_items_are_named(
    frontend: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Counting()
    monkeypatch.setattr(response_routes, "MAX_HISTORY_BYTES", 6000)
    async with served(frontend, store) as http:
        first = (await http.post(PATH, json={"input": "ab"})).json()
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        answer = await http.post(PATH, json={"input": [reference] * 50})
        assert answer.status_code == 200 and store.num_read == 1
        # As many responses as the bytes of their items allow.
        large = "x" * 2000
        named = []
        for _ in range(3):
            asked = {"input": large, "max_output_tokens": 4}
            response = (await http.post(PATH, json=asked)).json()
            named.append({"type": "item_reference", "id": f"msg_{response['id'][5:]}_in0"})
        refused = await http.post(PATH, json={"input": named})
        assert refused.json()["error"]["param"] == "input[2].id"


async def test_tools_of_earlier_turns_are_no_part_of_a_conversation(
    frontend: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent's tools are in each of its responses: they may be many, and the turns, too."""
    monkeypatch.setattr(response_routes, "MAX_HISTORY_BYTES", 6000)
    tool = WEATHER | {"description": "x" * 1000}
    async with served(frontend, MemoryStore()) as http:
        previous = None
        for _ in range(12):
            asked: Any = {"input": "ab", "tools": [tool], "previous_response_id": previous}
            asked["max_output_tokens"] = 4
            answer = await http.post(PATH, json=asked)
            assert answer.status_code == 200, answer.text
            previous = answer.json()["id"]


class Broken(MemoryStore):
    """Stores nothing."""

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        raise Unavailable("the disk is full")


async def test_an_answer_that_cannot_be_stored_is_given_all_the_same(frontend: Scripted) -> None:
    store = Broken()
    async with served(frontend, store) as http:
        whole = await http.post(PATH, json={"input": "ab"})
        assert whole.json()["status"] == "completed"
        streamed = await http.post(PATH, json={"input": "ab", "stream": True})
        assert joined(events_of(streamed.text))["status"] == "completed"
        assert store.dropped == {Dropped.FAILED: 2}
        # Nobody would find it.
        assert (await http.post(PATH, json=BACKGROUND)).status_code == 503


async def test_what_is_not_stored_is_not_found(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(model="", input="ab", store=False)
    assert response.store is False  # type: ignore[attr-defined]
    for ask in (
        client.responses.retrieve,
        client.responses.cancel,
        client.responses.delete,
        client.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError) as unknown:
            await ask(response.id)
        assert unknown.value.param == "response_id"


async def test_input_is_listed_in_pages(http: httpx.AsyncClient) -> None:
    items: list[Any] = [{"role": "user", "content": str(number)} for number in range(5)]
    items[1] = thought("Hm.")
    response = (await http.post(PATH, json={"input": items})).json()
    where = f"{PATH}/{response['id']}/input_items"

    async def page(**query: Any) -> list[str]:
        answer = await http.get(where, params=query)
        assert answer.status_code == 200, answer.text
        listed = msgspec.json.decode(answer.content, type=answers.ResponseInputItems)
        ids = [item["id"] for item in listed.data]
        assert (listed.first_id, listed.last_id) == ((ids[0], ids[-1]) if ids else (None, None))
        assert listed.has_more == (len(ids) == query.get("limit"))
        return ids

    every = await page(order="asc")
    assert len(every) == 5 and every[1] == "rs_1"
    assert await page() == every[::-1]
    assert await page(order="asc", limit=2, after=every[1]) == every[2:4]
    assert await page(after=every[1]) == every[:1]
    assert await page(after=every[0]) == []
    for query in (
        {"limit": 0},
        {"limit": 101},
        {"limit": "x"},
        {"limit": "9" * 5000},
        {"order": "up"},
        {"after": "x"},
    ):
        refused = await http.get(where, params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(query)))


@asynccontextmanager
async def served(frontend: Scripted, store: ResponseStore) -> AsyncIterator[httpx.AsyncClient]:
    frontend.keep(kept_s=ALWAYS_S)
    app = http_app(frontend, CollectorRegistry(), store=store)
    server = await serve_http(app, "127.0.0.1:0")
    base = f"http://{server.address}"
    async with httpx.AsyncClient(base_url=base, timeout=120, trust_env=False) as client:
        yield client
    await server.close()


@pytest.fixture
async def two_tenants(frontend: Scripted) -> AsyncIterator[list[httpx.AsyncClient]]:
    frontend.keep(kept_s=ALWAYS_S)
    access = HttpAccess(Named())
    server = await serve_http(http_app(frontend, CollectorRegistry(), access), "127.0.0.1:0")
    clients = [
        httpx.AsyncClient(
            base_url=f"http://{server.address}",
            headers={"authorization": f"Bearer {name}"},
            timeout=120,
            trust_env=False,
        )
        for name in ("a", "b")
    ]
    yield clients
    for client in clients:
        await client.aclose()
    await server.close()


async def test_another_tenants_response_is_not_there(
    two_tenants: list[httpx.AsyncClient],
) -> None:
    own, other = two_tenants
    for body in ({"input": "ab"}, BACKGROUND):
        response = (await own.post(PATH, json=body)).json()
        where = f"{PATH}/{response['id']}"
        asked = {"input": [{"type": "item_reference", "id": f"msg_{response['id'][5:]}_in0"}]}
        for answer in (
            await other.get(where),
            await other.get(where, params={"stream": "true"}),
            await other.get(f"{where}/input_items"),
            await other.post(f"{where}/cancel"),
            await other.delete(where),
            await other.post(PATH, json={"input": "x", "previous_response_id": response["id"]}),
            await other.post(PATH, json=asked),
            await other.post(f"{PATH}/input_tokens", json=asked),
        ):
            assert answer.status_code == 404, answer.text
            msgspec.json.decode(answer.content, type=answers.ErrorAnswer)
        assert (await own.get(where)).status_code == 200
        assert (await own.post(PATH, json=asked)).status_code == 200


# In the background.


class _Ending:
    """Events that can be called off."""

    def __init__(self, events: Any) -> None:
        self._events = events
        self._off = asyncio.Event()
        self.cached_tokens = self.tried_tokens = 0

    def __aiter__(self) -> _Ending:
        return self

    async def __anext__(self) -> Event:
        one = asyncio.ensure_future(anext(self._events))
        off = asyncio.ensure_future(self._off.wait())
        await asyncio.wait((one, off), return_when=asyncio.FIRST_COMPLETED)
        off.cancel()
        if one.done():
            event: Event = one.result()
            return event
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        raise Cancelled("The request was cancelled.")

    def call_off(self) -> None:
        self._off.set()

    async def aclose(self) -> None:
        await self._events.aclose()


@dataclass
class Cancellable(Scripted):
    async def open(self, request: Request, holding: Holding | None = None) -> Any:
        return _Ending(await Scripted.open(self, request, holding))


@pytest.fixture
def frontend() -> Scripted:
    frontend = Cancellable()
    return frontend


@pytest.fixture
def keep(frontend: Scripted) -> None:
    frontend.keep(kept_s=ALWAYS_S)


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    while True:
        response = await client.responses.retrieve(response_id)
        if response.status != "in_progress":
            return response


async def test_a_response_in_the_background(
    client: openai.AsyncOpenAI, frontend: Scripted, keep: None
) -> None:
    frontend.hold = True
    begun = await client.responses.create(model="", input="ab", background=True)
    assert begun.status == "in_progress" and begun.output == [] and begun.background
    shown = await client.responses.retrieve(begun.id)
    assert shown == begun
    with pytest.raises(openai.BadRequestError, match="runs"):
        await client.responses.create(model="", input="x", previous_response_id=begun.id)
    listed = await client.responses.input_items.list(begun.id)
    assert len(listed.data) == 1
    frontend.release.set()
    response = await ended(client, begun.id)
    assert (response.status, response.output_text) == ("completed", SAID)
    assert response.usage.output_tokens == len(SAID.encode())
    assert (await client.responses.cancel(begun.id)).status == "completed"


async def test_a_background_stream_is_read_again_from_any_event(
    http: httpx.AsyncClient, frontend: Scripted, keep: None
) -> None:
    frontend.hold = True
    received: list[str] = []
    async with http.stream("POST", PATH, json=BACKGROUND | {"stream": True}) as streamed:
        async for line in streamed.aiter_lines():
            received.append(line)
            if "output_text.delta" in line:
                break
    response_id = streamed.headers["x-request-id"]
    where = f"{PATH}/resp_{response_id}"
    frontend.release.set()
    whole = events_of((await http.get(where, params={"stream": "true"})).text)
    joined(whole)
    assert len(frontend.seen) == 1
    for after in (0, 5, len(whole) - 2, len(whole) - 1, len(whole) + 5):
        query = {"stream": "true", "starting_after": str(after)}
        rest = events_of((await http.get(where, params=query)).text)
        assert rest == whole[after + 1 :]
    for wrong in ("x", "1.5", "", "9" * 40):
        query = {"stream": "true", "starting_after": wrong}
        refused = await http.get(where, params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")


async def test_the_sdk_goes_on_with_a_stream(
    client: openai.AsyncOpenAI, frontend: Scripted, keep: None
) -> None:
    begun = await client.responses.create(model="", input="ab", background=True)
    async with client.responses.stream(response_id=begun.id, starting_after=4) as stream:
        numbers = [event.sequence_number async for event in stream]
        final = await stream.get_final_response()
    assert numbers[0] == 5 and final.output_text == SAID


async def test_events_that_are_not_kept_are_refused(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(model="", input="ab")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.retrieve(response.id, stream=True)
    assert refused.value.param == "stream"


async def test_a_response_is_cancelled(
    client: openai.AsyncOpenAI, frontend: Scripted, keep: None
) -> None:
    frontend.hold = True
    begun = await client.responses.create(model="", input="ab", background=True)
    cancelled = await client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled" and cancelled.id == begun.id
    assert await client.responses.cancel(begun.id) == cancelled
    assert await client.responses.retrieve(begun.id) == cancelled
    assert frontend.open_streams == 0


async def test_a_deleted_response_ends(
    client: openai.AsyncOpenAI, frontend: Scripted, keep: None
) -> None:
    frontend.hold = True
    begun = await client.responses.create(model="", input="ab", background=True)
    await client.responses.delete(begun.id)
    await asyncio.wait_for(frontend.closed.wait(), 60)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(begun.id)


async def test_a_failure_in_the_background(
    client: openai.AsyncOpenAI, frontend: Scripted, keep: None
) -> None:
    frontend.failure = Unavailable("gone")
    begun = await client.responses.create(model="", input="ab", background=True)
    response = await ended(client, begun.id)
    assert response.status == "failed" and response.error.message == "gone"


async def test_a_key_begins_one_response(
    http: httpx.AsyncClient, frontend: Scripted, keep: None
) -> None:
    frontend.hold = True
    headers = {"idempotency-key": "k"}
    first, second = await asyncio.gather(
        *(http.post(PATH, json=BACKGROUND, headers=headers) for _ in range(2))
    )
    assert first.json()["id"] == second.json()["id"] and len(frontend.seen) == 1
    other = await http.post(PATH, json=BACKGROUND | {"input": "x"}, headers=headers)
    assert other.status_code == 422
    frontend.release.set()
    await frontend.closed.wait()


# What clients make of it.


class Person(BaseModel):
    name: str


async def test_the_sdk_streams(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="", input="ab") as stream:
        texts = [e.delta async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(texts) == final.output_text == SAID


async def test_the_sdk_asks_for_a_model_of_its_own(
    client: openai.AsyncOpenAI, frontend: Scripted
) -> None:
    """The scripted answer follows no schema: the SDK finds that out itself."""
    with pytest.raises(ValueError, match="JSON"):
        await client.responses.parse(model="", input="ab", text_format=Person)
    grammar = frontend.seen[-1].grammar
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(grammar.text)["properties"]["name"]["type"] == "string"
