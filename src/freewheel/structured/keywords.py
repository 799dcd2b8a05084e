# SPDX-License-Identifier: Apache-2.0
"""Keywords of a schema that nobody would enforce: misspelt ones, and those of other dialects.

Who follows a schema on the host passes over words that it does not know, as JSON Schema has it. So
they are looked for before anybody reads the schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from freewheel.spec.references import steps_of
from freewheel.structured.values import NOTES, Schema

_ENFORCED = frozenset(
    "type enum const $ref anyOf oneOf allOf not if then else "
    "properties required additionalProperties patternProperties propertyNames minProperties "
    "maxProperties dependentRequired unevaluatedProperties "
    "items prefixItems minItems maxItems uniqueItems contains minContains maxContains "
    "minLength maxLength pattern format "
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()
)
"""By a table or on the host, or refused by name where neither can."""
_SINGLE = frozenset(
    "items additionalItems contains additionalProperties propertyNames unevaluatedProperties not "
    "if then else".split()
)
_LISTS = frozenset("anyOf oneOf allOf prefixItems items".split())
_NAMED = frozenset("properties patternProperties $defs definitions".split())
_IN_WORDS: dict[type, str] = {dict: "an object", list: "a list", str: "text"}
_KINDS: dict[str, type] = {"properties": dict, "format": str, "pattern": str} | dict.fromkeys(
    ("required", "anyOf", "oneOf", "enum"), list
)
_PERCENT = re.compile("(?:%[0-9A-Fa-f]{2})+")


def bare(schema: Any) -> Any:
    """Without what vendors note for themselves, and words that say nothing as they stand.

    Those are `x-...` and `example`, `uniqueItems` and `nullable` where they are false; but not
    `x-guidance`, which asks for something.
    """
    if not isinstance(schema, dict):
        return schema
    own = {keyword: one for keyword, one in schema.items() if not _idle(keyword, one)}
    for keyword, operand in own.items():
        if keyword in _SINGLE:
            own[keyword] = bare(operand)
        elif keyword in _NAMED and isinstance(operand, dict):
            own[keyword] = {name: bare(one) for name, one in operand.items()}
        if keyword in _LISTS and isinstance(operand, list):
            own[keyword] = [bare(one) for one in operand]
    return own


def _idle(keyword: Any, operand: Any) -> bool:
    if keyword in ("uniqueItems", "nullable"):
        return operand is False
    if keyword in ("example", "x-guidance"):
        return keyword == "example"
    return isinstance(keyword, str) and keyword.startswith("x-")


def unenforced(schema: Any) -> str | None:
    """The first keyword that nobody enforces, in words: which, where, and what may be meant."""
    for where, part in _schemas(schema):
        for keyword in part:
            if not _known(keyword, part):
                near = get_close_matches(keyword, sorted(_ENFORCED | NOTES), 1, 0.75)
                meant = f"; did you mean {near[0]!r}?" if near else ""
                return f"uses {keyword!r} at {where}, which would not be enforced{meant}"
    return None


def misshapen(schema: Any) -> str | None:
    """The first keyword whose value is of no kind that it takes, in words."""
    for where, part in _schemas(schema):
        for keyword, kind in _KINDS.items():
            if keyword in part and not isinstance(part[keyword], kind):
                return f"has {keyword!r} at {where}, which is not {_IN_WORDS[kind]}"
        if not all(isinstance(name, str) for name in part.get("required", ())):
            return f"has 'required' at {where}, which does not list names"
    return None


def _schemas(schema: Any) -> Iterator[tuple[str, Schema]]:
    """It, and all inside, each once and with its place."""
    waiting, seen = [("#", schema)], set[int]()
    while waiting:
        where, part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield where, part
        inside = [(f"{where}/{name}", one) for name, one in _parts(part)]
        waiting += [*target(schema, part.get("$ref")), *reversed(inside)]


def _known(keyword: str, beside: Schema) -> bool:
    """Enforced where it stands, or no more than a name or a note there."""
    if keyword == "additionalItems":
        return isinstance(beside.get("items"), list)
    if keyword == "discriminator":
        return "oneOf" in beside or "anyOf" in beside
    if keyword in ("$anchor", "id"):
        return isinstance(beside[keyword], str)
    return keyword in _ENFORCED or keyword in NOTES


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas right inside, each with its place. Values and names are none."""
    for keyword, operand in schema.items() if isinstance(schema, dict) else ():
        if keyword in _SINGLE and isinstance(operand, dict):
            yield keyword, operand
        elif keyword in _NAMED and isinstance(operand, dict):
            yield from ((f"{keyword}/{name}", one) for name, one in operand.items())
        elif keyword in _LISTS and isinstance(operand, list):
            yield from ((f"{keyword}/{index}", one) for index, one in enumerate(operand))


def target(root: Mapping[str, Any], reference: Any) -> list[tuple[str, Any]]:
    """What a reference names may stand where no schema does otherwise, such as among examples."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return []
    found: Any = root
    for name in steps_of(_PERCENT.sub(_decoded, reference)):
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return []
    return [(reference, found)]


def _decoded(escape: re.Match[str]) -> str:
    return bytes.fromhex(escape.group().replace("%", "")).decode("utf-8", "replace")
