"""One process's command line: `--field-name VALUE` for every field."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from baton.core.errors import InvalidArgument
from baton.rpc.values import Option, render


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?` when a known name is near, else nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def read(
    options: Mapping[str, Option], argv: Sequence[str], prog: str, description: str
) -> dict[str, str]:
    """The flags that were given, as texts by field name, and `config`.

    A bool may stand alone, take a value, or be negated: --exact, --exact false, --no-exact. Raises
    InvalidArgument for a flag that is not known; --help prints all of them and exits with code 0.
    """
    parser = _Parser(
        prog=prog,
        description=f"{description.strip().splitlines()[0] if description.strip() else ''} "
        "Values come from defaults < --config FILE < BATON_<FIELD> < flags.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with values by field name")
    for name, spec in options.items():
        text = _help(spec)
        if spec.type is bool:
            parser.add_argument(
                flag(name), dest=name, nargs="?", const="true", metavar="BOOL", help=text
            )
            parser.add_argument(
                flag("no_" + name),
                dest=name,
                action="store_const",
                const="false",
                help=argparse.SUPPRESS,
            )
        else:
            parser.add_argument(flag(name), dest=name, metavar=_metavar(spec), help=text)
    found, unknown = parser.parse_known_args(list(argv))
    if unknown:
        known = [flag(name) for name in options]
        raise InvalidArgument(f"unknown argument {unknown[0]}{suggest(unknown[0], known)}")
    return vars(found)


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print a usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise InvalidArgument(message)


def _metavar(spec: Option) -> str:
    return (
        (spec.unit or spec.type.__name__).upper().replace(":", "_") if not spec.choices else "NAME"
    )


def _help(spec: Option) -> str:
    must = "required" if spec.required else f"default {render(spec, spec.default)}"
    unit = f" {spec.unit}" if spec.unit and not spec.required else ""
    return f"{spec.help} ({spec.allowed}; {must}{unit})".replace("%", "%%")
