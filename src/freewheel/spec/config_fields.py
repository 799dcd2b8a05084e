# SPDX-License-Identifier: Apache-2.0
"""Reads one JSON object field by field: each value has its expected kind, or the error names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar, cast

from freewheel.errors import CheckpointError

T = TypeVar("T")

MISSING = object()
"""What `Fields.get` returns for a field that is absent or null."""

MOST = {
    "bos_token_id": 1 << 24,
    "eos_token_id": 1 << 24,
    "index_n_heads": 1 << 12,
    "index_topk": 1 << 24,
    "max_position_embeddings": 1 << 24,
    "n_routed_experts": 1 << 14,
    "n_shared_experts": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_hidden_layers": 1 << 12,
    "original_max_position_embeddings": 1 << 24,
    "vocab_size": 1 << 24,
}
"""The largest whole numbers that are taken for meant; MOST_OTHERWISE for any other field.

All are far above any model's, and no size of a tensor that is made of them overflows.
"""

MOST_OTHERWISE = 1 << 20


class Fields:
    """A JSON object and the record of which of its fields have been read.

    Numbers may be written as 40, 40.0 or "40". A field that is null counts as absent.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where
        self.used: set[str] = set()

    def get(self, name: str) -> object:
        """The raw value, or MISSING if absent or null. The field counts as read."""
        self.used.add(name)
        value = self.values.get(name)
        return MISSING if value is None else value

    def has(self, name: str) -> bool:
        return self.get(name) is not MISSING

    def whole(self, name: str, default: int | None = None, low: int = 1) -> int:
        """An integer from `low` to what MOST says.

        Raises CheckpointError if it is not, or absent with no default.
        """
        value = self.get(name)
        if value is MISSING:
            return self._default(name, default)
        return self.as_whole(name, value, low)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number. Raises CheckpointError if it is not, or absent with no default."""
        value = self.get(name)
        if value is MISSING:
            return self._default(name, default)
        return self.as_number(name, value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0. Raises CheckpointError if not, or absent with no default."""
        number = self.number(name, default)
        if number <= 0:
            raise self.wrong(name, "above 0", number)
        return number

    def flag(self, name: str, default: bool | None = None) -> bool:
        """A boolean. Raises CheckpointError if it is not, or absent with no default."""
        value = self.get(name)
        if value is MISSING:
            return self._default(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string. Raises CheckpointError if it is not, or absent with no default."""
        value = self.get(name)
        if value is MISSING:
            return self._default(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string", value)
        return value

    def mapping(self, name: str) -> Mapping[str, object]:
        """A JSON object; empty if absent."""
        value = self.get(name)
        if value is MISSING:
            return {}
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object", value)
        return cast("Mapping[str, object]", value)

    def items(self, name: str) -> tuple[object, ...] | None:
        """A JSON list as a tuple; None if absent."""
        value = self.get(name)
        if value is MISSING:
            return None
        if not isinstance(value, list | tuple):
            raise self.wrong(name, "a list", value)
        return tuple(cast("list[object]", value))

    def as_number(self, name: str, value: object) -> float:
        """`value`, written as a number or as a string of one, as a float."""
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self.wrong(name, "a number", value) from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.wrong(name, "a finite number", value)
        return number

    def as_whole(self, name: str, value: object, low: int) -> int:
        """`value` as an int from `low` to what MOST says of the field."""
        number = self.as_number(name, value)
        if number != int(number) or number < low:
            raise self.wrong(name, f"a whole number of at least {low}", value)
        most = MOST.get(name, MOST_OTHERWISE)
        if number > most:
            raise self.wrong(name, f"at most {most}", value)
        return int(number)

    def wrong(self, name: str, wanted: str, value: object) -> CheckpointError:
        """The error to raise for a value of the wrong kind."""
        return CheckpointError(f"{self.where}: {name} must be {wanted}, got {_shown(value)}")

    def _default(self, name: str, default: T | None) -> T:
        if default is None:
            raise CheckpointError(f"{self.where}: the field {name} is missing")
        return default


def _shown(value: object) -> str:
    """`value` as the file spells it, cut where nobody would read on."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
