"""The ways in which families write the name and the arguments of one call.

Each way has a reader, which reports the call with its arguments as JSON, and a grammar of the same
text. White space in a text of these tables is what the family's chat template writes, and what the
grammar asks for; a reader accepts any other amount of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from batonlm.core.request.formats.lark import Lark, schema_of
from batonlm.core.request.formats.reader import (
    AnswerParts,
    AnswerText,
    Malformed,
    Reading,
    Schema,
)
from batonlm.core.request.formats.schema import (
    Parameter,
    alternatives,
    cannot_write,
    definitions,
    kinds_of,
    parameters_of,
    refuse_others,
    resolved,
    typed,
)
from batonlm.core.request.formats.values import (
    BARE_KEY,
    MAX_KEY,
    QuotedValues,
    escaped,
    json_value,
    python_value,
    string_value,
    whole_value,
)
from batonlm.core.request.request import Tool

MAX_NAME = 64
"""Most characters of the name of a tool."""

MAX_TEXT_VALUE = 1 << 16
"""Most characters of a text value that are buffered to find out its type. A longer one is a
string."""

_NAME = re.compile(r"[\w.-]+", re.ASCII)
_INDEX = re.compile(r"[0-9]+")
_MAX_INDEX = 6


class CallBody(Protocol):
    """The name and the arguments of one call."""

    @property
    def opening(self) -> str:
        """The first character, where it is always the same; else empty."""

    def read(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        """Reads a call. Raises Malformed."""

    def write(self, lark: Lark, tool: Tool, before: str) -> str:
        """Returns a grammar expression for calls of a tool after the text `before`. Raises
        InvalidArgument (`tools`)."""


@dataclass(frozen=True, slots=True)
class CallObject:
    """{"name": …, "arguments": {…}}, read in any order."""

    key: str = "arguments"
    """Of the arguments, as written; the other usual key is read, too."""
    opening: str = "{"

    _KEYS = ("arguments", "parameters")
    _IGNORED = ("type", "id")

    def read(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        name, early, passed_on = "", "", False
        yield from text.expect("{")
        while True:
            yield from text.skip()
            key = yield from string_value(text)
            yield from text.skip()
            yield from text.expect(":")
            yield from text.skip()
            if passed_on:
                yield from json_value(text, lambda _: None)
            elif key == "name" and not name:
                name = yield from string_value(text)
                if early:
                    answer.open_call(name)
                    answer.arguments(early)
                    passed_on = True
            elif key in self._KEYS and not early:
                if (yield from text.peek()) != "{":
                    raise Malformed
                if name:
                    answer.open_call(name)
                    yield from json_value(text, answer.arguments)
                    passed_on = True
                else:
                    early = yield from whole_value(text)
            elif key in self._IGNORED:
                yield from string_value(text)
            else:
                raise Malformed
            yield from text.skip()
            if (yield from text.follows("}")):
                break
            yield from text.expect(",")
        if not passed_on:
            answer.open_call(name)
            answer.arguments("{}")
        answer.close_call()

    def write(self, lark: Lark, tool: Tool, before: str) -> str:
        name, key = f'"{tool.name}"', f'"{self.key}"'
        if before:
            head = lark.text(f'{before}{{"name": {name}, {key}: ')
        else:
            # It begins as other objects do, such as one of a schema that the answer may follow
            # instead. So its literals are the tokens of JSON, and a space may be missing: what is
            # white space to the schema is that to the whole grammar.
            colon, comma = '":" " "?', '"," " "?'
            words = (
                '"{"',
                lark.text('"name"'),
                colon,
                lark.text(name),
                comma,
                lark.text(key),
                colon,
            )
            head = " ".join(words)
        return f'{head} {lark.arguments(tool)} "}}"'


@dataclass(frozen=True, slots=True)
class NamedObject:
    """The name, and then the arguments as a JSON object."""

    before: str = ""
    """The text before the name."""
    after: str = ""
    """The text between name and arguments."""
    end: str = ""
    """The text after the arguments."""
    call_id: str = ""
    """A text after the name before an id that is read and ignored."""
    indexed: bool = False
    """Whether the name has `:` and an index behind it. `before`, name and index are then the call's
    id, which the family's template shows to the model again."""
    opening: str = ""

    def read(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        written = self.before if (yield from text.follows(self.before)) else ""
        if written != self.before and not self.indexed:
            raise Malformed
        name = yield from text.word(_NAME, MAX_NAME)
        if self.indexed:
            yield from text.expect(":")
            index = yield from text.word(_INDEX, _MAX_INDEX)
            written = f"{self.before}{name}:{index}"
        if self.call_id and (yield from text.follows(self.call_id)):
            yield from text.word(_NAME, MAX_NAME)
        for part in self.after.split():
            yield from text.skip()
            yield from text.follows(part)
        yield from text.skip()
        if (yield from text.peek()) != "{":
            raise Malformed
        answer.open_call(name, written if self.indexed else "")
        yield from json_value(text, answer.arguments)
        answer.close_call()
        if self.end:
            yield from text.skip()
            yield from text.follows(self.end.strip())

    def write(self, lark: Lark, tool: Tool, before: str) -> str:
        head = lark.text(before + self.before + tool.name)
        index = f' ":" /[0-9]{{1,{_MAX_INDEX}}}/' if self.indexed else ""
        end = f" {lark.text(self.end)}" if self.end else ""
        return f"{head}{index} {lark.text(self.after)} {lark.arguments(tool)}{end}"


@dataclass(frozen=True, slots=True)
class KeywordCall:
    """name(key=value, …) with Python's literals, or JSON's. Nothing is evaluated."""

    opening: str = ""

    _KEYWORD = re.compile(r"\w+")

    def read(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        name = yield from text.word(_NAME, MAX_NAME)
        yield from text.expect("(")
        answer.open_call(name)
        answer.arguments("{")
        separator = ""
        yield from text.skip()
        while (yield from text.peek()) != ")":
            keyword = yield from text.word(self._KEYWORD, MAX_NAME)
            yield from text.skip()
            if not keyword.isidentifier() or not (yield from text.follows("=")):
                raise Malformed(keyword)
            yield from text.skip()
            answer.arguments(f'{separator}"{escaped(keyword)}": ')
            separator = ", "
            yield from python_value(text, answer.arguments)
            yield from text.skip()
            if not (yield from text.follows(",")):
                break
            yield from text.skip()
        yield from text.expect(")")
        answer.arguments("}")
        answer.close_call()

    def write(self, lark: Lark, tool: Tool, before: str) -> str:
        root, parameters = parameters_of(tool)
        for each in parameters:
            if not each.name.isidentifier():
                raise cannot_write("a parameter that cannot be named")
        keywords = _listed(
            lark,
            parameters,
            lambda each: f"{lark.literal(f'{each.name}=')} {_json(lark, each.schema, root)}",
            '", "',
        )
        return f'{lark.text(f"{before}{tool.name}(")} {keywords} ")"'


@dataclass(frozen=True, slots=True)
class TaggedText:
    """The name and each argument between tags. A value is the text between its tags; the tool's
    schema says of which type it is.

    A tag that ends a value counts only where another tag follows, so that a value may contain it.
    """

    name: tuple[str, str]
    """The texts around the name."""
    key: tuple[str, str]
    """The texts around the name of an argument."""
    value: tuple[str, str]
    """The texts around its value. A line break in them belongs to the tags."""
    after_value: str
    """The text between two arguments, and before the end."""
    end: str
    """The text that ends the call. The reader does with any of its tags."""
    opening: str = ""

    def read(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        yield from text.expect(self.name[0])
        name = yield from text.word(_NAME, MAX_NAME)
        yield from text.expect(self.name[1].strip())
        yield from text.skip()
        if not (yield from self._goes_on(text)):
            raise Malformed
        root = answer.open_call(name)
        schema = resolved(root, root)
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        seen = set[str]()
        answer.arguments("{")
        while (yield from text.follows(self.key[0])):
            key = (yield from text.upto(self.key[1], MAX_KEY)).strip()
            begin, end = self.value
            if begin.strip():
                yield from text.skip()
                yield from text.expect(begin.strip())
            else:
                yield from text.follows(begin)
            if key in seen:
                raise Malformed
            answer.arguments(f'{", " if seen else ""}"{escaped(key)}": ')
            seen.add(key)
            of = properties.get(key, others) if isinstance(properties, dict) else others
            yield from self._value(text, answer, kinds_of(of, root), end)
            yield from text.skip()
        for tag in self._ends:
            yield from text.skip()
            yield from text.follows(tag)
        answer.arguments("}")
        answer.close_call()

    @property
    def _ends(self) -> list[str]:
        return self.end.split()

    def _goes_on(self, text: AnswerText) -> Reading[bool]:
        """Whether a tag of the call is next, or the end of the answer."""
        for tag in (self.key[0], *self._ends):
            if (yield from text.next_is(tag)):
                return True
        return (yield from text.peek()) == ""

    def _value(
        self, text: AnswerText, answer: AnswerParts, kinds: frozenset[str], end: str
    ) -> Reading[None]:
        if kinds == {"string"}:
            answer.arguments('"')
            yield from self._until(text, end, lambda part: answer.arguments(escaped(part)))
            answer.arguments('"')
            return
        if "string" not in kinds:
            text.keep()
            yield from text.skip()
            if (yield from text.peek()) in ("{", "["):
                text.forget()
                yield from python_value(text, answer.arguments)
                yield from text.skip()
                if (yield from text.follows(end.strip())) or not (yield from text.peek()):
                    return
                raise Malformed
            text.rewind()
        buffered = _Buffered(answer)
        yield from self._until(text, end, buffered.add)
        if buffered.as_string:
            answer.arguments('"')
        else:
            answer.arguments(typed(buffered.text, kinds))

    def _until(self, text: AnswerText, end: str, emit: Callable[[str], None]) -> Reading[None]:
        """Emits the text before the tag that ends a value, and consumes the tag."""
        ends = tuple(dict.fromkeys((end, end.strip())))
        while True:
            found = yield from text.until(ends, emit)
            if not found:
                raise Malformed
            text.keep()
            yield from text.skip()
            goes_on = yield from self._goes_on(text)
            text.rewind()
            if goes_on:
                return
            emit(found)

    def write(self, lark: Lark, tool: Tool, before: str) -> str:
        root, parameters = parameters_of(tool)
        tags = self.key[1]
        for each in parameters:
            if tags.strip() in each.name or each.name != each.name.strip() or not each.name:
                raise cannot_write("a parameter that cannot be named")

        def one(each: Parameter) -> str:
            head = lark.text(f"{self.key[0]}{each.name}{self.key[1]}{self.value[0]}")
            end = self.value[1] + self.after_value
            return f"{head} {_text_value(lark, each.schema, root, end, self.value[1].strip())}"

        listed = _listed(lark, parameters, one, "")
        head = lark.text(f"{before}{self.name[0]}{tool.name}{self.name[1]}")
        return f"{head} {listed} {lark.text(self.end)}"


class _Buffered:
    """Collects a value; passes on one that is too long as a string."""

    def __init__(self, answer: AnswerParts) -> None:
        self._answer = answer
        self._parts: list[str] = []
        self._size = 0
        self.as_string = False
        """Whether the value was passed on, but for the quote at its end."""

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, text: str) -> None:
        if self.as_string:
            self._answer.arguments(escaped(text))
            return
        self._parts.append(text)
        self._size += len(text)
        if self._size > MAX_TEXT_VALUE:
            self._answer.arguments('"' + escaped(self.text))
            self._parts.clear()
            self.as_string = True


@dataclass(frozen=True, slots=True)
class QuotedObject:
    """name{key:value,…} with bare keys, and strings between two of one quote."""

    before: str
    """The text before the name."""
    quote: str
    opening: str = ""

    def read(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        yield from text.expect(self.before)
        name = yield from text.word(_NAME, MAX_NAME)
        yield from text.skip()
        if (yield from text.peek()) != "{":
            raise Malformed
        answer.open_call(name)
        yield from QuotedValues(self.quote).value(text, answer.arguments)
        answer.close_call()

    def write(self, lark: Lark, tool: Tool, before: str) -> str:
        root = schema_of(tool)
        arguments = {**root, "type": "object"} if root else {"type": "object", "properties": {}}
        rules = _QuotedRules(lark, root, self.quote)
        return f"{lark.text(before + self.before + tool.name)} {rules.value(arguments)}"


def _json(lark: Lark, schema: object, root: Schema) -> str:
    of = schema if isinstance(schema, dict) else {}
    return lark.schema({**of, **definitions(root)})


def _listed(
    lark: Lark, parameters: Sequence[Parameter], write: Callable[[Parameter], str], separator: str
) -> str:
    """Matches parameters in their order, where those that are not required may be left out."""
    first, rest = '""', '""'
    for each in reversed(parameters):
        one = lark.rule(write(each))
        with_more = f"{separator} {one} {rest}".lstrip()
        if each.required:
            first, rest = f"{one} {rest}", lark.rule(with_more)
        else:
            first = lark.rule(f"{one} {rest} | {first}")
            rest = lark.rule(f"{with_more} | {rest}")
    return first


_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]{1,17})?"
_SCALARS = {
    "integer": r"-?(0|[1-9][0-9]{0,17})",
    "number": _NUMBER,
    "boolean": "true|false",
    "null": "null",
}
_LOOKS_LIKE = {
    "integer": r"[-+]?[0-9][-+0-9.eE]*",
    "number": r"[-+]?[0-9][-+0-9.eE]*",
    "boolean": "true|false|True|False",
    "null": "null|None",
}
_CONTAINERS = ("array", "object")
_STRING_KEYWORDS = ("type", "enum", "const", "minLength", "maxLength", "pattern")
_NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def _text_value(lark: Lark, schema: object, root: Schema, end: str, tag: str) -> str:
    """Matches a value as text, with the `end` that has the closing tag in it. Where a value may be
    a string, no string looks like a value of another type that is allowed, too."""
    kinds = kinds_of(schema, root)
    if "string" not in kinds:
        return f"{_json(lark, schema, root)} {lark.text(end)}"
    others = kinds - {"string"}
    also = [f"~(/\\s*({_LOOKS_LIKE[kind]})\\s*/)" for kind in _SCALARS if kind in others]
    if others & {*_CONTAINERS}:
        also.append("~(/\\s*[\\[{(](?s:.*)/)")
    options: list[str] = []
    for each in alternatives(schema, root):
        own = kinds_of(each, root)
        if "enum" in each or "const" in each:
            options += _given_texts(lark, each, kinds, end, tag)
            continue
        if "string" in own:
            refuse_others(each, *_STRING_KEYWORDS, *(_ALL_OTHERS if own != {"string"} else ()))
            text = lark.without((tag,), " & ".join([*_string_rules(each), *also]), end)
            options.append(text)
        plain = not any(key in each for key in _NUMBER_KEYWORDS)
        for kind in _SCALARS:
            if kind in own and (plain or kind in ("boolean", "null")):
                options.append(f"{lark.terminal(f'/{_SCALARS[kind]}/')} {lark.text(end)}")
        if containers := [kind for kind in _CONTAINERS if kind in own]:
            inner = _json(lark, {**each, "type": containers}, root)
            options.append(f"{inner} {lark.text(end)}")
    if not options:
        raise cannot_write("a value that cannot be written")
    return lark.one_of(options)


_ALL_OTHERS = (
    *_NUMBER_KEYWORDS,
    *("properties", "required", "additionalProperties", "items", "prefixItems"),
    *("minItems", "maxItems"),
)


def _given_texts(
    lark: Lark, schema: Schema, kinds: frozenset[str], end: str, tag: str
) -> Iterator[str]:
    """Yields the texts of the values that a schema lists, but for those that a reader would take
    for something else."""
    for each in schema.get("enum", [schema.get("const")]):
        text = each if isinstance(each, str) else json.dumps(each, ensure_ascii=False)
        read = json.dumps(text) if kinds == {"string"} else typed(text, kinds)
        if json.loads(read) == each and tag not in text:
            yield lark.text(text + end)


def _string_rules(schema: Schema) -> list[str]:
    rules = []
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        rules.append(f"/(?s:.{{{least},{most}}})/")
    if isinstance(schema.get("pattern"), str):
        rules.append(_search(schema["pattern"]))
    return rules


def _search(pattern: str) -> str:
    """Matches texts in which a regular expression is found."""
    begin, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begin : len(pattern) - end]
    if (begin or end) and "|" in re.sub(r"\\.|\[[^\]]*\]|\([^()]*\)", "", inner):
        raise cannot_write("a pattern that cannot be followed")
    inner = re.sub(r"(?<!\\)/", r"\\/", inner)
    return f"/{'' if begin else '(?s:.*)'}({inner}){'' if end else '(?s:.*)'}/"


