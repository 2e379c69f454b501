"""API keys, stored as hashes, and their tenants.

A key is `baton-` and 256 random bits. Its BLAKE2b hash is stored, keyed with the book's salt. A
fast hash is intended: slow hashes protect guessable secrets such as passwords, for which a list of
likely values exists. 256 random bits cannot be guessed, so a slow hash would add no protection and
would let strangers spend the router's CPU with wrong keys.

A tenant's cache salt is derived from its name and the book's salt, so no two tenants share KV
unless the book gives them the same `cache_group`.
"""

from __future__ import annotations

import hmac
import json
import math
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any

from batonlm.core.admission.tenants import ANY_ADAPTER, AdapterLimits, Tenant
from batonlm.core.errors import InvalidArgument
from batonlm.core.request.validation import check_adapter_name
from batonlm.core.routing.documents import checked_object

PREFIX = "baton-"
KEY_BYTES = 32
SALT_BYTES = 32
HASH_BYTES = 32
MAX_KEY_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of one tenant; see `Tenant`. None: no limit."""

    weight: float = 1.0
    most_urgent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    cache_group: str = ""
    """Tenants of one group share KV; empty: the tenant shares with no other."""
    adapters: Mapping[str, AdapterLimits] = field(default_factory=dict)
    """By the name of a LoRA adapter, or ANY_ADAPTER for each that has none here."""


@dataclass(frozen=True, slots=True)
class Key:
    """The stored part of an API key."""

    id: str
    """A readable name of the key."""
    hash: bytes
    """The hash of the key; the key itself is not stored."""
    tenant: str
    created: str = ""
    """Date of creation, as text."""
    operator: bool = False
    """As in `Tenant`, for this key only."""


@dataclass(frozen=True, slots=True)
class KeyBook:
    """Keys and tenants. Every key's tenant is in `tenants`."""

    salt: bytes = field(default_factory=lambda: secrets.token_bytes(SALT_BYTES))
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    keys: tuple[Key, ...] = ()

    def with_key(
        self, tenant: str, limits: TenantLimits, created: str, *, operator: bool = False
    ) -> tuple[KeyBook, str]:
        """Returns a book with one more key, and the key itself, which is not in the book."""
        text = PREFIX + secrets.token_urlsafe(KEY_BYTES)
        key = Key(f"k-{secrets.token_hex(4)}", self.hash(text), tenant, created, operator)
        tenants = {**self.tenants, tenant: limits}
        return replace(self, tenants=tenants, keys=(*self.keys, key)), text

    def without(self, key_id: str) -> KeyBook:
        """Returns a book without a key. Raises InvalidArgument when there is no such key."""
        kept = tuple(key for key in self.keys if key.id != key_id)
        if len(kept) == len(self.keys):
            raise InvalidArgument(f"there is no key {key_id!r}", field="id")
        return replace(self, keys=kept)

    def hash(self, key: str) -> bytes:
        hasher = blake2b(digest_size=HASH_BYTES, key=self.salt, person=b"baton-api-key")
        hasher.update(key.encode())
        return hasher.digest()

    def tenant(self, name: str) -> Tenant:
        limits = self.tenants[name]
        shared = f"group {limits.cache_group}" if limits.cache_group else f"tenant {name}"
        hasher = blake2b(digest_size=HASH_BYTES, key=self.salt, person=b"baton-kv-salt")
        hasher.update(shared.encode())
        values = asdict(limits) | {"adapters": limits.adapters}
        del values["cache_group"]
        return Tenant(name=name, cache_salt=hasher.digest(), **values)


class KeyIndex:
    """Finds the tenant of a key.

    The table is indexed by the key's hash, so timing can reveal only facts about a hash, which an
    attacker can neither choose nor invert. The final comparison takes constant time.
    """

    def __init__(self, book: KeyBook) -> None:
        self._book = book
        tenants = {name: book.tenant(name) for name in book.tenants}
        self._found = {
            key.hash: (key.hash, replace(tenants[key.tenant], operator=key.operator))
            for key in book.keys
        }
        # The comparison runs for unknown keys, too, against a hash that no key has.
        self._nobody = (secrets.token_bytes(HASH_BYTES), Tenant())

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: str) -> Tenant | None:
        if len(key) > MAX_KEY_CHARACTERS or not key.isascii():
            return None
        shown = self._book.hash(key)
        known, tenant = self._found.get(shown, self._nobody)
        return tenant if hmac.compare_digest(shown, known) else None


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LIMITS = tuple(f.name for f in fields(TenantLimits))
_ADAPTER_LIMITS = tuple(f.name for f in fields(AdapterLimits))


