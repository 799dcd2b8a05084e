# SPDX-License-Identifier: Apache-2.0
"""Values and schemas: whether one satisfies the other, and which values there are if few."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Schema = dict[str, Any]

NOTES = frozenset(
    "title description default examples deprecated readOnly writeOnly $schema $id $comment "
    "$defs definitions discriminator".split()
)
"""Keywords that allow and forbid nothing."""
MAX_VALUES = 256
"""Values of a schema that are listed one by one."""


class Unclear(Exception):
    """Not worked out here: the schema is left as it is."""


class Nothing(Exception):
    """No value is left."""


AWRY = (Unclear, TypeError, AttributeError, ValueError, KeyError, ArithmeticError)
"""A schema that is not one, or not one for here: whoever reads on says why."""


def says(schema: Schema) -> Schema:
    """The keywords that allow or forbid something."""
    return {key: value for key, value in schema.items() if key not in NOTES}


def kind_of(value: Any) -> str:
    """JSON's type; whole numbers are integers, however they are spelt."""
    if value is None:
        return "null"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def identity(value: Any) -> Any:
    """Equal for values that JSON Schema calls equal, and hashable."""
    if isinstance(value, list):
        return ("array", *map(identity, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, identity(one)) for name, one in value.items()))
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return type(value).__name__, value
    return "number", Fraction(value)


def distinct(values: list[Any]) -> list[Any]:
    """Each value once."""
    return list({identity(one): one for one in reversed(values)}.values())[::-1]


def satisfies(value: Any, schema: Any) -> bool:
    """Raises Unclear where `schema` has a keyword that is not looked at here."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise Unclear
    for keyword, operand in says(schema).items():
        if keyword not in _CHECKS:
            raise Unclear
        if not _CHECKS[keyword](value, operand):
            return False
    return True


def values_of(schema: Any) -> list[Any] | None:
    """All values of `schema`, MAX_VALUES at most; None if they are more, or not clear."""
    if not isinstance(schema, dict):
        return None
    rest = says(schema)
    listed: list[Any] | None = rest.get("enum")
    if "const" in rest:
        listed = [rest["const"]]
    elif listed is None and set(rest) == {"anyOf"}:
        parts = [values_of(one) for one in rest["anyOf"]]
        found = [one for part in parts if part is not None for one in part]
        listed = None if None in parts else found
    elif listed is None:
        listed = _few(rest)
    if listed is None or len(listed) > MAX_VALUES:
        return None
    try:
        return distinct([one for one in listed if satisfies(one, rest)])
    except Unclear:
        return None


def _few(rest: Schema) -> list[Any] | None:
    kinds = rest.get("type")
    found: list[Any] = []
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind == "integer":
            low, high = bounds(rest)
            if low is None or high is None or high - low >= MAX_VALUES:
                return None
            found += range(low, high + 1)
        elif kind in ("boolean", "null"):
            found += [True, False] if kind == "boolean" else [None]
        else:
            return None
    return found


def bounds(rest: Schema) -> tuple[int | None, int | None]:
    """The least and the greatest integer that `rest` allows; None: no bound."""
    lows = [math.ceil(_number(rest["minimum"]))] if "minimum" in rest else []
    highs = [math.floor(_number(rest["maximum"]))] if "maximum" in rest else []
    if "exclusiveMinimum" in rest:
        lows.append(math.floor(_number(rest["exclusiveMinimum"])) + 1)
    if "exclusiveMaximum" in rest:
        highs.append(math.ceil(_number(rest["exclusiveMaximum"])) - 1)
    return max(lows, default=None), min(highs, default=None)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unclear  # draft 4 has booleans here
    return value


def _only(kind: type | tuple[type, ...], check: Callable[[Any, Any], bool]) -> Any:
    """Keywords say nothing of values of other types."""

    def applied(value: Any, operand: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, kind):
            return True
        return check(value, operand)

    return applied


def _of_type(value: Any, kinds: Any) -> bool:
    own = kind_of(value)
    wanted = kinds if isinstance(kinds, list) else [kinds]
    return own in wanted or (own == "integer" and "number" in wanted)


def _matches(value: str, pattern: Any) -> bool:
    try:
        return re.search(pattern, value, re.ASCII) is not None
    except (re.error, TypeError) as error:
        raise Unclear from error


_NUMBER = (int, float)
_CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "type": _of_type,
    "enum": lambda value, listed: identity(value) in map(identity, listed),
    "const": lambda value, one: identity(value) == identity(one),
    "not": lambda value, schema: not satisfies(value, schema),
    "anyOf": lambda value, parts: any(satisfies(value, one) for one in parts),
    "allOf": lambda value, parts: all(satisfies(value, one) for one in parts),
    "oneOf": lambda value, parts: sum([satisfies(value, one) for one in parts]) == 1,
    "minimum": _only(_NUMBER, lambda value, bound: value >= _number(bound)),
    "maximum": _only(_NUMBER, lambda value, bound: value <= _number(bound)),
    "exclusiveMinimum": _only(_NUMBER, lambda value, bound: value > _number(bound)),
    "exclusiveMaximum": _only(_NUMBER, lambda value, bound: value < _number(bound)),
    "multipleOf": _only(_NUMBER, lambda value, step: Fraction(value) % Fraction(step) == 0),
    "minLength": _only(str, lambda value, least: len(value) >= least),
    "maxLength": _only(str, lambda value, most: len(value) <= most),
    "pattern": _only(str, _matches),
}
