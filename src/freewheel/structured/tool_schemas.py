# SPDX-License-Identifier: Apache-2.0
"""Schemas of tools' arguments: what of them no grammar of calls would keep is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Arguments:
    """Of a call, where they are written one by one."""

    properties: Mapping[str, Any]
    required: tuple[str, ...]


def arguments_of(schema: Schema) -> list[Arguments]:
    """The same arguments in `properties` and `required`, in one way of several. Raises RequestError
    if it takes more."""
    kinds = schema.get("type", "object")
    kind = "object" if isinstance(kinds, list) and "object" in kinds else kinds
    try:
        whole = simplified({**schema, "type": kind})
    except Nothing as nothing:
        raise RequestError("tools", "has parameters that allow no arguments at all") from nothing
    choices = whole["anyOf"] if whole.keys() - NOTES == {"anyOf"} else [whole]
    return [_listed(one, schema) for one in choices]


def _listed(choice: Schema, root: Schema) -> Arguments:
    found = target(root, choice.get("$ref"))
    if found and choice.keys() - NOTES == {"$ref"}:
        choice = found[0][1]
    _only(choice, _LISTED, "#", "where arguments are written one by one")
    if choice.get("type", "object") != "object":
        raise RequestError("tools", f"has parameters of type {choice['type']!r}; use 'object'")
    properties = {key: _resolved(one, root) for key, one in choice.get("properties", {}).items()}
    return Arguments(properties, tuple(choice.get("required", ())))


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


def only_text(schema: Any) -> bool:
    """No value of `schema` is other than a string."""
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return all(isinstance(one, str) for one in values)
    return schema.get("type") in ("string", ["string"])


def _only(schema: Schema, allowed: frozenset[str], where: str, place: str) -> None:
    for keyword in schema:
        if keyword not in allowed and keyword not in NOTES:
            raise RequestError(
                "tools", f"uses {keyword!r} at {where}, which would not be enforced {place}"
            )