def parse(text: str) -> KeyBook:
    """Returns the KeyBook of one JSON document:

        {"salt": "64 hex digits",
         "tenants": {"acme": {"tokens_per_minute": 100000, "weight": 2.0,
                              "adapters": {"french": {"requests_per_minute": 60}}}},
         "keys": [{"id": "k-3f2a19c0", "hash": "64 hex digits", "tenant": "acme", "created": ".."},
                  {"id": "k-77c0d1e2", ..., "tenant": "staff", "operator": true}]}

    Raises InvalidArgument whose field is the place in the document.
    """
    try:
        document = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise InvalidArgument("is not JSON", field="keys") from None
    whole = _table(document, "the document", ("salt", "tenants", "keys"))
    tenants = checked_object(whole.get("tenants", {}), "tenants")
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
    """Returns the JSON that `parse` reads."""
    document = {
        "salt": book.salt.hex(),
        "tenants": {
            name: _changed(limits, TenantLimits())
            | (
                {"adapters": {n: _changed(a, AdapterLimits()) for n, a in limits.adapters.items()}}
                if limits.adapters
                else {}
            )
            for name, limits in book.tenants.items()
        },
        "keys": [
            {"id": key.id, "hash": key.hash.hex(), "tenant": key.tenant, "created": key.created}
            | ({"operator": True} if key.operator else {})
            for key in book.keys
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def parse_limits(tenant: str, entry: object) -> TenantLimits:
    """Raises InvalidArgument naming the limit."""
    where = f"tenants.{tenant}"
    table = dict(_table(entry, where, _LIMITS))
    adapters = checked_object(table.pop("adapters", {}), f"{where}.adapters")
    for name, value in table.items():
        _check_limit(f"{where}.{name}", name, value)
    return TenantLimits(
        **table,
        adapters={
            name: _adapter_limits(f"{where}.adapters.{name[:80]}", name, limits)
            for name, limits in adapters.items()
        },
    )


def _adapter_limits(where: str, name: str, entry: object) -> AdapterLimits:
    if name != ANY_ADAPTER:
        try:
            check_adapter_name(name)
        except InvalidArgument as error:
            raise InvalidArgument(error.message, field=where) from None
    table = _table(entry, where, _ADAPTER_LIMITS)
    for limit, value in table.items():
        _check_limit(f"{where}.{limit}", limit, value)
    return AdapterLimits(**table)


def _changed(limits: TenantLimits | AdapterLimits, defaults: object) -> dict[str, Any]:
    """Those that differ from the defaults, but for adapters."""
    return {
        limit.name: getattr(limits, limit.name)
        for limit in fields(limits)
        if limit.name != "adapters" and getattr(limits, limit.name) != getattr(defaults, limit.name)
    }


def checked_name(name: str) -> str:
    """Returns the name of a tenant. Raises InvalidArgument for one that is unfit for metrics and
    logs."""
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


def _key(entry: object, where: str, tenants: Mapping[str, TenantLimits]) -> Key:
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
    table = checked_object(value, where)
    for name in table:
        if name not in known:
            raise InvalidArgument(f"has no place for {name[:80]!r}", field=where)
    return table


def _hex(value: object, where: str, size: int) -> bytes:
    try:
        found = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        found = b""
    if len(found) != size:
        raise InvalidArgument(f"must be {2 * size} hex digits", field=where)
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises InvalidArgument for a repeated name, which would hide the earlier value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InvalidArgument("has a name twice", field="keys")
    return found


def _no_constant(_: str) -> Any:
    raise InvalidArgument("has a number that is none", field="keys")
