# SPDX-License-Identifier: Apache-2.0
"""Which fields stand where in the body of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_KINDS = frozenset({"bool", "float", "int", "str"})
"""What pydantic calls the ways in which one value may be meant, that might be names."""


def path_of(body: Any, place: Sequence[str]) -> tuple[list[str], list[str]]:
    """`place` in the client's words, and the fields that may stand beside its last part.

    pydantic's places hold fields, numbers in lists, and what the client never wrote: names of the
    ways in which a value may be meant. These go.
    """
    here, beside, path = _models_in(body), list[str](), list[str]()
    for at, part in enumerate(place):
        beside = sorted({name for one in here for name, _ in _fields_of(one)})
        if part.isdigit():
            path.append(part)
            continue
        found = [field for one in here for name, field in _fields_of(one) if name == part]
        inside = [model for field in found for model in _models_in(field.annotation)]
        leads_on = any(_is_name(later) for later in place[at + 1 :])
        # The kind of a block may have the name of a field of it.
        if found and (inside or len(here) == 1 or not leads_on):
            path.append(part)
            here = inside
        elif not here:
            path += [part] if _is_name(part) and part not in _KINDS else []
        else:
            here = [one for one in here if one.__name__ == part] or here
    return path, beside


def deeper(body: Any, place: Sequence[str]) -> str:
    """Where the last part of `place`, which is no field there, is one: in a field beside it. Empty
    if it is in none, or in several."""
    here = _models_in(body)
    for part in place[:-1]:
        if not part.isdigit():
            fields = [field for one in here for name, field in _fields_of(one) if name == part]
            here = [model for field in fields for model in _models_in(field.annotation)] or here
    found = {
        name
        for one in here
        for name, field in _fields_of(one)
        for model in _models_in(field.annotation)
        if place[-1] in dict(_fields_of(model))
    }
    return f"{found.pop()}.{place[-1]}" if len(found) == 1 else ""


def _fields_of(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return [(field.alias or name, field) for name, field in model.model_fields.items()]


def _is_name(part: str) -> bool:
    """A field's name: not what pydantic calls one way of several."""
    return part.isidentifier() or not part.isascii()


def _models_in(kind: Any) -> list[type[BaseModel]]:
    """The models that a type is, or is one of, or holds."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for one in get_args(kind) for model in _models_in(one)]
