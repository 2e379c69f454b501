"""Whatever a grammar lets pass is read as calls whose arguments follow their schema.

A random choice among all tokens that the grammar allows stands for the model.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from batonlm.core.request.answers import grammar_for
from batonlm.core.request.formats.families import TOOL_FORMATS
from batonlm.core.request.request import Tool, ToolChoice, ToolUse
from tests.core.answer_reading import read
from tests.core.marker_tokens import marker_ids, tokens


def of(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


NOTHING = {"type": "null"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "plain": of(
        ["s", "n"],
        s={"type": "string"},
        n={"type": "integer"},
        x={"type": "number"},
        b={"type": "boolean"},
    ),
    "chosen": of(
        ["unit", "level", "odd"],
        unit={"enum": ["°C", "a b", "5", "</parameter>", "null"]},
        level={"type": "integer", "enum": [1, 2]},
        odd={"enum": ["true", "yes", 7, None, False]},
        same={"const": "x\ny"},
    ),
    "open": of(
        ["maybe", "either", "any", "list_or_text"],
        maybe={"anyOf": [{"type": "string"}, NOTHING]},
        either={"type": ["string", "integer", "boolean"]},
        any={},
        list_or_text={
            "oneOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]
        },
    ),
    "deep": {
        **of(["who"], who={"$ref": "#/$defs/person"}, tags={"type": "array", "maxItems": 3}),
        "$defs": {
            "person": of(
                ["name"],
                name={"type": "string"},
                friends={"type": "array", "items": {"$ref": "#/$defs/person"}, "minItems": 1},
            )
        },
    },
    "bound": of(
        ["code", "few"],
        code={"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"},
        few={"type": "string", "minLength": 2, "maxLength": 5},
        part={"type": "string", "pattern": "a/b|c"},
        more={"type": "integer", "minimum": 3, "maximum": 99},
        free={"type": "object"},
    ),
    "empty": {},
}
TOOLS = [Tool(name, parameters=json.dumps(schema)) for name, schema in SCHEMAS.items()]
CLOSERS = (
    *('"', "}", "]", ")", "\n", '"}', "null", '<|"|>', "<escape>", "</arg_value>"),
    *("\n</parameter>\n", "</parameter>\n", "</function>", "</tool_call>", "</invoke>\n"),
)
MOST_TOKENS = 400


def answer_of(grammar: str, with_markers: bool, draw: random.Random) -> str | None:
    """One answer that a grammar allows; None for one that does not come to its end."""
    tokenizer, vocabulary = tokens(with_markers)
    closers = [tokenizer.encode(each, add_special_tokens=False).ids for each in CLOSERS]
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    ids: list[int] = []
    while len(ids) < MOST_TOKENS:
        if matcher.is_accepting() and (matcher.is_stopped() or draw.random() < 0.5):
            return str(tokenizer.decode(ids, skip_special_tokens=False))
        if draw.random() < 0.4:
            closer = draw.choice(closers)
            if matcher.validate_tokens(closer) == len(closer):
                assert matcher.consume_tokens(closer)
                ids += closer
                continue
        mask = matcher.compute_bitmask()
        eos = vocabulary.eos_token
        allowed = [
            token
            for token in range(tokenizer.get_vocab_size())
            if mask[token // 8] >> token % 8 & 1 and token != eos
        ]
        if not allowed:
            return None
        token = draw.choice(allowed)
        assert matcher.consume_token(token)
        ids.append(token)
    return None


def check(form: str, with_markers: bool, tools: list[Tool], seed: int) -> int:
    grammar = grammar_for(
        tools,
        ToolChoice(ToolUse.REQUIRED),
        TOOL_FORMATS[form],
        None,
        left_open=False,
        tokens=marker_ids(with_markers),
    )
    assert grammar is not None
    text = answer_of(grammar.text, with_markers, random.Random(seed))
    if text is None:
        return 0
    found = read([text], TOOL_FORMATS[form].read, tools={t.name: SCHEMAS[t.name] for t in tools})
    assert found.complete and found.calls and not found.content.strip(), text
    for name, arguments in found.calls:
        try:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        except jsonschema.ValidationError as error:
            raise AssertionError(f"{text!r} is read as {arguments!r}") from error
    return 1


@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_what_a_grammar_allows_is_valid(form: str) -> None:
    ended = 0
    for number, tool in enumerate(TOOLS):
        for seed in range(2):
            ended += check(form, bool(seed % 2), [tool], 31 * number + seed)
    assert ended > len(TOOLS) // 2


@pytest.mark.deep
@pytest.mark.parametrize("with_markers", [False, True], ids=["letters", "tokens"])
@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_much_that_a_grammar_allows_is_valid(form: str, with_markers: bool) -> None:
    for tool in TOOLS:
        ended = sum(check(form, with_markers, [tool], seed) for seed in range(9))
        assert ended, tool.name
    assert sum(check(form, with_markers, TOOLS, seed) for seed in range(18)) > 1
