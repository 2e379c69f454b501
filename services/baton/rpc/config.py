"""Reads one process's configuration into its frozen dataclass.

Precedence: defaults < `--config FILE` (TOML) < environment `BATON_<FIELD>` < flags `--field-name`.
All values are checked once, here; nothing reads `os.environ` afterwards. A wrong value ends the
process with code 2 and one line that names the field, the value, its source and what is allowed.
Environment variables that match no field are ignored: they may belong to another process.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

from baton.core.errors import InvalidArgument

_BOOLS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a configuration dataclass: its name, type, and the arguments of `option`."""

    name: str
    type: Any
    default: Any
    help: str
    unit: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]
    required: bool
    secret: bool

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        if self.type is bool:
            return "true or false"
        if names := self.choices or _members(self.type):
            return "one of " + ", ".join(names)
        if self.type is str:
            return "text"
        if self.type in (int, float):
            kind = "a whole number" if self.type is int else "a number"
            return kind + self._range()
        return "a list of texts, comma separated"

    def _range(self) -> str:
        low, high = self.minimum, self.maximum
        if low is not None and high is not None:
            return f" from {_number(low)} to {_number(high)}"
        if low is not None:
            return f", at least {_number(low)}"
        return "" if high is None else f", at most {_number(high)}"


def parse(option: Option, value: object, source: str) -> Any:
    """The value converted to the field's type. `value` is text or a value that TOML parsed.

    Raises InvalidArgument that names field, value, source and what is allowed.
    """
    try:
        return _check(option, _convert(option, value))
    except (ValueError, KeyError, OverflowError):
        shown = "the value" if option.secret else repr(value)
        raise InvalidArgument(
            f"{shown} (from {source}) is not allowed; must be {option.allowed}", field=option.name
        ) from None


def render(option: Option, value: object) -> str:
    """The value as text that `parse` reads back; masked when secret."""
    if option.secret and value:
        return "***"
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value) or "''"
    return str(value) or "''"


def _convert(option: Option, value: object) -> object:
    """`value` in the option's type. Raises ValueError, KeyError or OverflowError."""
    if option.type is bool:
        return value if isinstance(value, bool) else _BOOLS.get(_text(value).lower())
    if option.type is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return int(_text(value))
    if option.type is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return float(_text(value))
    if option.type is str:
        return _text(value)
    if _members(option.type):
        return option.type[_text(value).upper()]
    if isinstance(value, list):
        return tuple(_text(item) for item in value)
    return tuple(item.strip() for item in _text(value).split(",") if item.strip())


def _check(option: Option, value: object) -> object:
    """The value if it is in range; otherwise raises ValueError."""
    if value is None:
        raise ValueError
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ValueError
        if option.minimum is not None and value < option.minimum:
            raise ValueError
        if option.maximum is not None and value > option.maximum:
            raise ValueError
    if option.choices:
        given = value if isinstance(value, tuple) else (value,)
        if not set(given) <= set(option.choices):
            raise ValueError
    return value


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value.strip()


def _members(kind: Any) -> tuple[str, ...]:
    """The names of an Enum in lower case; () for any other type."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(member.name.lower() for member in kind)
    return ()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?` when a known name is similar, otherwise ""."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def read(
    options: Mapping[str, Option], argv: Sequence[str], prog: str, description: str
) -> dict[str, str]:
    """The given flags, as text by field name, and `config`.

    A bool may stand alone, take a value, or be negated: --exact, --exact false, --no-exact. Raises
    InvalidArgument for an unknown flag; --help prints all flags and exits with code 0.
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
    """Raises InvalidArgument where argparse would print the usage and exit."""

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


T = TypeVar("T")
_OPTION = "baton.option"


def option(
    default: T,
    help: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    required: bool = False,
    secret: bool = False,
) -> T:
    """A field of a configuration dataclass.

    The field's annotation is str, int, float, bool, tuple[str, ...] (comma separated) or an Enum.
    minimum and maximum are inclusive. required: must be given and not empty. secret: never printed.
    """
    metadata = {
        "help": help,
        "unit": unit,
        "minimum": minimum,
        "maximum": maximum,
        "choices": tuple(choices),
        "required": required,
        "secret": secret,
    }
    made: T = dataclasses.field(default=default, metadata={_OPTION: metadata})
    return made


def load(
    cls: type[T],
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    prog: str,
) -> T:
    """The configuration of one process. argv and environ default to the process's own.

    Ends the process with code 2 on a wrong value, with code 0 after --help. Checks over several
    fields belong in the dataclass's `__post_init__`, which raises InvalidArgument.
    """
    options = options_of(cls)
    try:
        given = read(options, sys.argv[1:] if argv is None else argv, prog, cls.__doc__ or "")
        variables = os.environ if environ is None else environ
        file = given.pop("config", None) or variables.get("BATON_CONFIG", "")
        raw = _from_file(options, Path(file)) if file else {}
        raw |= {
            name: _Given(variables[variable], variable)
            for name in options
            if (variable := f"BATON_{name.upper()}") in variables
        }
        raw |= {name: _Given(text, flag(name)) for name, text in given.items()}
        values = {name: parse(options[name], it.value, it.source) for name, it in raw.items()}
        for name, spec in options.items():
            if spec.required and not values.get(name, spec.default):
                raise InvalidArgument(
                    f"is required: give {flag(name)} or BATON_{name.upper()}", field=name
                )
        return cls(**values)
    except InvalidArgument as error:
        _exit(prog, f"{error.field}: {error.message}" if error.field else error.message)


def describe(config: Any) -> str:
    """All values on one line, for the log at start. Secrets are masked."""
    options = options_of(type(config))
    return " ".join(f"{name}={render(o, getattr(config, name))}" for name, o in options.items())


def options_of(cls: type) -> dict[str, Option]:
    """The fields of a configuration dataclass, in order."""
    types = get_type_hints(cls)
    return {
        f.name: Option(name=f.name, type=types[f.name], default=f.default, **f.metadata[_OPTION])
        for f in dataclasses.fields(cls)
    }


@dataclass(frozen=True, slots=True)
class _Given:
    value: object
    source: str


def _from_file(options: Mapping[str, Option], path: Path) -> dict[str, _Given]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise InvalidArgument(f"{path}: {reason}", field="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} is not TOML: {error}", field="config") from None
    for name in table:
        if name not in options:
            raise InvalidArgument(
                f"{path} has an unknown key {name!r}{suggest(name, options)}", field="config"
            )
    return {name: _Given(value, str(path)) for name, value in table.items()}


def _exit(prog: str, message: str) -> NoReturn:
    print(f"{prog}: error: {message}", file=sys.stderr)
    raise SystemExit(2)
