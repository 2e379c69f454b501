"""What a client may hand its chat template besides the messages."""

from __future__ import annotations

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import ChatPrompt, Message, Request
from batonlm.core.request.validation import (
    FIELD,
    MAX_BYTES,
    RESERVED,
    parse_template_kwargs,
    validate,
)


def test_an_object_of_json_values_passes() -> None:
    assert parse_template_kwargs("") == {}
    given = '{"enable_thinking": false, "größe": [1, 2.5, null, {"a": "\\u00e9"}]}'
    assert parse_template_kwargs(given) == {
        "enable_thinking": False,
        "größe": [1, 2.5, None, {"a": "é"}],
    }


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "1",
        "{",
        "nonsense",
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a b": 1}',
        '{"_a": 1}',
        '{"": 1}',
        '{"a": "\\ud800"}',
        '{"\\udc00": 1}',
        '{"a": ' + "1" * 5000 + "}",
        '{"a": ' + "[" * 8000 + "]" * 8000 + "}",
        '{"a": "' + "x" * MAX_BYTES + '"}',
        '{"a": "' + "é" * (MAX_BYTES // 2) + '"}',
        *(f'{{"{name}": 1}}' for name in sorted(RESERVED)),
    ],
)
def test_anything_else_names_the_field(text: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse_template_kwargs(text)
    assert raised.value.field == FIELD
    chat = ChatPrompt((Message("user", "hi"),), template_kwargs=text)
    with pytest.raises(InvalidArgument) as raised:
        validate(Request(chat))
    assert raised.value.field == FIELD
