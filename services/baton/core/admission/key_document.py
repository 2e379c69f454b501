"""A KeyBook as one JSON document, and back.

    {"salt": "64 hex digits",
     "tenants": {"acme": {"tokens_per_minute": 100000, "weight": 2.0}},
     "keys": [{"id": "k-3f2a19c0", "hash": "64 hex digits", "tenant": "acme", "created": "..."},
              {"id": "k-77c0d1e2", ..., "tenant": "staff", "operator": true}]}

Every fault is an InvalidArgument whose field is the place in the document.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from baton.core.admission.api_keys import HASH_BYTES, SALT_BYTES, Key, KeyBook, Limits
from baton.core.errors import InvalidArgument

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LIMITS = tuple(f.name for f in fields(Limits))


def parse(text: str) -> KeyBook:
    """Raises InvalidArgument."""
    try:
        document = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise InvalidArgument("is not JSON", field="keys") from None
    whole = _table(document, "the document", ("salt", "tenants", "keys"))
    tenants = whole.get("tenants", {})
    if not isinstance(tenants, dict):
        raise InvalidArgument("must be an object", field="tenants")
    book = KeyBook(
        salt=_hex(whole.get("salt"), "salt", SALT_BYTES),
        tenants={checked_name(name): parse_limits(name, entry) for name, entry in tenants.items()},
    )
    listed = whole.get("keys", [])
    if not isinstance(listed, list):
        raise InvalidArgument("must be an array", field="keys")
    keys = tuple(_key(entry, f"keys[{i}]", book.tenants) for i, entry in enumerate(listed))
    for what, values in (("id", [k.id for k in keys]), ("hash", [k.hash for k in keys])):
        if len(set(values)) < len(values):
            raise InvalidArgument(f"two keys have the same {what}", field="keys")
    return replace(book, keys=keys)


def render(book: KeyBook) -> str:
    """What `parse` reads."""
    defaults = Limits()
    document = {
        "salt": book.salt.hex(),
        "tenants": {
            name: {
                limit: getattr(limits, limit)
                for limit in _LIMITS
                if getattr(limits, limit) != getattr(defaults, limit)
            }
            for name, limits in book.tenants.items()
        },
        "keys": [
            {"id": key.id, "hash": key.hash.hex(), "tenant": key.tenant, "created": key.created}
            | ({"operator": True} if key.operator else {})
            for key in book.keys
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def parse_limits(tenant: str, entry: object) -> Limits:
    """Raises InvalidArgument naming the limit."""
    where = f"tenants.{tenant}"
    table = _table(entry, where, _LIMITS)
    for name, value in table.items():
        _check_limit(f"{where}.{name}", name, value)
    return Limits(**table)


def checked_name(name: str) -> str:
    """Tenants' names go into metrics and logs."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name[:80]!r} must be 1 to 64 letters, digits, dots, hyphens and underscores and "
            "begin with a letter or digit",
            field="tenant",
        )
    return name


def _check_limit(where: str, name: str, value: object) -> None:
    match name:
        case "weight":
            fine = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not fine or not (math.isfinite(value) and value > 0):  # type: ignore[arg-type,operator]
                raise InvalidArgument("must be a number above 0", field=where)
        case "cache_group":
            if not isinstance(value, str) or (value and not _NAME.fullmatch(value)):
                raise InvalidArgument("must be a name", field=where)
        case _ if value is not None:
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidArgument("must be a whole number", field=where)
            if name != "most_urgent" and value < 1:
                raise InvalidArgument("must be at least 1", field=where)


def _key(entry: object, where: str, tenants: Mapping[str, Limits]) -> Key:
    table = _table(entry, where, ("id", "hash", "tenant", "created", "operator"))
    texts = {name: table.get(name, "") for name in ("id", "tenant", "created")}
    for name, value in texts.items():
        if not isinstance(value, str) or (name == "id" and not value):
            raise InvalidArgument("must be a text", field=f"{where}.{name}")
    if texts["tenant"] not in tenants:
        raise InvalidArgument("is none of tenants", field=f"{where}.tenant")
    operator = table.get("operator", False)
    if not isinstance(operator, bool):
        raise InvalidArgument("must be true or false", field=f"{where}.operator")
    key_hash = _hex(table.get("hash"), f"{where}.hash", HASH_BYTES)
    return Key(hash=key_hash, operator=operator, **texts)


def _table(value: object, where: str, known: Iterable[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument("must be an object", field=where)
    for name in value:
        if name not in known:
            raise InvalidArgument(f"has no place for {name[:80]!r}", field=where)
    return value


def _hex(value: object, where: str, size: int) -> bytes:
    try:
        found = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        found = b""
    if len(found) != size:
        raise InvalidArgument(f"must be {2 * size} hex digits", field=where)
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The second of two equal names would hide the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InvalidArgument("has a name twice", field="keys")
    return found


def _no_constant(_: str) -> Any:
    raise InvalidArgument("has a number that is none", field="keys")
