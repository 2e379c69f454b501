"""Reads one process's configuration into its frozen dataclass.

Defaults < `--config FILE` (TOML) < environment `BATON_<FIELD>` < flags `--field-name`. Everything
is checked once, here; nothing reads `os.environ` afterwards. A wrong value ends the process with
code 2 and one line that names the field, the value, where it came from and what is allowed.
Variables of the environment that are no field are ignored: they may belong to another process.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

from baton.core.errors import InvalidArgument
from baton.rpc import flags
from baton.rpc.values import Option, parse, render

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

    Its annotation is str, int, float, bool, tuple[str, ...] (comma separated) or an Enum. minimum
    and maximum are inclusive. required: must be given and not empty. secret: never printed.
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

    Ends the process with code 2 on a wrong value, with code 0 after --help. A check over several
    fields belongs into the dataclass's `__post_init__`, which raises InvalidArgument.
    """
    options = options_of(cls)
    try:
        given = flags.read(options, sys.argv[1:] if argv is None else argv, prog, cls.__doc__ or "")
        variables = os.environ if environ is None else environ
        file = given.pop("config", None) or variables.get("BATON_CONFIG", "")
        raw = _from_file(options, Path(file)) if file else {}
        raw |= {
            name: _Given(variables[variable], variable)
            for name in options
            if (variable := f"BATON_{name.upper()}") in variables
        }
        raw |= {name: _Given(text, flags.flag(name)) for name, text in given.items()}
        values = {name: parse(options[name], it.value, it.source) for name, it in raw.items()}
        for name, spec in options.items():
            if spec.required and not values.get(name, spec.default):
                raise InvalidArgument(
                    f"is required: give {flags.flag(name)} or BATON_{name.upper()}", field=name
                )
        return cls(**values)
    except InvalidArgument as error:
        _exit(prog, f"{error.field}: {error.message}" if error.field else error.message)


def describe(config: Any) -> str:
    """All values on one line, as they are printed at start. Secrets are masked."""
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
                f"{path} has an unknown key {name!r}{flags.suggest(name, options)}", field="config"
            )
    return {name: _Given(value, str(path)) for name, value in table.items()}


def _exit(prog: str, message: str) -> NoReturn:
    print(f"{prog}: error: {message}", file=sys.stderr)
    raise SystemExit(2)
