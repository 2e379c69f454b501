"""What is logged about a request names it: every log call says whose it is, or is listed here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import batonlm

PACKAGES = (
    *("router", "tokenizer", "prefill", "decode", "detokenizer"),
    *("worker", "rpc", "transfer", "engine", "grammar", "core"),
)
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}

OF_NO_REQUEST = {
    "decode/service.py": "a router's whole session",
    "decode/servicer.py": "a router's whole session",
    "detokenizer/__main__.py": "the process",
    "engine/linear.py": "the model, while it loads",
    "engine/loader.py": "the model, while it loads",
    "engine/adapters/store.py": "an adapter, while it loads",
    "engine/ranks/machines.py": "a whole group of ranks",
    "engine/ranks/rank.py": "a whole step",
    "engine/ranks/runner.py": "a whole step",
    "engine/ranks/tcp.py": "a whole group of ranks",
    "engine/quantized.py": "the model, while it loads",
    "engine/runner.py": "the model, while it loads",
    "engine/kv/swap.py": "blocks of many, below what knows sequences",
    "router/request/cascade.py": "a cascade whose large model is out of reach",
    "router/processes.py": "the processes of a router",
    "router/workers/adapters.py": "an adapter, on all workers",
    "transfer/sender.py": "two workers that meet",
    "transfer/peers.py": "two workers that meet",
    "transfer/transports.py": "two workers that meet",
    "router/__main__.py": "the process",
    "router/api/http/connect.py": "a stream, of which the edge has no id",
    "router/api/http/server.py": "all connections",
    "router/workers/decode_session.py": "a worker's whole session",
    "router/workers/discovery.py": "a pool",
    "router/workers/discovery_k8s.py": "a pool",
    "router/api/access.py": "the file of keys",
    "rpc/followed_file.py": "a file that the process follows",
    "router/workers/fleet.py": "a worker, or two that do not fit",
    "router/observe/records.py": "the file of usage records",
    "router/workers/shared_stream.py": "a worker's whole session",
    "rpc/loop.py": "the process",
    "rpc/options.py": "the model, while it is fetched",
    "rpc/lifecycle.py": "the process",
    "rpc/metrics.py": "the process",
    "rpc/server.py": "the process",
    "rpc/tls.py": "certificates",
    "tokenizer/__main__.py": "the process",
    "worker/adapters.py": "an adapter, while it is fetched",
    "worker/engine.py": "the model, while it loads",
    "worker/placement.py": "a whole group of ranks",
    "worker/self_test.py": "the worker",
    "worker/staging.py": "the worker",
    "worker/process.py": "the worker",
    "worker/tiers/prefix_tiers.py": "a tier",
}
"""Modules that have lines without a request, and what those are about."""


def test_lines_say_whose_they_are() -> None:
    nameless = dict(_nameless())
    assert {where for where in nameless if where not in OF_NO_REQUEST} == set()
    # Nothing stays listed that has no such line any more.
    assert set(OF_NO_REQUEST) <= set(nameless)


def _nameless() -> Iterator[tuple[str, int]]:
    """Files with log calls that pass nothing as `extra`, and the last one's line."""
    root = Path(next(iter(batonlm.__path__)))
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            for call in _log_calls(ast.parse(file.read_text())):
                if all(word.arg != "extra" for word in call.keywords):
                    yield str(file.relative_to(root)), call.lineno


def _log_calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("log" | "_log"), attr=level)):
                if level in LEVELS:
                    yield node
            case _:
                pass
