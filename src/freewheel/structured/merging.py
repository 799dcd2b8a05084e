# SPDX-License-Identifier: Apache-2.0
"""What two schemas both allow, as one schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from freewheel.structured.values import (
    Nothing,
    Schema,
    Unclear,
    identity,
    satisfies,
    says,
    values_of,
)

_GREATER = "minimum exclusiveMinimum minLength minItems minProperties minContains"
_SMALLER = "maximum exclusiveMaximum maxLength maxItems maxProperties maxContains"

_ENTANGLED = frozenset(
    "prefixItems minContains maxContains if then else patternProperties unevaluatedProperties "
    "unevaluatedItems additionalItems $dynamicRef $recursiveRef".split()
)
"""What they say depends on the keywords beside them, so those of another schema cannot join."""


def merged(first: Any, second: Any) -> Schema:
    """Raises Nothing if no value satisfies both, Unclear if that is not worked out here."""
    one, other = _opened(first), _opened(second)
    for listed, rest in ((one, other), (other, one)):
        if "enum" in listed or "const" in listed:
            return _listed([value for value in _known(listed) if satisfies(value, rest)])
    if any(_ENTANGLED & part.keys() for part in (one, other) if len(one) and len(other)):
        raise Unclear
    found = dict(one)
    for keyword, operand in other.items():
        if keyword not in found:
            found[keyword] = operand
        elif identity(found[keyword]) != identity(operand):
            if keyword not in _RULES:
                raise Unclear
            found[keyword] = _RULES[keyword](found[keyword], operand)
    return _closed(found, one, other)


def kinds_of(schema: Schema) -> list[str] | None:
    """Its types; None: any."""
    kind = schema.get("type")
    return kind if isinstance(kind, list) or kind is None else [kind]


def names_in(told: Any) -> list[str]:
    """Raises Unclear for what is no list of names: a text is one of letters, to Python."""
    if not isinstance(told, list):
        raise Unclear
    return told


def apart(first: Any, second: Any) -> bool:
    """No value satisfies both, for certain."""
    try:
        merged(first, second)
    except Nothing:
        return True
    except Unclear:
        pass
    return False


def without(schema: Schema, name: str) -> Schema:
    """`schema`, an object's, for objects that have no property `name`. Raises Nothing."""
    if name in schema.get("required", ()):
        raise Nothing
    properties = {key: one for key, one in schema.get("properties", {}).items() if key != name}
    return schema | {"properties": properties}


def requiring(schema: Schema, name: str) -> Schema:
    """`schema` for objects that have the property `name`. Raises Nothing."""
    if name not in schema.get("properties", {}):
        raise Nothing
    return schema | {"required": list(dict.fromkeys([*names_in(schema.get("required", [])), name]))}


def _opened(schema: Any) -> Schema:
    if schema is False:
        raise Nothing
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise Unclear
    if "$ref" in schema:
        raise Unclear
    return says(schema)


def _listed(values: list[Any]) -> Schema:
    if not values:
        raise Nothing
    return {"enum": values}


def _known(schema: Schema) -> list[Any]:
    values = values_of(schema)
    if values is None:
        raise Unclear
    return values


def _types(first: Any, second: Any) -> Any:
    ours = first if isinstance(first, list) else [first]
    theirs = second if isinstance(second, list) else [second]
    found = [one for one in ours if one in theirs]
    whole = "integer" in ours and "number" in theirs, "number" in ours and "integer" in theirs
    if any(whole) and "integer" not in found and "number" not in found:
        found.append("integer")
    if not found:
        raise Nothing
    return found[0] if len(found) == 1 else found


def _properties(first: Schema, second: Schema) -> Schema:
    found = dict(first)
    for name, schema in second.items():
        try:
            found[name] = merged(first[name], schema) if name in first else schema
        except Nothing:
            found[name] = False
    return found


def _neither(first: Any, second: Any) -> Schema:
    values = values_of(first), values_of(second)
    if values[0] is None or values[1] is None:
        raise Unclear
    return {"enum": [*values[0], *values[1]]}


def _both(first: Any, second: Any) -> Any:
    if first is False or second is False:
        return False
    return merged(first, second)


_RULES: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "properties": _properties,
    "required": lambda first, second: list(dict.fromkeys([*names_in(first), *names_in(second)])),
    "additionalProperties": _both,
    "items": merged,
    "not": _neither,
    **dict.fromkeys(_GREATER.split(), max),
    **dict.fromkeys(_SMALLER.split(), min),
    "uniqueItems": lambda first, second: first or second,
}


def _closed(found: Schema, one: Schema, other: Schema) -> Schema:
    """Properties that one of the two does not know and does not allow are not there."""
    if "properties" not in found:
        return found
    for schema in (one, other):
        if schema.get("additionalProperties", True) is not True:
            if schema["additionalProperties"] is not False:
                raise Unclear
            for name in found["properties"]:
                if name not in schema.get("properties", {}):
                    found["properties"] = found["properties"] | {name: False}
    for name in [name for name, schema in found["properties"].items() if schema is False]:
        found = without(found, name)
    return found
