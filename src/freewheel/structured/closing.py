# SPDX-License-Identifier: Apache-2.0
"""Objects of a simplified schema that have no properties but those that it names.

`simplify` counts on that: a property that an object must not have is one that it does not name.
Tables are made so; who reads a schema otherwise must be told.
"""

from __future__ import annotations

from typing import Any

from freewheel.structured.values import NOTES, Schema, Unclear

_PLAIN = frozenset(
    "type enum const $ref required items prefixItems properties additionalProperties anyOf allOf "
    "minItems maxItems minLength maxLength minimum maximum exclusiveMinimum exclusiveMaximum "
    "multipleOf pattern format".split()
)
"""Of these, less for a part is never more for the whole."""


def closed(schema: Any) -> Any:
    """Raises Unclear where a keyword stands that might allow more for what is closed within it."""
    if not isinstance(schema, dict):
        return schema
    if not schema.keys() <= _PLAIN | NOTES:
        raise Unclear
    found: Schema = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(found.get(name), dict):
            found[name] = {key: closed(one) for key, one in found[name].items()}
    for name in ("anyOf", "allOf", "prefixItems"):
        if isinstance(found.get(name), list):
            found[name] = [closed(one) for one in found[name]]
    if "items" in found:
        found["items"] = closed(found["items"])
    if "properties" in found:
        found["additionalProperties"] = False
    elif "additionalProperties" in found:
        found["additionalProperties"] = closed(found["additionalProperties"])
    return found
