"""Prints how large the house is: what the processes load, who imports whom, what has two owners.

    python scripts/house.py              # the numbers
    python scripts/house.py --list NAME  # what is behind one of them

Reads imports and definitions as text and runs nothing. Lines of code are lines that hold a token
which is no comment and no docstring. Generated stubs (`baton.v1`) are left out.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "services"
PROCESSES = ("router", "tokenizer", "prefill", "decode", "detokenizer")
SHORT, SMALL, CROWDED = 40, 60, 14
"""Lines of a file that needs a reason, lines of one that is no room of its own, files of a folder
that cannot be taken in at a glance."""

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", metavar="NAME", help="what is behind one number")
    wanted = parser.parse_args().list
    for name, found, extra in numbers():
        if wanted is None:
            print(f"{name:52} {len(found):6,}{extra}")
        elif name == wanted:
            print("\n".join(sorted(found)))


def numbers() -> Iterator[tuple[str, list[str], str]]:
    """Of each number its name, what it counts, and what else is to be said."""
    modules = {_module(path): path for path in SOURCE.rglob("*.py") if "v1" not in path.parts}
    imports = {module: _imports(path, modules) for module, path in modules.items()}
    loaded = _closure({f"baton.{name}.__main__" for name in PROCESSES}, imports)
    code = sum(_code_lines(modules[module]) for module in loaded)
    yield "files that the five processes load", sorted(loaded), f"  with {code:,} lines of code"
    importers = defaultdict(list)
    for module, others in imports.items():
        for other in others:
            importers[other].append(module)
    alone = [m for m in loaded if len(importers[m]) == 1 and modules[m].name != "__init__.py"]
    small = [m for m in alone if _lines(modules[m]) < SMALL]
    yield "modules with one importer", alone, ""
    yield f"of these, with less than {SMALL} lines", small, ""
    short = [
        str(path.relative_to(ROOT))
        for module, path in modules.items()
        if module in loaded and path.name not in ("__init__.py", "__main__.py")
        if _lines(path) < SHORT
    ]
    yield f"files with less than {SHORT} lines", short, ""
    folders = defaultdict(list)
    for path in modules.values():
        folders[path.parent].append(path)
    crowded = [
        f"{folder.relative_to(ROOT)} {len(files)}"
        for folder, files in folders.items()
        if len(files) > CROWDED
    ]
    yield f"folders with more than {CROWDED} files", crowded, ""
    owners = defaultdict(list)
    for module, path in modules.items():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(module)
    shared = [f"{name}: {', '.join(who)}" for name, who in owners.items() if len(who) > 1]
    yield "class names with several owners", shared, ""
    circles = [" ".join(sorted(circle)) for circle in _circles(imports)]
    yield "import circles", circles, ""
    everything = [str(path) for path in modules.values()]
    total = sum(_code_lines(path) for path in modules.values())
    yield "files under services/baton", everything, f"  with {total:,} lines of code"
    measuring = list((ROOT / "loadtest").rglob("*.py"))
    total = sum(_code_lines(path) for path in measuring)
    yield "files under loadtest", list(map(str, measuring)), f"  with {total:,} lines of code"


def _module(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _lines(path: Path) -> int:
    return path.read_text().count("\n")


@cache
def _code_lines(path: Path) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def _imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of ours that a file imports, also late ones; a package counts with its modules."""
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{name.name}" for name in node.names}
            found.update(names & modules.keys() or {node.module})
    return {name for name in found if name in modules}


def _closure(roots: set[str], imports: dict[str, set[str]]) -> set[str]:
    seen, left = set(), set(roots)
    while left:
        module = left.pop()
        seen.add(module)
        parents = {module[:i] for i, letter in enumerate(module) if letter == "."}
        left |= ((imports[module] | parents) & imports.keys()) - seen
    return seen


def _circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Modules that reach each other, by Tarjan's algorithm. Imports of types count, too."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in imports[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            circle = set(stack[stack.index(module) :])
            del stack[stack.index(module) :]
            if len(circle) > 1:
                found.append(circle)

    for module in imports:
        if module not in index:
            visit(module)
    return found


if __name__ == "__main__":
    main()
