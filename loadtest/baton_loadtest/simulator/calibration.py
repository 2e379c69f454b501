"""Reads the speeds and sizes of a fleet's workers from a JSON file, and reports faulty fields.

    {"model": {"max_model_len": 131072, "kv_bytes_per_position": 131072},
     "prefill": {"num_blocks": 8000, "block_size": 64, "step_tokens": 8192, "speed": {…}},
     "decode": {…}}

A speed's fields are those of core's WorkerSpeed, as workers report them; the others are those of
the simulator's WorkerFacts. prefill may be absent if no worker has that role.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict

from baton_loadtest.simulator.settings import WorkerFacts
from batonlm.core.errors import InvalidArgument
from batonlm.core.routing.load import UNMEASURED, WorkerSpeed

Whole = Annotated[int, msgspec.Meta(ge=1)]
Number = Annotated[float, msgspec.Meta(ge=0)]


class _Model(Struct, forbid_unknown_fields=True):
    max_model_len: Whole
    kv_bytes_per_position: Whole
    name: str = ""


_Speed = msgspec.defstruct(
    "_Speed",
    [(field.name, Number, 0.0) for field in fields(WorkerSpeed)],
    forbid_unknown_fields=True,
)


class _Worker(Struct, forbid_unknown_fields=True):
    speed: _Speed  # type: ignore[valid-type]  # made of the fields of WorkerSpeed
    num_blocks: Whole
    block_size: Whole | UnsetType = UNSET
    step_tokens: Whole | UnsetType = UNSET
    max_running: Whole | UnsetType = UNSET
    batch_window_s: Number | UnsetType = UNSET
    drafts_right: Number | UnsetType = UNSET
    draft_s: Number | UnsetType = UNSET


class _File(Struct, forbid_unknown_fields=True):
    model: _Model
    decode: _Worker
    prefill: _Worker | UnsetType = UNSET


_PATH = re.compile(r" - at `\$\.?([^`]*)`")
_NAMED = re.compile(r"field `([^`]*)`")
"""Where msgspec's report of a wrong value has the path, and the name of a field below it."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The facts of both roles."""

    prefill: WorkerFacts
    decode: WorkerFacts
    kv_bytes: int
    """Bytes of one position on the wire."""
    max_model_len: int


def read_speeds(path: Path) -> Calibration:
    """Raises InvalidArgument with file and field."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        prefill = WorkerFacts(UNMEASURED, 1)
        if file.prefill is not UNSET:
            prefill = _facts(file.prefill, "prefill")
        decode = _facts(file.decode, "decode")
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="speed") from None
    except msgspec.ValidationError as error:
        report = str(error)
        names = [found[1] for found in (_PATH.search(report), _NAMED.search(report)) if found]
        text = f"{path}: {_PATH.sub('', report)}"
        raise InvalidArgument(text, field=".".join(names)) from None
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{path} is no JSON", field="speed") from None
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error.message}", field=error.field) from None
    return Calibration(prefill, decode, file.model.kv_bytes_per_position, file.model.max_model_len)


def _facts(worker: _Worker, where: str) -> WorkerFacts:
    values: dict[str, Any] = {k: v for k, v in asdict(worker).items() if v is not UNSET}
    values["speed"] = WorkerSpeed(**asdict(worker.speed))
    try:
        return WorkerFacts(**values)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=f"{where}.{error.field}") from None
