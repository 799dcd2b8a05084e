# SPDX-License-Identifier: Apache-2.0
"""How many properties an object may have, said by which of them it has."""

from __future__ import annotations

import math
from contextlib import suppress

from freewheel.structured.merging import kinds_of, requiring, without
from freewheel.structured.values import Nothing, Schema

MAX_BRANCHES = 64
"""Alternatives that one schema may be taken apart into."""


def counted(rest: Schema) -> list[Schema]:
    """Without bounds that hold for whatever is named and required, or by alternatives."""
    found = dict(rest)
    if kinds_of(rest) == ["object"] and "properties" in rest:
        named, needed = len(rest["properties"]), len(set(rest.get("required", ())))
        if rest.get("minProperties", 0) <= needed:
            found.pop("minProperties", None)
        if rest.get("maxProperties", named) >= named:
            found.pop("maxProperties", None)
        if "minProperties" in found:
            return _at_least(found, found["minProperties"] - needed)
    return [found]


def _at_least(rest: Schema, more: int) -> list[Schema]:
    """By which is the first that is there of the properties that are not required. `more`: how many
    of these are."""
    free = [name for name in rest["properties"] if name not in rest.get("required", ())]
    if not 0 < math.comb(len(free), more) <= MAX_BRANCHES:
        return [rest]
    found: list[Schema] = []
    for name in free[: len(free) - more + 1]:
        with suppress(Nothing):
            found.append(requiring(rest, name))
        rest = without(rest, name)
    return found
