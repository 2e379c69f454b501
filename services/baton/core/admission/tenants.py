"""Tenant, who pays for a request and what that party may use.

A limit of None is no limit. All token limits count prompt and output alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Tenant:
    """weight: its share of a busy fleet, relative to other tenants'. cache_salt: what its prefixes
    are keyed by; tenants with different salts never share KV. most_urgent: the smallest priority
    number it may ask for (smaller is more urgent); a request that asks for less is refused.
    """

    name: str = ""
    weight: float = 1.0
    cache_salt: bytes = b""
    most_urgent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_requests: int | None = None
    """At a time."""
    max_tokens: int | None = None
    """Of all its running and waiting requests together: prompts and the longest outputs."""
    address: str = ""
    """Where a caller without a name calls from; "" where that is not known."""

    operator: bool = False
    """The caller runs this Baton: it may see where workers are, what was predicted of them, and
    what other tenants do. Of the key that was shown, not of the tenant's other keys."""

    @property
    def sees_others(self) -> bool:
        """Whether it may see the load that all tenants make together. Without keys there are no
        other tenants."""
        return self.operator or not self.name

    @property
    def sharer(self) -> str:
        """Who shares what a router reads and encodes: tenants, and where there are none, callers
        by their addresses."""
        return self.name or self.address

    def salted(self, salt: bytes) -> bytes:
        """The salt of a request of this tenant that asked for one, or for b"". A tenant's own keys
        the hash, so that nobody's wish can name another tenant's.
        """
        if not self.cache_salt:
            return salt
        return blake2b(salt, digest_size=32, key=self.cache_salt, person=b"baton-salted").digest()


ANYONE = Tenant()
"""Whoever calls a router that asks for no keys and that other machines reach."""

OWNER = Tenant(operator=True)
"""Whoever calls a router that asks for no keys and that only its own machine reaches."""
