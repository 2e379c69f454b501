"""Prints how large the house is: what the processes load, who imports whom, what has two owners.

    python scripts/house.py              # the numbers
    python scripts/house.py --list NAME  # what is behind one of them
    python scripts/house.py --request    # also what a streamed chat request enters (`baton up`)

Imports and definitions are read as text. Lines of code are lines that hold a token which is no
comment and no docstring. Generated stubs (`baton.v1`) are left out.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import tokenize
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "services"
PROCESSES = ("router", "tokenizer", "prefill", "decode", "detokenizer", "encode")
SHORT, SMALL, CROWDED = 40, 60, 14
"""Lines of a file that needs a reason, lines of one that is no room of its own, files of a folder
that cannot be taken in at a glance."""

SAMPLING_FIELD = "min_p"
"""A field of sampling that every form of a request carries."""

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", metavar="NAME", help="what is behind one number")
    parser.add_argument(
        "--request", action="store_true", help="start a Baton and follow one streamed chat request"
    )
    args = parser.parse_args()
    counted = [*numbers(), *(entered() if args.request else ())]
    for name, found, extra in counted:
        if args.list is None:
            print(f"{name:52} {len(found):6,}{extra}")
        elif name == args.list:
            print("\n".join(sorted(found)))


def numbers() -> Iterator[tuple[str, list[str], str]]:
    """Of each number its name, what it counts, and what else is to be said."""
    modules = {_module(path): path for path in SOURCE.rglob("*.py") if "v1" not in path.parts}
    imports = {module: _imports(path, modules) for module, path in modules.items()}
    loaded = _closure({f"batonlm.{name}.__main__" for name in PROCESSES}, imports)
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
    told = {
        name for path in modules.values() if "testing" not in path.parts for name in _options(path)
    }
    yield "options of the five processes", sorted(told), ""
    naming = [m for m, path in modules.items() if SAMPLING_FIELD in _names(path)]
    yield f"modules that name the sampling field {SAMPLING_FIELD}", naming, ""
    everything = [str(path) for path in modules.values()]
    total = sum(_code_lines(path) for path in modules.values())
    yield "files under services/batonlm", everything, f"  with {total:,} lines of code"
    measuring = list((ROOT / "loadtest").rglob("*.py"))
    total = sum(_code_lines(path) for path in measuring)
    yield "files under loadtest", list(map(str, measuring)), f"  with {total:,} lines of code"


def _options(path: Path) -> list[str]:
    """The fields that are made by `option()`."""
    return [
        node.target.id
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
        if node.value.func.id == "option"
    ]


RECORDER = """
import json, os, sys, threading, time
folder = os.environ["HOUSE_FOLDER"]
seen = set()
def note(frame, event, arg):
    if event == "call":
        seen.add(frame.f_code)
def watch():
    while not os.path.exists(folder + "/begin"):
        time.sleep(0.02)
    seen.clear()
    open(f"{folder}/{os.getpid()}.begun", "w").close()
    while not os.path.exists(folder + "/end"):
        time.sleep(0.02)
    found = sorted({(c.co_filename, c.co_qualname) for c in list(seen)})
    with open(f"{folder}/{os.getpid()}.part", "w") as file:
        json.dump(found, file)
    os.rename(f"{folder}/{os.getpid()}.part", f"{folder}/{os.getpid()}.json")
if "HOUSE_FOLDER" in os.environ and any("batonlm." in word for word in sys.orig_argv):
    threading.Thread(target=watch, daemon=True).start()
    threading.setprofile(note)
    sys.setprofile(note)
"""
"""Runs in each process before everything else. What the processes do by the clock while the request
runs is counted, too."""


def entered() -> Iterator[tuple[str, list[str], str]]:
    """What one streamed chat request enters in all processes: files and functions of `baton`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(RECORDER)
        path = os.pathsep.join([name, str(SOURCE), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {
            "HOUSE_FOLDER": name, "PYTHONPATH": path, "XDG_STATE_HOME": str(folder / "state")
        }  # fmt: skip
        baton = [sys.executable, "-m", "batonlm.cli.main"]
        words = [*baton, "up", "--detach", "--http-port", "0", "--grpc-port", "0"]
        ready = folder / "ready"
        with ready.open("w") as file:  # A pipe would stay open for as long as the processes run.
            subprocess.run(words, env=environment, stdout=file, check=True)
        try:
            address = json.loads(ready.read_text().splitlines()[-1])["http"]
            _chat(address, "Who are you?")  # Whatever happens once has happened then.
            _between(folder, "begin", "begun")
            _chat(address, "What is 3 + 4?")
            _between(folder, "end", "json")
        finally:
            subprocess.run([*baton, "down"], env=environment, check=True)
        found = {
            tuple(pair) for file in folder.glob("*.json") for pair in json.loads(file.read_text())
        }
    ours = [
        f"{Path(file).relative_to(SOURCE)} {function}"
        for file, function in found
        if file.startswith(f"{SOURCE}/baton") and "/v1/" not in file
        if not function.endswith(("comp>", "<genexpr>", "<module>"))
    ]
    yield "files that a streamed chat request enters", sorted({o.split()[0] for o in ours}), ""
    yield "functions that a streamed chat request enters", ours, ""


def _chat(address: str, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 16}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert b"[DONE]" in answer.read()


def _between(folder: Path, sign: str, suffix: str) -> None:
    """Gives the processes a sign and waits until all have answered it."""
    (folder / sign).touch()
    waited = time.monotonic() + 20
    while len(list(folder.glob(f"*.{suffix}"))) < len(PROCESSES):
        if time.monotonic() > waited:
            raise TimeoutError(f"not every process wrote its .{suffix}")
        time.sleep(0.05)
    time.sleep(0.5)


def _names(path: Path) -> set[str]:
    """Identifiers and texts of a file that are one word."""
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                found.add(name)
    return found


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
