"""The form that an HTTP body asks an answer to have, in OpenAI's words and in vLLM's."""

from __future__ import annotations

import msgspec

from baton.core.errors import InvalidArgument
from baton.router.api.http.schema import GenerationBody, ResponseFormat, StructuredOutputs
from baton.router.api.structured import (
    Asked,
    any_object,
    choice,
    either_grammar,
    json_schema,
    regex,
)

TYPES = ("text", "json_object", "json_schema")


def asked_form(body: GenerationBody) -> Asked | None:
    """None when the body asks for none. Raises InvalidArgument naming the field."""
    by_openai = body.response_format and _of_openai(body.response_format)
    by_vllm = body.structured_outputs and _of_vllm(body.structured_outputs)
    if by_openai and by_vllm:
        name = "structured_outputs"
        raise InvalidArgument(f"{name} cannot be combined with response_format", field=name)
    return by_openai or by_vllm or None


def _of_openai(form: ResponseFormat) -> Asked | None:
    name = "response_format"
    match form.type:
        case "text":
            return None
        case "json_object":
            return any_object(name)
        case "json_schema":
            field = f"{name}.json_schema.schema"
            asked = form.json_schema and _schema(form.json_schema.schema, field)
            if not asked:
                raise InvalidArgument(f"{field} is required", field=field)
            return asked
        case _:
            raise InvalidArgument(
                f"{name}.type must be one of {', '.join(TYPES)}", field=f"{name}.type"
            )


def _of_vllm(form: StructuredOutputs) -> Asked | None:
    name = "structured_outputs"
    asked: list[Asked] = []
    if schema := _schema(form.json, f"{name}.json"):
        asked.append(schema)
    if form.regex is not None:
        asked.append(regex(form.regex, f"{name}.regex"))
    if form.choice is not None:
        asked.append(choice(form.choice, f"{name}.choice"))
    if form.grammar is not None:
        asked.append(either_grammar(form.grammar, f"{name}.grammar"))
    if form.json_object:
        asked.append(any_object(f"{name}.json_object"))
    if len(asked) > 1:
        raise InvalidArgument(f"{name} must name one form only", field=name)
    return asked[0] if asked else None


def _schema(given: msgspec.Raw, field: str) -> Asked | None:
    """An object, or a text that holds one, as some clients send it. None for null."""
    text = bytes(given).decode()
    if text == "null":
        return None
    try:
        value = msgspec.json.decode(text)
        if isinstance(value, str):
            text, value = value, msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{field} must be an object", field=field)
    return json_schema(text, field)
