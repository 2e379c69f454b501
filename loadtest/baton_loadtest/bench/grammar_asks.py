"""What `baton bench grammar` asks for, and a tokenizer of many tokens; measures nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from baton.core.request.request import Grammar, GrammarKind

_TEXT = {"type": "string", "maxLength": 24}
_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": _TEXT, "maxItems": 4},
        "mail": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.(com|org)$"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                "right": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "left", "right"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_WIDE = {
    "type": "object",
    "properties": {f"field_{i}": {"anyOf": [_TEXT, {"type": "integer"}]} for i in range(100)},
    "required": [f"field_{i}" for i in range(0, 100, 2)],
}


def asks() -> dict[str, Grammar]:
    """By a name for each kind."""
    return {
        "any JSON object": _schema({"type": "object"}),
        "object of 4 fields": _schema(_PERSON),
        "list of objects": _schema({"type": "array", "items": _PERSON, "maxItems": 8}),
        "tree that names itself": _schema(_TREE),
        "100 optional fields": _schema(_WIDE),
        "one of 500 texts": _schema({"enum": [f"option number {i}" for i in range(500)]}),
        "regular expression": Grammar(GrammarKind.REGEX, r"(\w+ ){3,12}\w+[.!?]"),
        "arithmetic in Lark": Grammar(
            GrammarKind.LARK,
            'start: sum\nsum: (sum ("+"|"-"))? product\nproduct: (product ("*"|"/"))? atom\n'
            'atom: /[0-9]{1,6}/ | "(" sum ")"',
        ),
    }


def write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level tokenizer of `size` tokens: bytes, numbers, blanks, words of made-up syllables,
    with and without a space in front. Its text is no language's, but as long as one's."""
    draw = random.Random(0)
    letters = _byte_letters()
    tokens = dict.fromkeys(["<pad>", "<s>", "</s>", *letters])
    tokens.update(dict.fromkeys(map(str, range(1000))))
    tokens.update(dict.fromkeys(letters[32] * count for count in range(2, 17)))
    tokens.update(dict.fromkeys(['":', '",', '"}', "[]", "{}", "},", letters[32] + '"']))
    while len(tokens) < size:
        parts = draw.choices("aeiou", k=draw.randint(1, 4))
        word = "".join(draw.choice("bcdfghklmnprstvwz") + part for part in parts)
        word = draw.choice((word, word.capitalize(), word + draw.choice("nrst")))
        tokens.update(dict.fromkeys((word, letters[32] + word)))
    vocab = {token: number for number, token in enumerate(list(tokens)[:size])}
    special = [
        {"id": number, "content": token, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for number, token in enumerate(["<pad>", "<s>", "</s>"])
    ]
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    whole = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {**bytes_only, "use_regex": True},
        "decoder": bytes_only,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole))


def _schema(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _byte_letters() -> list[str]:
    """A printable letter for each byte, as byte-level tokenizers write them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]
