# SPDX-License-Identifier: Apache-2.0
"""A schema in fewer keywords: conditions, exclusions and combinations become lists of alternatives.

What comes out allows nothing that the schema forbids. It may allow less in one way, as forms do
anyway: of an object, only the properties that the schema names. A keyword that cannot be spelt out
so stays where it is, for whoever reads on to refuse it by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from freewheel.spec.references import steps_of
from freewheel.structured.counting import MAX_BRANCHES, counted
from freewheel.structured.merging import apart, kinds_of, merged, names_in, requiring, without
from freewheel.structured.values import (
    AWRY,
    NOTES,
    Nothing,
    Schema,
    Unclear,
    satisfies,
    says,
    values_of,
)

MAX_DEPTH = 32
_OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_TYPES = ("string", "number", "boolean", "null", "object", "array")
_PLAIN = frozenset({"string", "integer"})

Halves = tuple[list[Schema], list[Schema]]
"""What satisfies a condition, and what does not."""


def simplified(schema: Any) -> Any:
    """`schema`, a whole one. Raises Nothing if no value satisfies it."""
    try:
        return Simplifier(schema).read(schema, 0)
    except AWRY:
        return schema


def excludes(schema: Schema) -> bool:
    """`not` lists values of a string or an integer: as simple as it gets."""
    return (
        isinstance(schema.get("not"), dict)
        and set(schema["not"]) == {"enum"}
        and schema.get("type") in _PLAIN
    )


class Simplifier:
    """Of the parts of one schema, `root`, in which references are looked up."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps: tuple[tuple[str, Callable[[Schema], list[Schema]]], ...] = (
            ("$ref", self._joined),
            ("allOf", self._all),
            ("if", self._conditional),
            ("then", _dropped("then")),
            ("else", _dropped("else")),
            ("not", self._without),
            ("dependentRequired", self._dependent),
            ("propertyNames", self._named),
            ("minProperties", counted),
            ("maxProperties", counted),
            ("unevaluatedProperties", _evaluated),
            ("oneOf", self._one),
            ("anyOf", self._any),
            ("enum", _listed),
            ("const", _listed),
        )

    def read(self, schema: Any, depth: int) -> Any:
        """Raises Nothing if no value satisfies it."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return schema
        notes = {key: value for key, value in schema.items() if key in NOTES}
        for name in ("$defs", "definitions"):
            if isinstance(notes.get(name), dict):
                notes[name] = {key: self._kept(one, depth) for key, one in notes[name].items()}
        return notes | self._node(says(schema), depth)

    def _kept(self, schema: Any, depth: int) -> Any:
        """A definition that nothing satisfies may be one that nothing needs."""
        try:
            return self.read(schema, depth + 1)
        except Nothing:
            return schema

    def _node(self, rest: Schema, depth: int) -> Schema:
        for keyword, step in self._steps:
            if keyword not in rest:
                continue
            try:
                found = step(rest)
            except AWRY:
                continue
            if found != [rest] and len(found) <= MAX_BRANCHES:
                return self._branches(found, depth)
        return self._parts(rest, depth)

    def _branches(self, found: list[Schema], depth: int) -> Schema:
        read: list[Schema] = []
        for schema in found:
            try:
                read.append(self.read(schema, depth + 1))
            except Nothing:
                continue
        if not read:
            raise Nothing
        flat = [
            one for schema in read for one in (schema["anyOf"] if _is_any(schema) else [schema])
        ]
        return flat[0] if len(flat) == 1 else {"anyOf": flat}

    def _parts(self, rest: Schema, depth: int) -> Schema:
        """With its parts read."""
        found = dict(rest)
        for name in ("items", "additionalProperties"):
            if isinstance(found.get(name), dict):
                found[name] = self._kept(found[name], depth)
        if isinstance(found.get("prefixItems"), list):
            found["prefixItems"] = [self.read(one, depth + 1) for one in found["prefixItems"]]
        if isinstance(found.get("anyOf"), list):
            return self._branches(found["anyOf"], depth) if set(found) == {"anyOf"} else found
        if isinstance(found.get("properties"), dict):
            found = self._properties(found, depth)
        return found

    def _properties(self, rest: Schema, depth: int) -> Schema:
        found = dict(rest)
        for name, schema in rest["properties"].items():
            try:
                read = self.read(schema, depth + 1)
            except Nothing:
                read = False
            if read is False:
                found = without(found, name)
            else:
                found["properties"] = found["properties"] | {name: read}
        return found

    # ---- steps: what a schema is taken apart into; [itself] if there is nothing to do

    def _joined(self, rest: Schema) -> list[Schema]:
        """A reference with other keywords beside it."""
        if set(rest) == {"$ref"}:
            return [rest]
        return [merged(self._target(rest["$ref"]), _but(rest, "$ref"))]

    def _target(self, reference: Any, depth: int = 0) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#/") or depth > MAX_DEPTH:
            raise Unclear
        found = self._root
        for name in steps_of(reference):
            if not isinstance(found, dict) or name not in found:
                raise Unclear
            found = found[name]
        return self._opened(found, depth)

    def _opened(self, schema: Any, depth: int = 0) -> Any:
        """The schema that a reference alone stands for."""
        if isinstance(schema, dict) and set(says(schema)) == {"$ref"}:
            return self._target(schema["$ref"], depth + 1)
        return schema

    def _all(self, rest: Schema) -> list[Schema]:
        found = _but(rest, "allOf")
        for part in rest["allOf"]:
            found = merged(found, self._opened(part))
        return [found]

    def _any(self, rest: Schema) -> list[Schema]:
        """Alternatives with keywords beside them that hold for all."""
        if set(rest) == {"anyOf"}:
            return [rest]
        beside = _but(rest, "anyOf")
        return _each(rest["anyOf"], lambda part: merged(beside, self._opened(part)))

    def _one(self, rest: Schema) -> list[Schema]:
        """Alternatives of which no two hold at once, whatever is beside them."""
        beside, parts = _but(rest, "oneOf"), [self._opened(part) for part in rest["oneOf"]]
        for place, first in enumerate(parts):
            if not all(apart(first, second) for second in parts[:place]):
                raise Unclear
        return _each(parts, lambda part: merged(beside, part))

    def _conditional(self, rest: Schema) -> list[Schema]:
        base = {key: rest[key] for key in rest if key not in ("if", "then", "else")}
        yes, no = self.split(base, rest["if"])
        found = _each(yes, lambda one: merged(one, self._opened(rest.get("then", True))))
        return found + _each(no, lambda one: merged(one, self._opened(rest.get("else", True))))

    def _without(self, rest: Schema) -> list[Schema]:
        if excludes(rest):
            return [rest]
        return self.split(_but(rest, "not"), rest["not"])[1]

    def _dependent(self, rest: Schema) -> list[Schema]:
        found = [_but(rest, "dependentRequired")]
        for name, others in rest["dependentRequired"].items():
            parts = [_has(one, name) for one in found]
            found = [one for _, no in parts for one in no]
            found += _each(
                [one for yes, _ in parts for one in yes],
                lambda one, names=others: _all_of(one, names_in(names)),
            )
        return found

    def _named(self, rest: Schema) -> list[Schema]:
        found = _but(rest, "propertyNames")
        if "properties" not in rest:
            raise Unclear
        for name in rest["properties"]:
            if not satisfies(name, self._opened(rest["propertyNames"])):
                found = without(found, name)
        return [found]

    # ---- what satisfies a condition, and what does not

    def split(self, base: Schema, condition: Any) -> Halves:
        """`base` in two. Raises Unclear if that is not worked out here."""
        condition = self._opened(condition)
        if isinstance(condition, bool) or not says(condition):
            return ([], [base]) if condition is False else ([base], [])
        rest, values = says(condition), values_of(base)
        if values is not None:
            yes = [value for value in values if satisfies(value, rest)]
            no = [value for value in values if not satisfies(value, rest)]
            return [{"enum": yes}] if yes else [], [{"enum": no}] if no else []
        if "type" in rest:
            ours, others = _by_type(base, rest)
            yes, no = self.split(ours[0], _but(rest, "type")) if ours else ([], [])
            return yes, others + no
        if kinds_of(base) == ["object"] and set(rest) <= {"properties", "required"}:
            return self._by_parts(base, rest)
        return _by_value(base, rest)

    def _by_parts(self, base: Schema, rest: Schema) -> Halves:
        yes, no = [base], list[Schema]()
        for name in names_in(rest.get("required", [])):
            halves = [_has(one, name) for one in yes]
            yes = [one for good, _ in halves for one in good]
            no += [one for _, bad in halves for one in bad]
        for name, condition in rest.get("properties", {}).items():
            halves = [self._by_property(one, name, condition) for one in yes]
            yes = [one for good, _ in halves for one in good]
            no += [one for _, bad in halves for one in bad]
        return yes, no

    def _by_property(self, base: Schema, name: str, condition: Any) -> Halves:
        """An object without the property satisfies the condition."""
        if name not in base.get("properties", {}):
            return [base], []
        good, bad = self.split(self._opened(base["properties"][name]), condition)
        yes = _each([_any_of(good)] if good else [], lambda one: _with(base, name, one))
        if not good and name not in base.get("required", ()):
            yes = [without(base, name)]
        no = _each(
            [_any_of(bad)] if bad else [], lambda one: _with(requiring(base, name), name, one)
        )
        return yes, no


def _each(parts: list[Any], change: Callable[[Any], Schema]) -> list[Schema]:
    """Each part changed, those left out of which nothing is left."""
    found: list[Schema] = []
    for part in parts:
        try:
            found.append(change(part))
        except Nothing:
            continue
    return found


def _is_any(schema: Schema) -> bool:
    return set(schema) == {"anyOf"}


def _any_of(parts: list[Schema]) -> Schema:
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def _but(schema: Schema, name: str) -> Schema:
    return {key: value for key, value in schema.items() if key != name}


def _with(base: Schema, name: str, schema: Schema) -> Schema:
    return base | {"properties": base["properties"] | {name: schema}}


def _has(base: Schema, name: str) -> Halves:
    """Objects with the property, and those without."""
    if name in base.get("required", ()):
        if name not in base.get("properties", {}):
            raise Unclear
        return [base], []
    yes = _each([base], lambda one: requiring(one, name))
    return yes, _each([base], lambda one: without(one, name))


def _all_of(base: Schema, names: list[str]) -> Schema:
    for name in names:
        base = requiring(base, name)
    return base


def _by_type(base: Schema, rest: Schema) -> Halves:
    ours, wanted = kinds_of(base), kinds_of(rest) or []
    if ours is None:
        if len(base) or "integer" in wanted:
            raise Unclear
        ours = list(_TYPES)
    if "number" in ours and "integer" in wanted and "number" not in wanted:
        raise Unclear
    same = [one for one in ours if one in wanted or (one == "integer" and "number" in wanted)]
    others = [one for one in ours if one not in same]
    return _typed(base, same), _typed(base, others)


def _typed(base: Schema, kinds: list[str]) -> list[Schema]:
    if not kinds:
        return []
    return [base | {"type": kinds[0] if len(kinds) == 1 else kinds}]


def _by_value(base: Schema, rest: Schema) -> Halves:
    values = values_of(rest)
    if values is not None and base.get("type") in _PLAIN:
        yes = _each([{"enum": values}], lambda one: merged(one, base))
        return yes, _each([{"not": {"enum": values}}], lambda one: merged(base, one))
    (keyword, operand), *more = rest.items()
    if more:
        raise Unclear
    if keyword in _OPPOSITES and base.get("type") in ("integer", "number"):
        other = {_OPPOSITES[keyword]: operand}
    elif keyword == "minLength" and base.get("type") == "string":
        other = {"maxLength": operand - 1}
    elif keyword == "maxLength" and base.get("type") == "string":
        other = {"minLength": operand + 1}
    else:
        raise Unclear
    return [merged(base, rest)], [merged(base, other)]


def _dropped(name: str) -> Callable[[Schema], list[Schema]]:
    """Says nothing without `if`."""
    return lambda rest: [rest if "if" in rest else _but(rest, name)]


def _evaluated(rest: Schema) -> list[Schema]:
    """Where nothing beside it names properties elsewhere, they are the additional ones."""
    simple = {"type", "properties", "required", "unevaluatedProperties"}
    if rest["unevaluatedProperties"] is not False or not set(rest) <= simple:
        raise Unclear
    return [_but(rest, "unevaluatedProperties") | {"additionalProperties": False}]


def _listed(rest: Schema) -> list[Schema]:
    """Listed values that the keywords beside the list allow."""
    if set(rest) <= {"enum", "const", "type"} and len(set(rest) - {"type"}) == 1:
        return [rest]
    values = values_of(rest)
    if values is None:
        raise Unclear
    return [{"enum": values}] if values else []
