# SPDX-License-Identifier: Apache-2.0
"""The requests that wait for a row, in the order in which they are to get one."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from freewheel.host.request import Request
from freewheel.host.tenants import Tenants

Line = list[Request]


class Queue:
    """Overdue requests first; then by priority, the lower value first; then fairly by tenants.

    Within a priority, whoever was preempted goes first, then the tenant that has been served least
    (`Tenants`), and of each tenant's requests the one that arrived first. Iterating gives that
    order as it would be if each were served in turn; it must not be changed meanwhile.
    """

    def __init__(self) -> None:
        self.tenants = Tenants()
        self.grammars = 0
        """How many of those waiting bring a grammar."""
        self._overdue: Line = []
        self._lines: dict[int, dict[str, Line]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        yield from self._overdue
        for priority in sorted(self._lines):
            yield from self._fairly(self._lines[priority])

    def add(self, request: Request) -> None:
        """A request waits, for the first time or again."""
        self._count += 1
        self.grammars += request.grammar is not None
        if request.overdue:
            insort(self._overdue, request, key=_arrival)
            return
        line = self._lines.setdefault(request.priority, {}).setdefault(request.tenant, [])
        insort(line, request, key=_arrival)

    def remove(self, request: Request) -> None:
        """It waits no longer. Raises ValueError if it does not wait."""
        if request.overdue:
            self._overdue.remove(request)
        else:
            tenants = self._lines.get(request.priority, {})
            line = tenants.get(request.tenant, [])
            line.remove(request)
            if not line:
                del tenants[request.tenant]
            if not tenants:
                del self._lines[request.priority]
        self._count -= 1
        self.grammars -= request.grammar is not None

    def hurry(self, request: Request) -> None:
        """It becomes overdue. Raises ValueError if it does not wait."""
        self.remove(request)
        request.overdue = True
        self.add(request)

    def heads(self) -> Iterator[Request]:
        """The first of every tenant at every priority, those overdue left out."""
        return (line[0] for tenants in self._lines.values() for line in tenants.values())

    def _fairly(self, lines: dict[str, Line]) -> Iterator[Request]:
        if len(lines) == 1:
            (line,) = lines.values()
            yield from line
            return
        served = {tenant: self.tenants.served(tenant) for tenant in lines}
        at = dict.fromkeys(lines, 0)
        while at:
            heads = {tenant: lines[tenant][index] for tenant, index in at.items()}
            tenant = min(heads, key=lambda t: (not heads[t].preempted, served[t], heads[t].arrival))
            yield heads[tenant]
            served[tenant] += heads[tenant].known
            at[tenant] += 1
            if at[tenant] == len(lines[tenant]):
                del at[tenant]


def _arrival(request: Request) -> int:
    return request.arrival
