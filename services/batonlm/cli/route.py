"""`baton route`: says which models a name stands for, in the file that routers' --aliases names.

    baton route aliases.json chat small=90 large=10    a tenth of all conversations goes to large
    baton route aliases.json chat --back               what it was before
    baton route aliases.json                           shows all

Running routers follow the file.
"""

from __future__ import annotations

import argparse
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from batonlm.cli import router_files
from batonlm.core.errors import InvalidArgument, NotFound
from batonlm.core.routing.aliases import Alias, checked, checked_name, parse, render


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("route")
    parser.add_argument("file", metavar="FILE", type=Path, help="the file --aliases names")
    parser.add_argument("alias", metavar="NAME", nargs="?", help="what clients call the model")
    parser.add_argument(
        "weights", metavar="MODEL=WEIGHT", nargs="*",
        help="models and their parts of the conversations; a model alone: all of them",
    )  # fmt: skip
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--back", action="store_true", help="the weights before the last change")
    how.add_argument("--remove", action="store_true", help="the name stands for nothing any more")


def run(args: argparse.Namespace) -> int:
    """Raises BatonError."""
    changes = bool(args.weights) + args.back + args.remove
    if changes > 1 or (changes and args.alias is None):
        raise InvalidArgument("give a name, and models or --back or --remove", field="weights")
    if not changes:
        _show(router_files.read(args.file, parse), args.alias)
        return 0
    new: dict[str, Alias] | None = {} if args.weights else None
    with router_files.changing(args.file, parse, new) as aliases:
        if args.weights:
            weights = _weights(args.weights)
            name = checked_name(args.alias, "name")
            known = aliases.get(name)
            aliases[name] = Alias(weights) if known is None else known.changed(weights)
        elif args.alias not in aliases:
            raise NotFound(f"{args.file} has no {args.alias!r}")
        elif args.remove:
            del aliases[args.alias]
        elif not (former := aliases[args.alias].former):
            raise NotFound(f"{args.alias!r} was never changed")
        else:
            aliases[args.alias] = changed(aliases[args.alias], weights=former, former=())
        router_files.replace(args.file, render(aliases))
    _show(aliases, None if args.remove else args.alias)
    return 0


def _weights(texts: list[str]) -> tuple[tuple[str, int], ...]:
    """Raises InvalidArgument."""
    found: dict[str, int] = {}
    for text in texts:
        model, equals, weight = text.rpartition("=")
        if not equals and len(texts) == 1:
            model, weight = text, "1"
        if not weight.isdecimal() or model in found:
            raise InvalidArgument(f"{text[:80]!r} must be MODEL=WEIGHT", field="weights")
        found[model] = int(weight)
    return checked(found, "weights")


def _show(aliases: dict[str, Alias], only: str | None) -> None:
    """Raises NotFound."""
    if only is not None and only not in aliases:
        raise NotFound(f"there is no name {only!r}")
    for name, alias in aliases.items():
        if only in (None, name):
            total = sum(weight for _, weight in alias.weights)
            parts = ", ".join(f"{model} {weight / total:.3g}" for model, weight in alias.weights)
            print(f"{name}: {parts}")
