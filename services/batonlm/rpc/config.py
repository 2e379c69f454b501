"""Reads one process's configuration into its frozen dataclass.

Precedence: defaults < `--config FILE` (TOML) < environment `BATON_<FIELD>` < flags `--field-name`.
All values are checked once, here; nothing reads `os.environ` afterwards. A wrong value ends the
process with code 2 and one line that names the field, the value, its source and what is allowed.
Environment variables that match no field are ignored: they may belong to another process.

A configuration dataclass may list former options in a class variable REMOVED. They are ignored
with a warning, so that a rolling upgrade needs no change of flags at the same moment.
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
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec

from batonlm.core.errors import InvalidArgument

_WORDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "array": "a list of texts, comma separated",
}
"""What is allowed, by the type of the JSON schema."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a configuration dataclass, made by `option`."""

    name: str
    type: Any
    """The field's type as msgspec takes it: with its limits, its choices and its description."""
    default: Any
    choices: tuple[str, ...]
    """All allowed values; empty: the type and its limits say what is allowed."""
    unit: str
    required: bool
    """Whether it must be given and not be empty."""
    secret: bool
    """Whether its value is never printed."""

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of a value; `description` is the help text."""
        schema = msgspec.json.schema(self.type)
        if not self.choices:
            return schema
        # msgspec sorts the choices and leaves out their type.
        description = schema["description"]
        return {"description": description, "type": "string", "enum": list(self.choices)}

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        schema = self.schema
        if self.choices:
            return "one of " + ", ".join(self.choices)
        low, high = schema.get("minimum"), schema.get("maximum")
        words = _WORDS[schema["type"]]
        if low is not None and high is not None:
            return f"{words} from {low:.12g} to {high:.12g}"
        if low is not None:
            return f"{words}, at least {low:.12g}"
        return words if high is None else f"{words}, at most {high:.12g}"

    @property
    def metavar(self) -> str:
        """What stands for a value in the help."""
        if self.choices:
            return "NAME"
        return (self.unit or type(self.default).__name__).upper().replace(":", "_")

    @property
    def help(self) -> str:
        """The description with what is allowed, the default and the unit, for argparse."""
        unit = f" {self.unit}" if self.unit and self.default != "" else ""
        default = f"default {render(self, self.default)}{unit}"
        must = "required" if self.required else default
        return f"{self.schema['description']} ({self.allowed}; {must})".replace("%", "%%")


def parse(option: Option, value: object, source: str) -> Any:
    """The value converted to the field's type. `value` is text or a value that TOML parsed.

    Raises InvalidArgument that names field, value, source and what is allowed.
    """
    given = value
    if isinstance(value, str):
        given = value.strip()
        if isinstance(option.default, tuple):
            given = [item.strip() for item in value.split(",") if item.strip()]
    try:
        if isinstance(given, str) and isinstance(option.default, float):
            # msgspec takes the numbers of JSON only, and so neither .5 nor 5.
            given = float(given)
        made = msgspec.convert(given, option.type, strict=not isinstance(value, str))
        if not isinstance(made, float) or math.isfinite(made):
            return made
    except (msgspec.ValidationError, ValueError):
        pass
    shown = "the value" if option.secret else repr(value)
    raise InvalidArgument(
        f"{shown} (from {source}) is not allowed; must be {option.allowed}", field=option.name
    )


def render(option: Option, value: object) -> str:
    """The value as text that `parse` reads back; masked when secret."""
    if option.secret and value:
        return "***"
    if isinstance(value, bool):
        return str(value).lower()
    return (",".join(value) if isinstance(value, tuple) else str(value)) or "''"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?` when a known name is similar, otherwise ""."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _read(
    options: Mapping[str, Option],
    removed: Iterable[str],
    argv: Sequence[str],
    prog: str,
    description: str,
) -> dict[str, str]:
    """The given flags, as text by field name, and `config`. removed: former options.

    A bool may stand alone, take a value, or be negated: --exact, --exact false, --no-exact. Raises
    InvalidArgument for an unknown flag; --help prints all flags and exits with code 0.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=f"{description.partition(chr(10))[0]} "
        "Values come from defaults < --config FILE < BATON_<FIELD> < flags.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with values by field name")
    for name, spec in options.items():
        shown: dict[str, Any] = {"metavar": spec.metavar, "help": spec.help}
        if isinstance(spec.default, bool):
            shown |= {"nargs": "?", "const": "true"}
            parser.add_argument(
                flag("no_" + name),
                dest=name,
                action="store_const",
                const="false",
                help=argparse.SUPPRESS,
            )
        parser.add_argument(flag(name), dest=name, **shown)
    for name in removed:
        flags = flag(name), flag("no_" + name)
        parser.add_argument(*flags, dest=name, nargs="?", const="", help=argparse.SUPPRESS)
    try:
        found, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise InvalidArgument(str(error)) from None
    if unknown:
        known = [flag(name) for name in options]
        raise InvalidArgument(f"unknown argument {unknown[0]}{suggest(unknown[0], known)}")
    return vars(found)


