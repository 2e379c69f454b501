"""Parameters of other servers: each means here what it means there, or is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import ChatPrompt, Grammar, GrammarKind, Request
from batonlm.router.api.http.parse import GenerationCall, parse_chat, parse_completion
from batonlm.router.api.http.schema import (
    INSTEAD,
    REFUSED,
    SPELLINGS,
    TEMPLATE_VARIABLES,
    ChatBody,
    CompletionBody,
)

SCHEMA = '{"type":"object"}'


def chat(**parameters: Any) -> GenerationCall:
    messages = [{"role": "user", "content": "hello"}]
    return parse_chat(json.dumps({"messages": messages, **parameters}).encode())


def completion(**parameters: Any) -> GenerationCall:
    return parse_completion(json.dumps({"prompt": "hello", **parameters}).encode())


def both(**parameters: Any) -> list[Request]:
    calls = chat(**parameters), completion(**parameters)
    assert not any(call.ignored for call in calls)
    return [request for call in calls for request in call.requests]


def refused(call: Any, **parameters: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as error:
        call(**parameters)
    return error.value


@pytest.mark.parametrize(
    ("name", "value", "attribute", "wanted"),
    [
        ("max_new_tokens", 7, "max_tokens", 7),
        ("n_predict", 7, "max_tokens", 7),
        ("n_predict", -1, "max_tokens", None),
        ("min_new_tokens", 3, "min_tokens", 3),
        ("no_stop_trim", True, "include_stop_string", True),
    ],
)
def test_other_names(name: str, value: object, attribute: str, wanted: object) -> None:
    assert [getattr(request, attribute) for request in both(**{name: value})] == [wanted] * 2


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_unlike_value_under_the_other_name_is_an_error(spelling: str) -> None:
    ours = {"include_stop_string": "include_stop_str_in_output"}.get(
        SPELLINGS[spelling], SPELLINGS[spelling]
    )
    value, other = (True, False) if spelling == "no_stop_trim" else (5, 6)
    error = refused(chat, **{spelling: value, ours: other})
    assert error.field == spelling and ours in error.message
    assert chat(**{spelling: value, ours: value}).requests


def test_three_names_of_one_field() -> None:
    error = refused(chat, max_new_tokens=5, n_predict=6)
    assert error.field == "n_predict" and "max_new_tokens" in error.message


@pytest.mark.parametrize(
    ("name", "value", "grammar"),
    [
        ("regex", "a+", Grammar(GrammarKind.REGEX, "a+")),
        ("guided_regex", "a+", Grammar(GrammarKind.REGEX, "a+")),
        ("ebnf", 'root ::= "a"', Grammar(GrammarKind.GBNF, 'root ::= "a"')),
        ("grammar", 'root ::= "a"', Grammar(GrammarKind.GBNF, 'root ::= "a"')),
        ("guided_grammar", 'start: "a"', Grammar(GrammarKind.LARK, 'start: "a"')),
        ("json_schema", json.loads(SCHEMA), Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)),
        ("json_schema", SCHEMA, Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)),
        ("guided_json", SCHEMA, Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)),
        ("guided_choice", ["a", "b"], Grammar(GrammarKind.REGEX, "a|b")),
        ("grammar", "", None),
    ],
)
def test_forms(name: str, value: object, grammar: Grammar | None) -> None:
    found = [request.grammar for request in both(**{name: value})]
    if grammar and grammar.kind is GrammarKind.JSON_SCHEMA:
        assert all(each and json.loads(each.text) == json.loads(grammar.text) for each in found)
    else:
        assert found == [grammar] * 2


def test_two_forms_are_an_error() -> None:
    error = refused(completion, regex="a", response_format={"type": "json_object"})
    assert error.field == "regex" and "response_format" in error.message
    error = refused(chat, ebnf='root ::= "a"', grammar='root ::= "a"')
    assert error.field == "grammar" and "ebnf" in error.message


@pytest.mark.parametrize(
    ("name", "value", "variables"),
    [
        ("reasoning_effort", "low", {"reasoning_effort": "low"}),
        ("reasoning_effort", "none", {"enable_thinking": False}),
        ("enable_thinking", False, {"enable_thinking": False}),
        ("thinking_budget", 64, {"thinking_budget": 64}),
        ("thinking_token_budget", 64, {"thinking_budget": 64}),
    ],
)
def test_variables_of_the_template(name: str, value: object, variables: dict[str, object]) -> None:
    prompt = chat(**{name: value, "chat_template_kwargs": {"mood": "x"}}).requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert json.loads(prompt.template_kwargs) == {"mood": "x", **variables}
    assert prompt.needed_variables == tuple(variables)
    assert refused(completion, **{name: value}).field == name


def test_variables_that_differ_are_an_error() -> None:
    error = refused(chat, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    assert error.field == "reasoning_effort" and "chat_template_kwargs" in error.message
    error = refused(chat, thinking_budget=5, thinking_token_budget=6)
    assert error.field == "thinking_token_budget" and "thinking_budget" in error.message


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_answer_is_refused(name: str) -> None:
    applied = {
        chat: set(ChatBody.__struct_encode_fields__),
        completion: set(CompletionBody.__struct_encode_fields__),
    }
    calls = [call for call, fields in applied.items() if name not in fields]
    assert calls
    for call in calls:
        error = refused(call, **{name: {"neither": "this", "nor": "that"}})
        assert error.field == name
        assert error.message.startswith(f"{name} is not supported here")
        assert INSTEAD.get(name, "") in error.message
        for harmless in (None, *REFUSED[name]):
            assert call(**{name: harmless}).requests


def test_what_is_served_instead_is_said_of_what_is_refused() -> None:
    assert set(INSTEAD) <= set(REFUSED)
    assert set(TEMPLATE_VARIABLES) <= set(REFUSED) & set(ChatBody.__struct_encode_fields__)


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_an_open_last_message_is_asked_for_by_one_name(name: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: True}]
    error = refused(chat, messages=messages)
    assert error.field == f"messages[1].{name}" and "continue_final_message" in error.message


def test_what_changes_nothing_is_named_as_ignored() -> None:
    call = chat(user="u", metadata={"a": "b"}, store=False, cache_prompt=True, keep_alive="5m")
    assert call.ignored == ("cache_prompt", "keep_alive", "metadata", "store", "user")
