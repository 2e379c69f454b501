"""A jinja2 environment in which a model's chat template can do no harm.

Templates come with models, so they are somebody else's programs, and clients choose what they loop
over. They run in jinja2's immutable sandbox with the few extras that templates are written for, on
plain strings, lists and dicts only, and within a budget of CPU time and output, looked at whenever
output comes, a loop turns, or an attribute, item or function is used. What one operation makes is
bounded where a small template could ask for much: repetition and powers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

USES_PER_LOOK = 64
MAX_BITS = 4096
"""Of a whole number that is made by multiplication."""


class OverBudget(Exception):
    """The template took more CPU time or made more text than it may."""


class _Budget:
    """What may still be used."""

    until_s = float("inf")
    max_characters = 1 << 20
    uses = 0

    def use(self) -> None:
        self.uses += 1
        if self.uses % USES_PER_LOOK == 0 and time.process_time() > self.until_s:
            raise OverBudget


class _CountedLoops(NodeTransformer):
    """Has each loop tell the budget of its turns: `for x in y` becomes `for x in y | each turn`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(
            node.iter, Sandbox.EACH_TURN, [], [], None, None, lineno=node.lineno
        )
        return node


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is only a block."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own protocol

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """Refuses names with an underscore in front: nothing of Python's internals can be shadowed."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        _refuse_private(dict(*args[1:], **kwargs))
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private({name: value})
        super().__setitem__(name, value)


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates, on one thread."""

    EACH_TURN = "each turn"
    """No template can spell it."""
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self._budget = _Budget()
        self.filters["tojson"] = _tojson
        self.filters[self.EACH_TURN] = self._each_turn
        # Makes any amount of random text, which no template of a model is written for.
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
        # No named parameters: a template's own keyword arguments must not meet them.
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
        """What is rendered now has so much CPU time together, and each so many characters."""
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
    """Characters or items of what `left * right` repeats; of numbers, more than any limit if they
    are too large."""
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
    """Unlike jinja2's own filter, escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _refuse_private(names: Mapping[str, Any]) -> None:
    if any(str(name).startswith("_") for name in names):
        raise SecurityError("a namespace holds no names that begin with an underscore")
