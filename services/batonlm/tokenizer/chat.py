"""Renders a conversation with a chat template, and finds which control tokens the template wrote.

The text is the same as that of `transformers`' `apply_chat_template(tokenize=False)`. The module
runs in a process that can be killed.

To tell the template's control tokens from those in the client's texts, the chat is rendered a
second time with every character in the client's texts that could begin a control token *marked*:
replaced by a rare symbol that occurs in no text. The control tokens in the marked result are the
template's. Marking keeps lengths, case and white space, and Python and JSON do not escape the
symbols.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

from jinja2 import Template, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from batonlm.core.errors import BatonError, InvalidArgument
from batonlm.core.request.request import ChatPrompt
from batonlm.core.request.validation import parse_template_kwargs, wrong
from batonlm.tokenizer.renderers import MessageForm, Setup, chat_messages, chat_tools, too_much

USES_PER_LOOK = 64
MAX_BITS = 4096
"""The largest integer that a multiplication or power may produce, in bits."""


MAX_REFUSAL = 300
"""Most characters of a template's own words in an error."""


class Refused(Exception):
    """A template called raise_exception. words: what the template's author wrote for its caller, in
    which a client's texts may occur."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.words = words


class OverBudget(Exception):
    """The template exceeded its CPU time or the size of its output."""


class _Budget:
    """The limits of one rendering."""

    until_s = float("inf")
    """The process's CPU time at which the template is stopped."""
    max_characters = 1 << 20
    uses = 0
    """Operations so far; each USES_PER_LOOK of them the CPU time is checked."""

    def use(self) -> None:
        self.uses += 1
        if self.uses % USES_PER_LOOK == 0 and time.process_time() > self.until_s:
            raise OverBudget