class _QuotedRules:
    """Writes the rules of values as QuotedValues reads them."""

    def __init__(self, lark: Lark, root: Schema, quote: str) -> None:
        self._lark = lark
        self._root = root
        self._quote = quote
        self._named: dict[str, str] = {}
        """The rules of definitions, by reference."""

    def value(self, schema: object) -> str:
        if not isinstance(schema, dict):
            return self._free()
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._definition(reference)
        options = [self._alternative(each) for each in alternatives(schema, self._root)]
        return self._lark.one_of(options)

    def _definition(self, reference: str) -> str:
        if reference not in self._named:
            # A definition may refer to itself, so its rule has a name before it is written.
            name = self._named[reference] = self._lark.reserve()
            found = alternatives({"$ref": reference}, self._root)
            options = [self._alternative(each) for each in found]
            self._lark.define(name, " | ".join(options))
        return self._named[reference]

    def _free(self) -> str:
        if "" not in self._named:
            name = self._named[""] = self._lark.reserve()
            scalars = self._lark.schema({"type": ["number", "boolean", "null"]})
            array = f'"[" ({name} ("," {name})*)? "]"'
            self._lark.define(
                name, f"{self._text({})} | {scalars} | {array} | {self._object({}, name)}"
            )
        return self._named[""]

    def _alternative(self, schema: Schema) -> str:
        kinds = kinds_of(schema, self._root)
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            return self._lark.one_of([self._lark.text(self._literal(each)) for each in values])
        if len(kinds) == 7:
            refuse_others(schema)
            return self._free()
        options = []
        if "string" in kinds:
            options.append(self._text(schema))
        if scalars := sorted(kinds - {"string", "array", "object"}):
            known = {key: schema[key] for key in _NUMBER_KEYWORDS if key in schema}
            options.append(self._lark.schema({"type": scalars, **known}))
        if "array" in kinds:
            options.append(self._array(schema))
        if "object" in kinds:
            options.append(self._object(schema, None))
        refuse_others(schema, *_STRING_KEYWORDS, *_ALL_OTHERS)
        return self._lark.one_of(options)

    def _text(self, schema: Schema) -> str:
        rules = " & ".join(_string_rules(schema))
        return f"{self._lark.text(self._quote)} " + self._lark.without(
            (self._quote,), rules, self._quote
        )

    def _array(self, schema: Schema) -> str:
        if "prefixItems" in schema:
            raise cannot_write("a schema whose keyword 'prefixItems' cannot be followed")
        item = self.value(schema.get("items"))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        rest = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {rest} "]"' if least else f'"[" ({item} {rest})? "]"'

    def _object(self, schema: Schema, value: str | None) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        names = [*properties, *(name for name in required if name not in properties)]
        if not names and others is not False:
            pair = f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ ":" {value or self.value(others)}'
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        for name in names:
            if not BARE_KEY.fullmatch(name):
                raise cannot_write("a parameter that cannot be named")
        # Gemma's templates sort them.
        parameters = [
            Parameter(name, properties.get(name, others), name in required)
            for name in sorted(names, key=str.lower)
        ]
        listed = _listed(
            self._lark,
            parameters,
            lambda each: f"{self._lark.literal(f'{each.name}:')} {self.value(each.schema)}",
            '","',
        )
        return f'"{{" {listed} "}}"'

    def _literal(self, value: object) -> str:
        if isinstance(value, str):
            if self._quote in value:
                raise cannot_write("a value that cannot be written")
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{self._literal(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._literal, value)) + "]"
        return json.dumps(value)
