"""Reads the speeds and sizes of a fleet's workers from a JSON file, and reports faulty fields.

    {"model": {"max_model_len": 131072, "kv_bytes_per_position": 131072},
     "prefill": {"num_blocks": 8000, "block_size": 64, "step_tokens": 8192, "speed": {…}},
     "decode": {…}}

A speed's fields are those of core's WorkerSpeed, as workers report them; the others are those of
the simulator's WorkerFacts. prefill may be absent if no worker has that role.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from baton.core.errors import InvalidArgument
from baton.core.routing.load import UNMEASURED, WorkerSpeed
from baton_loadtest.simulator.settings import WorkerFacts

_SPEED = {field.name for field in fields(WorkerSpeed)}


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
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="speed") from None
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{path} is no JSON", field="speed") from None
    try:
        return _calibration(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error.message}", field=error.field) from None


def _calibration(value: Any) -> Calibration:
    parts = _object(value, "", {"model", "prefill", "decode"})
    model = _object(parts.get("model"), "model", {"name", "max_model_len", "kv_bytes_per_position"})
    decode = _worker(parts.get("decode"), "decode")
    prefill = WorkerFacts(UNMEASURED, 1)
    if "prefill" in parts:
        prefill = _worker(parts["prefill"], "prefill")
    return Calibration(
        prefill,
        decode,
        _whole(model.get("kv_bytes_per_position"), "model.kv_bytes_per_position"),
        _whole(model.get("max_model_len"), "model.max_model_len"),
    )


def _worker(value: Any, where: str) -> WorkerFacts:
    whole = {"num_blocks", "block_size", "step_tokens", "max_running"}
    found = _object(value, where, {"speed", "batch_window_s"} | whole)
    values: dict[str, Any] = {}
    for name in whole & found.keys():
        values[name] = _whole(found[name], f"{where}.{name}")
    if "batch_window_s" in found:
        values["batch_window_s"] = _number(found["batch_window_s"], f"{where}.batch_window_s")
    if "num_blocks" not in values:
        raise InvalidArgument("is missing", field=f"{where}.num_blocks")
    speed = _object(found.get("speed"), f"{where}.speed", _SPEED)
    numbers: dict[str, Any] = {
        name: _number(value, f"{where}.speed.{name}") for name, value in speed.items()
    }
    try:
        return WorkerFacts(WorkerSpeed(**numbers), **values)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=f"{where}.{error.field}") from None


def _object(value: Any, where: str, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument("must be an object", field=where)
    unknown = sorted(value.keys() - known)
    if unknown:
        field = f"{where}.{unknown[0]}" if where else unknown[0]
        raise InvalidArgument(f"is not known; there are {', '.join(sorted(known))}", field=field)
    return value


def _whole(value: Any, field: str) -> int:
    if type(value) is not int or value < 1:
        raise InvalidArgument("must be a whole number from 1 on", field=field)
    return value


def _number(value: Any, field: str) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value < float("inf")
    ):
        raise InvalidArgument("must be a number from 0 on", field=field)
    return float(value)