T = TypeVar("T")


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

    The field's annotation is str, int, float, bool or tuple[str, ...] (comma separated). minimum
    and maximum are inclusive. required: must be given and not empty. secret: never printed.
    """
    metadata = {
        "meta": msgspec.Meta(description=help, ge=minimum, le=maximum),
        "choices": tuple(choices),
        "unit": unit,
        "required": required,
        "secret": secret,
    }
    made: T = dataclasses.field(default=default, metadata=metadata)
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
    removed: frozenset[str] = getattr(cls, "REMOVED", frozenset())
    try:
        flags = sys.argv[1:] if argv is None else argv
        given = _read(options, removed, flags, prog, cls.__doc__ or "")
        variables = os.environ if environ is None else environ
        file = given.pop("config", None) or variables.get("BATON_CONFIG", "")
        raw = _from_file([*options, *removed], Path(file)) if file else {}
        raw |= {
            name: (variables[variable], variable)
            for name in (*options, *removed)
            if (variable := f"BATON_{name.upper()}") in variables
        }
        raw |= {name: (text, flag(name)) for name, text in given.items()}
        for name in sorted(raw.keys() & removed):
            source = raw.pop(name)[1]
            print(
                f"{prog}: warning: {name} (from {source}) is ignored: it is no option any more, "
                "see docs/upgrading.md",
                file=sys.stderr,
            )
        values = {name: parse(options[name], *value) for name, value in raw.items()}
        for name, spec in options.items():
            if spec.required and not values.get(name, spec.default):
                raise InvalidArgument(
                    f"is required: give {flag(name)} or BATON_{name.upper()}", field=name
                )
        return cls(**values)
    except InvalidArgument as error:
        named = f"{error.field}: " if error.field else ""
        print(f"{prog}: error: {named}{error.message}", file=sys.stderr)
        raise SystemExit(2) from None


def describe(config: Any) -> str:
    """All values on one line, for the log at start. Secrets are masked."""
    options = options_of(type(config))
    return " ".join(f"{name}={render(o, getattr(config, name))}" for name, o in options.items())


def options_of(cls: type) -> dict[str, Option]:
    """The fields of a configuration dataclass, in order."""
    types = get_type_hints(cls)
    options = {}
    for field in dataclasses.fields(cls):
        facts = dict(field.metadata)
        kind = Literal[facts["choices"]] if facts["choices"] else types[field.name]
        annotated: Any = Annotated[kind, facts.pop("meta")]
        options[field.name] = Option(field.name, annotated, field.default, **facts)
    return options


def _from_file(known: Sequence[str], path: Path) -> dict[str, tuple[object, str]]:
    """The values of a TOML file, each with its source."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise InvalidArgument(f"{path}: {reason}", field="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} is not TOML: {error}", field="config") from None
    for name in table:
        if name not in known:
            raise InvalidArgument(
                f"{path} has an unknown key {name!r}{suggest(name, known)}", field="config"
            )
    return {name: (value, str(path)) for name, value in table.items()}
