# SPDX-License-Identifier: Apache-2.0
"""Schemas of tools' arguments: what of them no grammar of calls would keep is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freewheel.errors import RequestError
from freewheel.structured.keywords import bare, misshapen, target, unenforced
from freewheel.structured.lark import TEXT_FORMATS
from freewheel.structured.simplify import simplified
from freewheel.structured.values import NOTES, Nothing

Schema = Mapping[str, Any]

LEVELS = 16
"""References and choices inside one another that are followed."""

_LISTED = frozenset(
    "type properties required additionalProperties patternProperties unevaluatedProperties".split()
)
"""Of an object whose arguments stand one behind another: none but those that it names are written,
so what it says of others holds."""
_TEXT = frozenset("type pattern minLength maxLength format".split())
_OF_OTHERS = frozenset(
    "properties required additionalProperties patternProperties unevaluatedProperties "
    "minProperties maxProperties items prefixItems additionalItems minItems maxItems uniqueItems "
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()
)
"""Say nothing of strings."""


def kept(name: str, schema: Schema | None) -> Schema | None:
    """The schema of a tool, without notes of vendors. Raises RequestError for a keyword that nobody
    enforces, or reads.
    """
    try:
        schema = bare(schema)
    except RecursionError as error:
        raise RequestError("tools", f"{name}: is nested too deeply") from error
    wrong = unenforced(schema) or misshapen(schema)
    if wrong is not None:
        raise RequestError("tools", f"{name}: {wrong}")
    return schema


def in_few_words(schema: Schema) -> Schema:
    """The same arguments in `properties` and `required`. Raises RequestError if it takes more."""
    try:
        whole = simplified(schema)
    except Nothing as nothing:
        raise RequestError("tools", "has parameters that allow no arguments at all") from nothing
    _only(whole, _LISTED, "#", "where arguments are written one by one")
    named = whole.get("properties", {})
    return {**whole, "properties": {key: _resolved(one, schema) for key, one in named.items()}}


def _resolved(schema: Any, root: Schema, level: int = 0) -> Any:
    """With what references name in their place, also among choices of schemas."""
    if not isinstance(schema, dict) or level > LEVELS:
        return schema
    found = target(root, schema.get("$ref"))
    if found and schema.keys() - NOTES == {"$ref"}:
        return _resolved(found[0][1], root, level + 1)
    choices = {
        keyword: [_resolved(one, root, level + 1) for one in schema[keyword]]
        for keyword in ("anyOf", "oneOf")
        if isinstance(schema.get(keyword), list)
    }
    return {**schema, **choices}


def check_text(schema: Any, where: str) -> None:
    """Raises RequestError if a string of `schema`, written as it is, might break it."""
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
        return
    for keyword in ("anyOf", "oneOf"):
        for index, branch in enumerate(schema.get(keyword, ())):
            check_text(branch, f"{where}/{keyword}/{index}")
    if "anyOf" in schema or "oneOf" in schema:
        _only(schema, frozenset({"anyOf", "oneOf"}), where, "beside another choice of schemas")
        return
    kinds = schema.get("type", "string")
    if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
        return
    _only(schema, _TEXT | _OF_OTHERS, where, "in text that is written as it is")
    if "pattern" in schema and schema.keys() & {"minLength", "maxLength", "format"}:
        raise RequestError("tools", f"has more than a pattern at {where}; put all of it in there")
    if "format" in schema and schema["format"] not in TEXT_FORMATS:
        raise RequestError(
            "tools",
            f"has format {schema['format']!r} at {where}, which would not be enforced; those that "
            f"are: {', '.join(TEXT_FORMATS)}",
        )


def _only(schema: Schema, allowed: frozenset[str], where: str, place: str) -> None:
    for keyword in schema:
        if keyword not in allowed and keyword not in NOTES:
            raise RequestError(
                "tools", f"uses {keyword!r} at {where}, which would not be enforced {place}"
            )
