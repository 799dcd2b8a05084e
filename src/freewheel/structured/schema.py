# SPDX-License-Identifier: Apache-2.0
"""Which JSON schemas can be kept exactly: whatever a grammar would ignore is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from freewheel.spec.references import steps_of
from freewheel.structured.keywords import bare, unenforced
from freewheel.structured.simplify import simplified
from freewheel.structured.values import NOTES, Nothing

MAX_DEPTH = 32
"""Levels of a schema, references followed."""

_BY_TYPE = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset[str](),
    "number": frozenset[str](),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
FORMATS = frozenset({"date", "uuid"})


class Refusal(Exception):
    """The wish cannot be kept; says why."""


def parsed(source: str) -> Any:
    """The schema of JSON text, in as few keywords as may be. Raises Refusal for what is none."""
    try:
        schema = bare(json.loads(source, parse_float=_finite, parse_constant=_no_number))
    except (ValueError, RecursionError) as error:
        raise Refusal(f"is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise Refusal(f"must be an object at #, got {schema!r}")
    strange = unenforced(schema)
    if strange is not None:
        raise Refusal(strange)
    try:
        return simplified(schema)
    except Nothing as nothing:
        raise Refusal("allows no value at all") from nothing


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise Refusal(f"has a number beyond all that can be written: {text[:40]}")
    return number


def _no_number(text: str) -> float:
    raise Refusal(f"has {text}, which JSON has no word for")


def read_schema(schema: Any, safe_pattern: Callable[[str], bool]) -> None:
    """Raises Refusal if some part of the schema could not be kept exactly.

    `safe_pattern`: whether all that a pattern matches may stand in a JSON string as it is.
    """
    _Reader(schema, safe_pattern).check(schema, "#", 0)


class _Reader:
    def __init__(self, root: Any, safe_pattern: Callable[[str], bool]) -> None:
        self._root = root
        self._safe_pattern = safe_pattern

    def check(self, schema: Any, where: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise Refusal(f"is recursive, or nested deeper than {MAX_DEPTH} levels: {where[:60]}")
        if not isinstance(schema, dict):
            raise Refusal(f"must be an object at {where}, got {schema!r}")
        rest = {key: value for key, value in schema.items() if key not in NOTES}
        if "$ref" in rest:
            self._only(rest, {"$ref"}, where)
            self.check(self._target(rest["$ref"], where), where, depth + 1)
        elif "anyOf" in rest:
            self._only(rest, {"anyOf"}, where)
            if not isinstance(rest["anyOf"], list) or not rest["anyOf"]:
                raise Refusal(f"must list schemas in anyOf at {where}")
            for index, branch in enumerate(rest["anyOf"]):
                self.check(branch, f"{where}/anyOf/{index}", depth + 1)
        elif "enum" in rest:
            self._only(rest, {"enum", "type"}, where)
            self._values(rest["enum"], rest.get("type"), f"{where}/enum")
        elif "const" in rest:
            self._only(rest, {"const", "type"}, where)
            self._values([rest["const"]], rest.get("type"), f"{where}/const")
        else:
            self._typed(rest, where, depth)

    def _typed(self, rest: Mapping[str, Any], where: str, depth: int) -> None:
        kind = rest.get("type")
        kinds: list[Any] = kind if isinstance(kind, list) else [kind]
        if len(kinds) != 1 and set(kinds) & {"object", "array"}:
            raise Refusal(f"mixes objects or arrays with other types at {where}; use anyOf")
        if kind is None and rest:
            raise Refusal(f"uses {min(rest)!r} at {where} without a type beside it")
        if kind is None or not kinds:
            raise Refusal(f"needs a type, enum, const, anyOf or $ref at {where}")
        for one in kinds:
            if one not in _BY_TYPE:
                raise Refusal(f"has an unknown type {one!r} at {where}")
        allowed = {"type"}.union(*(_BY_TYPE[one] for one in kinds)) if len(kinds) == 1 else {"type"}
        self._only(rest, allowed, where)
        if kind == "object":
            self._object(rest, where, depth)
        elif kind == "array":
            self._array(rest, where, depth)
        elif kind == "string":
            self._string(rest, where)

    def _object(self, rest: Mapping[str, Any], where: str, depth: int) -> None:
        properties = rest.get("properties")
        if not isinstance(properties, dict) or not properties:
            raise Refusal(f"needs the properties of the object at {where}")
        required = rest.get("required", [])
        if not isinstance(required, list):
            raise Refusal(f"must list names in required at {where}, got {required!r}")
        missing = [name for name in required if name not in properties]
        if missing:
            raise Refusal(f"requires {missing[0]!r} at {where}, which is not among its properties")
        if rest.get("additionalProperties", False) not in (True, False):
            raise Refusal(f"describes additionalProperties at {where}, which is not supported")
        for name, value in properties.items():
            if json.dumps(name, ensure_ascii=False) != f'"{name}"':
                raise Refusal(f"has a property {name!r} at {where}, which JSON must escape")
            self.check(value, f"{where}/properties/{name}", depth + 1)

    def _array(self, rest: Mapping[str, Any], where: str, depth: int) -> None:
        least, most = rest.get("minItems", 0), rest.get("maxItems")
        if not isinstance(rest.get("items"), dict):
            raise Refusal(f"needs the items of the array at {where}")
        if most is not None and most < least:
            raise Refusal(f"has more minItems than maxItems at {where}")
        self.check(rest["items"], f"{where}/items", depth + 1)

    def _string(self, rest: Mapping[str, Any], where: str) -> None:
        if "pattern" in rest:
            self._only(rest, {"type", "pattern"}, where)
            pattern = rest["pattern"]
            anchored = (
                isinstance(pattern, str) and pattern.startswith("^") and pattern.endswith("$")
            )
            if not anchored:
                raise Refusal(f"has a pattern at {where} that does not read ^...$")
            if not self._safe_pattern(pattern[1:-1]):
                raise Refusal(
                    f"has a pattern at {where} that matches a quote, a backslash or a control "
                    "character, which JSON must escape"
                )
        if "format" in rest:
            self._only(rest, {"type", "format"}, where)
            if rest["format"] not in FORMATS:
                raise Refusal(
                    f"has format {rest['format']!r} at {where}; supported: "
                    f"{', '.join(sorted(FORMATS))}"
                )

    def _values(self, values: Any, kind: Any, where: str) -> None:
        if not isinstance(values, list) or not values:
            raise Refusal(f"must list values at {where}")
        kinds = kind if isinstance(kind, list) else [kind]
        for value in values:
            if isinstance(value, dict | list):
                raise Refusal(f"lists {value!r} at {where}; only simple values are supported")
            own = {_kind(value), "number" if _kind(value) == "integer" else ""}
            if kind is not None and own.isdisjoint(kinds):
                raise Refusal(f"lists {value!r} at {where}, which is no {kind}")

    def _target(self, reference: Any, where: str) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            raise Refusal(
                f"refers to {reference!r} at {where}; only references like #/$defs/x work"
            )
        found = self._root
        for name in steps_of(reference):
            if not isinstance(found, dict) or name not in found:
                raise Refusal(f"refers to {reference!r} at {where}, which is not there")
            found = found[name]
        return found

    def _only(self, rest: Mapping[str, Any], allowed: set[str], where: str) -> None:
        for keyword in rest:
            if keyword not in allowed:
                raise Refusal(f"uses {keyword!r} at {where}, which is not supported there")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return names[type(value)]
