"""Deficits, which tenant is next: deficit round robin, by tokens.

Deficit round robin (Shreedhar and Varghese, "Efficient fair queueing using deficit round robin",
SIGCOMM 1995) in its surplus form (Adiseshu, Parulkar and Varghese, SIGCOMM 1996): a tenant may
serve while its deficit is above zero and pays afterwards, so what serving will cost need not be
known in advance. A round gives every tenant that takes part quantum x weight tokens. Whenever two
tenants both have work all the time, what they were served, divided by their weights, differs by no
more than a quantum and the largest single services, however long it goes on.

Rounds are counted, not run: a tenant's place follows from how many of them it still has to wait.
"""

from __future__ import annotations

MAX_DEBTORS = 1024
"""Tenants that are kept only because they still owe."""


class Deficits:
    """quantum: tokens that a round gives to a tenant of weight 1."""

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum
        self._deficits: dict[str, float] = {}
        """In the order of the ring; those who left and still owe among them."""
        self._weights: dict[str, float] = {}
        """Of those who take part."""

    def join(self, tenant: str, weight: float) -> None:
        """The tenant has work. Joining again changes only the weight."""
        if tenant not in self._weights:
            # At the ring's end: coming and going must not be a way to be first.
            self._deficits[tenant] = self._deficits.pop(tenant, 0.0)
        self._weights[tenant] = weight

    def leave(self, tenant: str) -> None:
        """The tenant has no work. A debt is kept, a turn that was not used up is not."""
        self._weights.pop(tenant, None)
        if not self._weights:
            self._deficits.clear()
        elif self._deficits.get(tenant, 0.0) >= 0:
            self._deficits.pop(tenant, None)
        elif len(self._deficits) - len(self._weights) > MAX_DEBTORS:
            oldest = next(name for name in self._deficits if name not in self._weights)
            del self._deficits[oldest]

    def members(self) -> set[str]:
        """All who take part."""
        return set(self._weights)

    def copy(self) -> Deficits:
        """Another one like this, to try things out on."""
        made = Deficits(self._quantum)
        made._deficits, made._weights = self._deficits.copy(), self._weights.copy()
        return made

    def order(self) -> list[str]:
        """All who take part, who is next first."""
        places = {name: place for place, name in enumerate(self._deficits)}
        return sorted(self._weights, key=lambda name: (self._rounds(name), places[name]))

    def charge(self, tenant: str, tokens: float) -> None:
        """The tenant was served. Unknown ones are no error: they had no one to share with."""
        if tenant not in self._weights:
            if tenant in self._deficits:
                self._deficits[tenant] -= tokens
            return
        self._run(self._rounds(tenant))
        self._deficits[tenant] -= tokens
        if self._deficits[tenant] <= 0:
            self._deficits[tenant] = self._deficits.pop(tenant)

    def give_back(self, tenant: str, tokens: float) -> None:
        """The tenant was charged more than it used."""
        if tenant in self._deficits:
            self._deficits[tenant] = min(self._turn(tenant), self._deficits[tenant] + tokens)

    def _turn(self, tenant: str) -> float:
        return self._quantum * self._weights.get(tenant, 1.0)

    def _rounds(self, tenant: str) -> int:
        """How many rounds until the tenant may serve."""
        deficit = self._deficits[tenant]
        return 0 if deficit > 0 else int(-deficit // self._turn(tenant)) + 1

    def _run(self, rounds: int) -> None:
        """A turn that was not taken is not saved up; a debt is paid off, also by a tenant that is
        not here."""
        if not rounds:
            return
        for name, deficit in list(self._deficits.items()):
            turn = self._turn(name)
            self._deficits[name] = min(turn, deficit + rounds * turn)
            if name not in self._weights and self._deficits[name] >= 0:
                del self._deficits[name]
