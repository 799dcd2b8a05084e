# SPDX-License-Identifier: Apache-2.0
"""How much of the engine each tenant has had, so that a busy one takes nothing from others."""

from __future__ import annotations


class Tenants:
    """Tokens served to each tenant: of prompts as they are admitted, of answers as they come.

    A tenant that comes back after a pause starts no lower than the least served of those present:
    what it did not use is not saved up (virtual token counters: Sheng et al. 2024, "Fairness in
    Serving Large Language Models", algorithm 2). What a tenant had in excess of others is
    remembered until they have caught up.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._live: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._served)

    def served(self, tenant: str) -> int:
        """Tokens; comparable between tenants with live requests."""
        return self._served.get(tenant, 0)

    def has(self, tenant: str) -> bool:
        """The tenant has live requests."""
        return tenant in self._live

    def enter(self, tenant: str) -> None:
        """One more live request of the tenant."""
        if tenant not in self._live:
            floor = min((self._served[one] for one in self._live), default=0)
            self._forget(floor)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
        self._live[tenant] = self._live.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """One live request less."""
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]
        if not self._live:
            self._served.clear()

    def charge(self, tenant: str, tokens: int) -> None:
        """The tenant, which has a live request, got so many tokens."""
        self._served[tenant] += tokens

    def _forget(self, floor: int) -> None:
        """Drop those that are away and owe nothing."""
        for tenant in [t for t, n in self._served.items() if n <= floor and t not in self._live]:
            del self._served[tenant]
