"""Every private name of a library that Baton uses has its row in docs/dependencies.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for folder in ("services/batonlm", "loadtest/baton_loadtest")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "v1" not in path.parts
]
OURS = ("batonlm", "baton_loadtest", "__future__")
_PRIVATE = re.compile(r"_[a-zA-Z][a-zA-Z_0-9]*")


def listed() -> str:
    return (ROOT / "docs/dependencies.md").read_text()


def private_names(tree: ast.AST) -> Iterator[str]:
    """Of libraries: in an attribute of an imported name, an import, a keyword of a call, or a text
    that `getattr` is given. A module's own private names are none of these."""
    foreign: set[str] = set()
    own = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
    }
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                foreign |= {(n.asname or n.name).partition(".")[0] for n in names}
                yield from (part for n in names for part in n.name.split(".") if private(part))
            case ast.ImportFrom(module=str(module), names=names):
                if module.partition(".")[0] not in OURS:
                    foreign |= {n.asname or n.name for n in names}
                    parts = [*module.split("."), *(n.name for n in names)]
                    yield from (part for part in parts if private(part))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=attr) if private(attr) and root_of(node) in foreign:
                yield attr
            case ast.Call(func=func, args=args, keywords=keywords):
                yield from (
                    k.arg for k in keywords if k.arg and private(k.arg) and k.arg not in own
                )
                called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
                for argument in args:
                    if called in ("getattr", "import_module"):
                        text = getattr(argument, "value", None)
                        if isinstance(text, str):
                            yield from (part for part in text.split(".") if private(part))


def private(name: str) -> bool:
    return bool(_PRIVATE.fullmatch(name)) and name != "_exit"  # `os._exit` is documented


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_private_name_has_its_row(path: Path) -> None:
    found = set(private_names(ast.parse(path.read_text())))
    assert not {name for name in found if name not in listed()}


def test_private_names_are_found() -> None:
    source = "import torch\nfrom x import _y\ntorch.a._b\nf(_c=1)\ngetattr(o, '_d')\nself._own"
    assert set(private_names(ast.parse(source))) == {"_y", "_b", "_c", "_d"}


def test_what_is_named_exists() -> None:
    rows = [line for line in listed().splitlines() if line.startswith("| `")]
    for row in rows:
        for name in re.findall(r"`(tests/[\w/.]+|[a-z]+/[\w/]+\.py)`", row):
            place = ROOT / name if name.startswith("tests/") else ROOT / "services/batonlm" / name
            assert place.exists(), name
