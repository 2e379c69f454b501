"""API keys, as their hashes, and whose they are.

A key is `baton-` and 256 random bits; what is kept is its BLAKE2b, keyed with the book's salt. That
is a fast hash on purpose. Slow ones make up for secrets that people choose: a list of likely ones
can be tried. There is no such list of 256-bit numbers, so the slowness would protect nothing, and
would let strangers spend the router's CPU by showing wrong keys.

A tenant's cache salt follows from its name and the book's salt, so no two tenants share KV unless
the book gives them the same `cache_group`.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b

from baton.core.admission.tenants import Tenant
from baton.core.errors import InvalidArgument

PREFIX = "baton-"
KEY_BYTES = 32
SALT_BYTES = 32
HASH_BYTES = 32
MAX_KEY_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """What a book says of one tenant; see `Tenant`. None: no limit."""

    weight: float = 1.0
    most_urgent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    cache_group: str = ""
    """Tenants of one group share KV; empty: a tenant shares with nobody."""


_LIMITS = tuple(f.name for f in fields(Limits) if f.name != "cache_group")


@dataclass(frozen=True, slots=True)
class Key:
    """id: names it to people. hash: all that is kept of it. created: when, in words. operator: as
    in `Tenant`, of this key alone."""

    id: str
    hash: bytes
    tenant: str
    created: str = ""
    operator: bool = False


@dataclass(frozen=True, slots=True)
class KeyBook:
    """Keys and tenants. All tenants of keys are there."""

    salt: bytes = field(default_factory=lambda: secrets.token_bytes(SALT_BYTES))
    tenants: Mapping[str, Limits] = field(default_factory=dict)
    keys: tuple[Key, ...] = ()

    def with_key(
        self, tenant: str, limits: Limits, created: str, *, operator: bool = False
    ) -> tuple[KeyBook, str]:
        """A book with one more key, and the key itself, which is not in the book."""
        text = PREFIX + secrets.token_urlsafe(KEY_BYTES)
        key = Key(f"k-{secrets.token_hex(4)}", self.hash(text), tenant, created, operator)
        tenants = {**self.tenants, tenant: limits}
        return replace(self, tenants=tenants, keys=(*self.keys, key)), text

    def without(self, key_id: str) -> KeyBook:
        """Raises InvalidArgument when there is no such key."""
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
        values = {name: getattr(limits, name) for name in _LIMITS}
        return Tenant(name=name, cache_salt=hasher.digest(), **values)


class KeyIndex:
    """Finds the tenant of a key.

    The table is looked up by the key's hash, so what its timing could tell is about a hash, which
    nobody can choose or turn back; the comparison that decides takes the same time whatever it is
    given.
    """

    def __init__(self, book: KeyBook) -> None:
        self._book = book
        tenants = {name: book.tenant(name) for name in book.tenants}
        self._found = {
            key.hash: (key.hash, replace(tenants[key.tenant], operator=key.operator))
            for key in book.keys
        }
        # A hash that no key has: the comparison happens for unknown keys too.
        self._nobody = (secrets.token_bytes(HASH_BYTES), Tenant())

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: str) -> Tenant | None:
        if len(key) > MAX_KEY_CHARACTERS or not key.isascii():
            return None
        shown = self._book.hash(key)
        known, tenant = self._found.get(shown, self._nobody)
        return tenant if hmac.compare_digest(shown, known) else None
