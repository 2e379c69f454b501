"""`baton keys`: creates, lists and removes the API keys in a router's file.

A running router reloads the file by itself. A key is printed once, when it is created: the file
contains only its hash.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batonlm.cli import router_files
from batonlm.core.admission.api_keys import (
    KeyBook,
    TenantLimits,
    checked_name,
    parse,
    parse_limits,
    render,
)

_HELP = {
    "weight": "share of a busy fleet, relative to other tenants'",
    "most_urgent": "smallest priority number it may ask for",
    "requests_per_minute": "requests it may begin in a minute",
    "tokens_per_minute": "tokens, of prompts and outputs, in a minute",
    "max_requests": "requests at a time",
    "max_tokens": "tokens of all its running and waiting requests together",
    "cache_group": "tenants of one group share KV",
}
_TYPES = {"weight": float, "cache_group": str}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("keys")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="make a key and print it, once")
    new.add_argument("--tenant", required=True, metavar="NAME", help="who pays for its requests")
    for limit, words in _HELP.items():
        new.add_argument(
            "--" + limit.replace("_", "-"),
            type=_TYPES.get(limit, int),
            metavar=_TYPES.get(limit, int).__name__.upper(),
            help=f"{words} (of the tenant, with all its keys)",
        )
    new.add_argument(
        "--operator", action="store_true",
        help="the key may also see workers' addresses, metrics, and all tenants' requests "
        "(this key alone)",
    )  # fmt: skip
    for name, words in (("list", "list keys, without the keys themselves"), ("remove", "a key")):
        action = actions.add_parser(name, help=words)
        if name == "remove":
            action.add_argument("id", metavar="ID", help="as 'baton keys list' shows it")
    for action in actions.choices.values():
        action.add_argument("file", metavar="FILE", type=Path, help="the file --keys names")


def run(args: argparse.Namespace) -> int:
    """Raises BatonError."""
    match args.action:
        case "new":
            _new(args)
        case "list":
            _list(args.file)
        case _:
            with router_files.changing(args.file, parse) as book:
                router_files.replace(args.file, render(book.without(args.id)))
    return 0


def _new(args: argparse.Namespace) -> None:
    tenant = checked_name(args.tenant)
    given = {limit: getattr(args, limit) for limit in _HELP}
    with router_files.changing(args.file, parse, KeyBook()) as book:
        known = asdict(book.tenants.get(tenant, TenantLimits()))
        limits = known | {name: value for name, value in given.items() if value is not None}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        changed, key = book.with_key(
            tenant, parse_limits(tenant, limits), now, operator=args.operator
        )
        router_files.replace(args.file, render(changed))
    print(f"{changed.keys[-1].id} of {tenant}; this is the only time the key is shown:",
          file=sys.stderr)  # fmt: skip
    print(key)


def _list(file: Path) -> None:
    book = router_files.read(file, parse)
    for key in book.keys:
        limits = asdict(book.tenants[key.tenant]).items()
        shown = " ".join(f"{name}={value}" for name, value in limits if value not in (None, "", {}))
        kind = "operator " if key.operator else ""
        print(f"{key.id}  {key.created or '-':25}  {key.tenant}  {kind}{shown}".rstrip())
