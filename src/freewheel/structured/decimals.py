# SPDX-License-Identifier: Apache-2.0
"""Expressions of numbers within bounds, spelt without exponents."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from freewheel.structured.values import Schema, Unclear

MAX_DIGITS = 64
"""Of a bound, before and behind the point."""
_ANY = r"(\.[0-9]+)?"
_ABOVE_ZERO = r"\.0*[1-9][0-9]*"

Bound = tuple[Decimal, bool]
"""A number, and whether it is itself excluded."""
Integers = Callable[[int | None, int | None], list[str]]


def bounds_of(rest: Schema) -> tuple[Bound | None, Bound | None]:
    """The tightest of a schema's bounds. Raises Unclear for one that is no number."""
    lows = _found(rest, "minimum", "exclusiveMinimum")
    highs = _found(rest, "maximum", "exclusiveMaximum")
    low = max(lows, default=None)  # of equal ones, the excluded
    high = min(highs, key=lambda one: (one[0], not one[1]), default=None)
    return low, high


def numbers(low: Bound | None, high: Bound | None, integers: Integers) -> list[str]:
    """Expressions of all numbers in between; none where there are none. `integers`: those of whole
    numbers, None: no bound. Raises Unclear for an interval that is not worked out here."""
    zero = Decimal(0)
    found: list[str] = []
    if low is None or low[0] < 0:
        least = (zero, high == (zero, True))
        if high is not None and high[0] < 0:
            least = (-high[0], high[1])
        most = None if low is None else (-low[0], low[1])
        found += [f"-{one}" for one in _counts(least, most, integers)]
    if high is None or high[0] >= 0:
        least = (zero, False) if low is None or low[0] < 0 else low
        found += _counts(least, high, integers)
    return found


def _found(rest: Schema, within: str, beyond: str) -> list[Bound]:
    found: list[Bound] = []
    for keyword, excluded in ((within, False), (beyond, True)):
        if keyword in rest:
            found.append((_decimal(rest[keyword]), excluded))
    return found


def _decimal(value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unclear  # draft 4 has booleans here
    found = Decimal(repr(value))
    if len(f"{found:f}") > MAX_DIGITS:
        raise Unclear
    return found


def _counts(low: Bound, high: Bound | None, integers: Integers) -> list[str]:
    """Of numbers that are not below zero."""
    whole, part = _parts(low[0])
    if high is None:
        found = [f"{one}{_ANY}" for one in integers(whole + 1, None)]
        return found + [f"{whole}{one}" for one in _from(part, low[1])]
    if low > high or (low[0] == high[0] and (low[1] or high[1])):
        return []
    top, rest = _parts(high[0])
    if whole == top:
        if part or low[1]:
            raise Unclear
        return [f"{top}{one}" for one in _to(rest, high[1])]
    found = [f"{whole}{one}" for one in _from(part, low[1])]
    found += [f"{one}{_ANY}" for one in integers(whole + 1, top - 1)]
    return found + [f"{top}{one}" for one in _to(rest, high[1])]


def _parts(value: Decimal) -> tuple[int, str]:
    """Before the point, and the digits behind it without zeros at the end."""
    whole, _, part = f"{value:f}".partition(".")
    return int(whole), part.rstrip("0")


def _from(part: str, excluded: bool) -> list[str]:
    """Of fractions from .`part` on."""
    if not part:
        return [_ABOVE_ZERO if excluded else _ANY]
    found = [rf"\.{part}[0-9]*[1-9][0-9]*" if excluded else rf"\.{part}[0-9]*"]
    for place, digit in enumerate(part):
        if digit != "9":
            found.append(rf"\.{part[:place]}[{int(digit) + 1}-9][0-9]*")
    return found


def _to(part: str, excluded: bool) -> list[str]:
    """Of fractions up to .`part`."""
    if not part:
        return [] if excluded else [r"(\.0+)?"]
    found = ["", *(rf"\.{part[:place]}" for place in range(1, len(part)))]
    if not excluded:
        found.append(rf"\.{part}0*")
    for place, digit in enumerate(part):
        if digit != "0":
            found.append(rf"\.{part[:place]}[0-{int(digit) - 1}][0-9]*")
    return found
