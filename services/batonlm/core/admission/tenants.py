"""Tenant: the party that a request is accounted to, and its limits.

A limit of None is no limit. All token limits count prompt and output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

ANY_ADAPTER = "*"
"""Stands for each adapter without limits of its own."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The limits of one tenant's use of one LoRA adapter, within its limits for everything."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """The party that a request is accounted to."""

    name: str = ""
    weight: float = 1.0
    """Its share of a busy fleet relative to other tenants."""
    cache_salt: bytes = b""
    """Part of the hash of its prefixes. Tenants with different salts never share KV."""
    most_urgent: int | None = None
    """The smallest priority number that it may request (smaller is more urgent). A smaller one is
    refused."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_requests: int | None = None
    """Running and waiting at the same time."""
    max_tokens: int | None = None
    """Of all its running and waiting requests together: prompts and longest outputs."""
    adapters: Mapping[str, AdapterLimits] = field(default_factory=dict, hash=False)
    """By name, or ANY_ADAPTER."""
    address: str = ""
    """The address of a caller without a name; "" when unknown."""

    operator: bool = False
    """Whether the caller operates this Baton. An operator may see worker addresses, predictions
    about workers, and other tenants' requests. It is a property of the API key, not of the tenant's
    other keys."""

    @property
    def sees_others(self) -> bool:
        """Whether it may see the load of all tenants together. Without keys there are no other
        tenants."""
        return self.operator or not self.name

    @property
    def sharer(self) -> str:
        """The unit that shares input room fairly: the tenant or, without keys, the caller's
        address."""
        return self.name or self.address

    def of_adapter(self, adapter: str) -> Tenant | None:
        """The account of its use of one adapter, with the limits of that; None without limits."""
        limits = self.adapters.get(adapter) or self.adapters.get(ANY_ADAPTER)
        if limits is None:
            return None
        return replace(
            self,
            # No tenant's own name has a space.
            name=f"{self.name} {adapter}",
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            max_requests=None,
            max_tokens=None,
            adapters={},
        )

    def salted(self, salt: bytes) -> bytes:
        """Returns the cache salt of a request of this tenant. The tenant's own salt keys the hash,
        so that no requested salt can collide with another tenant's."""
        if not self.cache_salt:
            return salt
        return blake2b(salt, digest_size=32, key=self.cache_salt, person=b"baton-salted").digest()


ANYONE = Tenant()
"""Any caller of a router without keys that other machines can reach."""

OWNER = Tenant(operator=True)
"""Any caller of a router without keys that only its own machine can reach."""
