# SPDX-License-Identifier: Apache-2.0
"""Which fields stand where in the body of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel


def fields_at(body: Any, place: Sequence[str]) -> list[str]:
    """The fields that may stand beside the last of `place`, as pydantic names places: fields,
    numbers in lists, and names of the ways in which a value may be meant."""
    here = _models_in(body)
    for part in place[:-1]:
        inside = [
            model
            for one in here
            for name, field in one.model_fields.items()
            if part == (field.alias or name)
            for model in _models_in(field.annotation)
        ]
        meant = [one for one in here if one.__name__ == part]
        here = inside or meant or ([] if _is_plain(part, here) else here)
    return sorted({field.alias or name for one in here for name, field in one.model_fields.items()})


def _is_plain(part: str, models: list[type[BaseModel]]) -> bool:
    """A field that has no fields."""
    return any(
        part == (field.alias or name) for one in models for name, field in one.model_fields.items()
    )


def _models_in(kind: Any) -> list[type[BaseModel]]:
    """The models that a type is, or is one of, or holds."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for one in get_args(kind) for model in _models_in(one)]