class _CountedLoops(NodeTransformer):
    """Counts loop iterations against the budget: `for x in y` becomes `for x in y | each turn`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(
            node.iter, Sandbox.EACH_TURN, [], [], None, None, lineno=node.lineno
        )
        return node


class _Generation(Extension):
    """`{% generation %}` marks an assistant's messages for training; here it is a plain block."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own protocol

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """Refuses names with a leading underscore, so that none of Python's internals is shadowed."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        _refuse_private(dict(*args[1:], **kwargs))
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private({name: value})
        super().__setitem__(name, value)


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates, on one thread.

    Templates come with models or clients and are untrusted. They run in jinja2's immutable sandbox
    with the few extras that templates expect, on plain strings, lists and dicts only, within a
    budget of CPU time and output. The budget is checked with each piece of output, loop iteration,
    attribute, item and call. The results of repetition and powers are bounded, because one such
    operation can produce any size.
    """

    EACH_TURN = "each turn"
    """A name with a space, which no template can contain."""
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self._budget = _Budget()
        self.filters["tojson"] = _tojson
        self.filters[self.EACH_TURN] = self._each_turn
        # It generates any amount of random text, and no model's template needs it.
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._budget.use()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._budget.use()
        return super().getitem(obj, argument)

    def call(*args: Any, **kwargs: Any) -> Any:
        # No named parameters: a template's keyword arguments could collide with them.
        args[0]._budget.use()
        return ImmutableSandboxedEnvironment.call(*args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._budget.use()
        if _product_size(operator, left, right) > self._budget.max_characters:
            raise OverBudget
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _CountedLoops().visit(super()._parse(source, name, filename))
        return tree

    def _each_turn(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._budget.use()
            yield item

    def begin(self, *, cpu_s: float, max_characters: int) -> None:
        """Sets the budget: CPU time for all that is rendered from now on together, and characters
        for each text."""
        self._budget.until_s = time.process_time() + cpu_s
        self._budget.max_characters = max_characters

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Raises OverBudget, or whatever the template's code raises."""
        pieces, room = [], self._budget.max_characters
        for piece in template.generate(variables):
            room -= len(piece)
            if room < 0:
                raise OverBudget
            self._budget.use()
            pieces.append(piece)
        return "".join(pieces)


def _product_size(operator: str, left: Any, right: Any) -> int:
    """The characters or items of `left * right`. For integers, 0, or sys.maxsize when the result
    has more than MAX_BITS."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
        return 0 if bits <= MAX_BITS else sys.maxsize
    for repeated, times in ((left, right), (right, left)):
        if hasattr(repeated, "__len__") and isinstance(times, int):
            return len(repeated) * times
    return 0


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter without jinja2's HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise Refused(str(message))


def _refuse_private(names: Mapping[str, Any]) -> None:
    if any(str(name).startswith("_") for name in names):
        raise SecurityError("a namespace holds no names that begin with an underscore")


CONTINUE_MARK = "BATON_CONTINUES_HERE "
"""Appended to the final message while it is rendered. Its trailing space shows whether the template
trims messages."""

_RANGES = ((0x2801, 0x28FF), (0x1D000, 0x1D0F5))
"""Braille and Byzantine musical symbols, which are not part of words."""
_MARKS = [chr(mark) for first, last in _RANGES for mark in range(first, last + 1)]
_RARE = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in _RANGES) + "]")

Span = tuple[int, int]
Change = Callable[[str, str], str]
"""Takes a client's text and its message's role ("" for none); returns the text to render."""


class Rendered(NamedTuple):
    """A rendered conversation."""

    text: str
    own: list[Span] | None = None
    """Where the text has control tokens that the template wrote; None: all are the template's."""


class _Values(NamedTuple):
    """The client's values that a template receives."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any]

    def changed(self, change: Change) -> _Values:
        return _Values(
            [_changed(message, change, message["role"]) for message in self.messages],
            _changed(self.tools, change, ""),
            {name: _changed(value, change, "") for name, value in self.kwargs.items()},
        )

    def texts(self) -> Iterator[str]:
        """All strings in the values, including keys."""
        pending: list[Any] = [self.messages, self.tools, list(self.kwargs.values())]
        while pending:
            match pending.pop():
                case str(text):
                    yield text
                case list(items):
                    pending += items
                case dict(items):
                    pending += items
                    pending += items.values()


def _changed(value: Any, change: Change, role: str) -> Any:
    match value:
        case str():
            return change(value, role)
        case list():
            return [_changed(item, change, role) for item in value]
        case dict():
            return {
                _changed(key, change, role): _changed(item, change, role)
                for key, item in value.items()
            }
        case _:
            return value


class ChatTemplate:
    """The compiled template of a setup. sandbox: the one that compiled it, with a budget set."""

    def __init__(self, setup: Setup, template: Template, sandbox: Sandbox) -> None:
        self._uses_content = "content" in setup.source
        self._special_tokens = setup.special_tokens
        self._template = template
        tree = sandbox.parse(setup.source)
        self._variables = meta.find_undeclared_variables(tree)
        self._form = MessageForm(_joins_arguments(tree), _reads(tree, "thinking"))
        self._sandbox = sandbox
        self._control = _Control(setup)

    def render(self, chat: ChatPrompt) -> Rendered:
        """Renders a conversation. Raises InvalidArgument naming the invalid field."""
        if not chat.messages:
            raise wrong("messages", "must hold at least one message")
        if chat.continue_final_message and chat.add_generation_prompt:
            raise wrong("continue_final_message", "cannot be combined with add_generation_prompt")
        kwargs = parse_template_kwargs(chat.template_kwargs)
        for name in chat.needed_variables:
            if name not in self._variables:
                raise InvalidArgument(
                    "is not supported by this model: its chat template has no such variable",
                    field=name,
                )
        values = _Values(chat_messages(chat, self._form), chat_tools(chat), kwargs)
        text = self._text(chat, values)
        try:
            text.encode()
        except UnicodeEncodeError:  # a template can produce lone surrogates
            raise wrong("messages", "must not become half a character") from None
        control = self._control
        if not control.may_begin_in(values.texts()):
            return Rendered(text)
        marking = control.marking([text, *values.texts()])
        marked = self._marked(chat, values.changed(marking.beginnings), marking)
        if marked is None or marking.undone(marked) != text:
            # The template depends on the marked characters. Then only whole control tokens in the
            # client's texts are marked.
            if not control.is_in(values.texts()):
                return Rendered(text)
            marked = marking.found(self._text(chat, values.changed(marking.tokens)))
            text = marking.undone(marked)
        own = control.spans(marked)
        # If both spans are equal, the client's texts contain no control token.
        return Rendered(text, own if control.always or own != control.spans(text) else None)

    def _marked(self, chat: ChatPrompt, values: _Values, marking: _Marking) -> str | None:
        """The rendered text with marks; None when the template fails on it."""
        try:
            return marking.found(self._text(chat, values))
        except InvalidArgument:
            return None

    def _text(self, chat: ChatPrompt, values: _Values) -> str:
        if not chat.continue_final_message:
            return self._render(chat, values)
        # The result is the text up to the end of the final message.
        final = values.messages[-1]["content"]
        with_mark = {**values.messages[-1], "content": final + CONTINUE_MARK}
        values = values._replace(messages=[*values.messages[:-1], with_mark])
        text = self._render(chat, values) if self._uses_content else ""
        mark = CONTINUE_MARK.rstrip()
        if mark not in text or final.strip() not in text:
            raise wrong(
                "continue_final_message",
                "needs a chat template that shows the final message as it is",
            )
        before, _, after = text.rpartition(mark)
        # If the mark's space is gone, the template trims messages, so the message's end is trimmed.
        return before if after.startswith(" ") else before.rstrip()

    def _render(self, chat: ChatPrompt, values: _Values) -> str:
        variables = {
            **self._special_tokens,
            **values.kwargs,
            "messages": values.messages,
            "tools": values.tools,
            "documents": None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            return self._sandbox.render(self._template, variables)
        except BatonError:
            raise
        except (OverBudget, MemoryError):
            raise too_much() from None
        except Refused as refusal:
            raise not_accepted(_plain(refusal.words)) from None
        except Exception as error:  # a template can raise anything, with any text
            raise not_accepted() from error


def _joins_arguments(tree: nodes.Template) -> bool:
    """Whether a template joins the arguments of a call to other text as they are, as DeepSeek's do,
    so that they must be text."""
    parts: list[nodes.Expr] = []
    for added in tree.find_all(nodes.Add):
        parts += [added.left, added.right]
    for joined in tree.find_all(nodes.Concat):
        parts += joined.nodes
    return any(_is_field(part, "arguments") for part in parts)


def _reads(tree: nodes.Template, name: str) -> bool:
    """Whether a template reads a field of this name."""
    return any(_is_field(node, name) for node in tree.find_all((nodes.Getattr, nodes.Getitem)))


def _is_field(node: nodes.Node, name: str) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == name
    return isinstance(node, nodes.Getitem) and node.arg == nodes.Const(name)


def not_accepted(words: str = "") -> InvalidArgument:
    """words: the template's own, where it refused the messages itself."""
    reason = words or "check their roles and their order"
    return wrong("messages", f"are not accepted by the chat template: {reason}")


def _plain(words: str) -> str:
    """One line of printable text, at most MAX_REFUSAL characters and an ellipsis."""
    words = words.replace(CONTINUE_MARK, "").replace(CONTINUE_MARK.rstrip(), "")
    shown = words[:MAX_REFUSAL] + ("…" if len(words) > MAX_REFUSAL else "")
    return " ".join("".join(c if c.isprintable() else " " for c in shown).split())


class _Control:
    """Patterns for the spellings of a setup's control tokens."""

    def __init__(self, setup: Setup) -> None:
        self.always = setup.always
        self.any = _pattern(setup.control)
        unspoken = [text for text in setup.control if text not in setup.spoken]
        self.unspoken = _pattern(unspoken)
        self.heads = sorted({text[0] for text in setup.control})
        head = f"[{''.join(map(re.escape, self.heads))}]" if self.heads else r"(?!)"
        self.head = re.compile(head)
        self.spoken_or_head = re.compile("|".join([*map(re.escape, setup.spoken), head]))

    def may_begin_in(self, texts: Iterable[str]) -> bool:
        return self.always or any(self.head.search(text) for text in texts)

    def is_in(self, texts: Iterable[str]) -> bool:
        return self.always or any(self.any.search(text) for text in texts)

    def spans(self, text: str) -> list[Span]:
        return [found.span() for found in self.any.finditer(text)]

    def marking(self, texts: Iterable[str]) -> _Marking:
        """Marks that occur in none of the texts. Raises InvalidArgument when too few are free."""
        rare = (text for text in texts if not text.isascii())
        used = {found for text in rare for found in _RARE.findall(text)}
        marks = [mark for mark in _MARKS if mark not in used]
        if len(marks) < len(self.heads):
            raise not_accepted()
        return _Marking(self, dict(zip(self.heads, marks, strict=False)))


class _Marking:
    """Marks the client's texts. marks: the symbol for each first character of a control token."""

    def __init__(self, control: _Control, marks: Mapping[str, str]) -> None:
        self._control = control
        self._marks = marks
        self._escapes = {json.dumps(mark)[1:-1]: mark for mark in marks.values()}

    def beginnings(self, text: str, role: str) -> str:
        """A Change that marks every character that may begin a control token."""
        control = self._control
        pattern = control.spoken_or_head if role == "assistant" else control.head
        return pattern.sub(lambda found: self._marks.get(found[0], found[0]), text)

    def tokens(self, text: str, role: str) -> str:
        """A Change that marks every control token."""
        pattern = self._control.unspoken if role == "assistant" else self._control.any
        return pattern.sub(lambda found: self._marks[found[0][0]] + found[0][1:], text)

    def found(self, text: str) -> str:
        """The rendered text with JSON escapes of marks turned back into marks."""
        for escape, mark in self._escapes.items():
            text = text.replace(escape, mark)
        return text

    def undone(self, text: str) -> str:
        """The text with marks replaced by the original characters."""
        for head, mark in self._marks.items():
            text = text.replace(mark, head)
        return text


def _pattern(texts: Sequence[str]) -> re.Pattern[str]:
    """Matches like a tokenizer: the leftmost, and of several there the longest."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
