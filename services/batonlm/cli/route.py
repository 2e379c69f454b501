"""`baton route`: says which models a name stands for, in the file that routers' --aliases names.

    baton route aliases.json chat small=90 large=10    a tenth of all conversations goes to large
    baton route aliases.json chat --back               what it was before
    baton route aliases.json chat --shadow new=0.05    a twentieth goes to new as well, unseen
    baton route aliases.json auto small --then large --policy policy.json
                                                       large answers what small is not sure of
    baton route aliases.json                           shows all
    baton route train --data asked.jsonl …             makes such a policy (`route_train`)

Running routers follow the file.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from batonlm.cli import route_train, router_files
from batonlm.core.errors import InvalidArgument, NotFound
from batonlm.core.routing.aliases import Alias, Shadow, checked, checked_shadow, parse, render
from batonlm.core.routing.cascade import Cascade, cascade_from
from batonlm.core.routing.documents import checked_name

MAX_POLICY_BYTES = 1 << 20


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("route")
    parser.add_argument(
        "file", metavar="FILE", help="the file --aliases names; train: makes a policy of data"
    )
    parser.add_argument("alias", metavar="NAME", nargs="?", help="what clients call the model")
    parser.add_argument(
        "weights", metavar="MODEL=WEIGHT", nargs="*",
        help="models and their parts of the conversations; a model alone: all of them",
    )  # fmt: skip
    parser.add_argument(
        "--shadow", metavar="MODEL=SHARE",
        help="a model that gets this share of its requests, too (0.05: a twentieth), and whose "
        "answers nobody sees; 0: no more",
    )  # fmt: skip
    parser.add_argument(
        "--then", metavar="MODEL", help="the model that answers what the name's own is not sure of"
    )
    parser.add_argument(
        "--policy", metavar="FILE", type=Path, help="when that is (`baton route train`)"
    )
    parser.add_argument(
        "--upstream", metavar="HOST:PORT",
        help="the gRPC address of another Baton that serves the model of --then",
    )  # fmt: skip
    parser.add_argument("--upstream-key", metavar="FILE", default="", help="its API key")
    parser.add_argument(
        "--upstream-ca", metavar="FILE", default="", help="the CA of its certificate; none: no TLS"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--back", action="store_true", help="the weights before the last change")
    how.add_argument("--remove", action="store_true", help="the name stands for nothing any more")
    how.add_argument("--alone", action="store_true", help="undoes --then")
    route_train.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Raises BatonError."""
    if args.file == "train":
        return route_train.run(args)
    file = Path(args.file)
    sets = bool(args.weights or args.shadow or args.then)
    changes = sets + args.back + args.remove + args.alone
    if changes > 1 or (changes and args.alias is None):
        raise InvalidArgument("give a name, and models or --back or --remove", field="weights")
    if bool(args.then) != bool(args.policy) or (args.upstream and not args.then):
        raise InvalidArgument("--then and --policy go together", field="then")
    if not changes:
        _show(router_files.read(file, parse), args.alias)
        return 0
    new: dict[str, Alias] | None = {} if args.weights else None
    with router_files.changing(file, parse, new) as aliases:
        if args.weights:
            weights = _weights(args.weights)
            name = checked_name(args.alias, "name")
            known = aliases.get(name)
            aliases[name] = Alias(weights) if known is None else known.changed(weights)
        if (alias := aliases.get(args.alias)) is None:
            raise NotFound(f"{args.file} has no {args.alias!r}")
        if args.shadow:
            alias = replace(alias, shadow=_shadow(args.shadow))
        if args.then:
            alias = replace(alias, cascade=_cascade(args))
        if args.alone:
            alias = replace(alias, cascade=None)
        if args.back and not alias.former:
            raise NotFound(f"{args.alias!r} was never changed")
        if args.back:
            alias = alias.went_back()
        aliases[args.alias] = alias
        if args.remove:
            del aliases[args.alias]
        router_files.replace(file, render(aliases))
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


def _shadow(text: str) -> Shadow | None:
    """Returns None for a share of 0. Raises InvalidArgument."""
    model, _, share = text.rpartition("=")
    try:
        value = float(share)
    except ValueError:
        raise InvalidArgument(f"{text[:80]!r} must be MODEL=SHARE", field="shadow") from None
    return checked_shadow({"model": model, "share": value}, "shadow") if value else None


def _cascade(args: argparse.Namespace) -> Cascade:
    """Raises InvalidArgument."""
    try:
        with args.policy.open("rb") as file:
            policy = json.loads(file.read(MAX_POLICY_BYTES))
    except (OSError, ValueError, RecursionError):
        raise InvalidArgument(f"{args.policy} cannot be read, or is no policy") from None
    document = {"model": args.then, "policy": policy}
    if args.upstream:
        # Routers may run in another folder.
        files = {"key_file": args.upstream_key, "ca_file": args.upstream_ca}
        given = {name: str(Path(path).resolve()) for name, path in files.items() if path}
        document["upstream"] = {"address": args.upstream, **given}
    return cascade_from(document, "then")


def _show(aliases: dict[str, Alias], only: str | None) -> None:
    """Raises NotFound."""
    if only is not None and only not in aliases:
        raise NotFound(f"there is no name {only!r}")
    for name, alias in aliases.items():
        if only in (None, name):
            total = sum(weight for _, weight in alias.weights)
            parts = ", ".join(f"{model} {weight / total:.3g}" for model, weight in alias.weights)
            if alias.shadow is not None:
                parts += f"; unseen: {alias.shadow.model} {alias.shadow.share:.3g}"
            if (cascade := alias.cascade) is not None:
                where = f" at {cascade.upstream.address}" if cascade.upstream is not None else ""
                policy = cascade.policy
                parts += f"; {cascade.model}{where} below a {policy.kind.value} of "
                parts += f"{policy.threshold:.3g}"
            print(f"{name}: {parts}")
