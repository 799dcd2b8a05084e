# SPDX-License-Identifier: Apache-2.0
"""Checks of single request fields; each raises RequestError, naming the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from freewheel.errors import RequestError


def check_number(field: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(field, f"must be a number, got {value!r}")
    if not low <= value <= high:  # NaN is not, either
        raise RequestError(field, f"must be between {low:g} and {high:g}, got {value!r}")


def check_count(field: str, value: object, low: int, high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(field, f"must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise RequestError(field, f"must be between {low} and {high}, got {value}")


def check_flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(field, f"must be True or False, got {value!r}")


def texts_of(field: str, given: object) -> tuple[str, ...]:
    strings = items(given)
    if strings is None or not all(isinstance(s, str) and s for s in strings):
        raise RequestError(field, f"must be a list of non-empty strings, got {given!r}")
    texts = tuple(str(s) for s in strings)
    for text in texts:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise RequestError(field, f"{text!r} is not valid Unicode, so no answer holds it")
    return texts


def ids_of(field: str, ids: object, most: int) -> tuple[int, ...]:
    found = items(ids)
    whole = [i for i in found or () if isinstance(i, int) and not isinstance(i, bool) and i >= 0]
    if found is None or len(whole) != len(found):
        raise RequestError(field, f"must be a list of token ids, each at least 0, got {ids!r}")
    if len(whole) > most:
        raise RequestError(field, f"holds {len(whole)} ids; at most {most} fit")
    return tuple(whole)


def items(value: object) -> tuple[object, ...] | None:
    """The items of a list or tuple; None for anything else."""
    return tuple(cast("list[object]", value)) if isinstance(value, list | tuple) else None


def json_text(field: str, given: object) -> str:
    """The JSON text of an object, or of text that holds one."""
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        found: object = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(field, f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestError(field, f"must be a JSON object, got {given!r}")
    return text


def biases_of(field: str, given: object, most: int) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs of a mapping or of such pairs; a bias is -100 to 100, 0 left out."""
    pairs: list[object] | tuple[object, ...] | None
    if isinstance(given, Mapping):
        pairs = list(cast("Mapping[object, object]", given).items())
    else:
        pairs = items(given)
    found: dict[int, float] = {}
    for pair in pairs if pairs is not None else [None]:
        both = items(pair)
        if both is None or len(both) != 2:
            raise RequestError(field, f"must map token ids to numbers, got {given!r}")
        token, bias = both
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise RequestError(field, f"must map token ids, each at least 0; got {token!r}")
        if token in found:
            raise RequestError(field, f"names token {token} twice")
        check_number(field, bias, -100.0, 100.0)
        found[token] = float(cast(float, bias))
    if len(found) > most:
        raise RequestError(field, f"holds {len(found)} tokens; at most {most} fit")
    return tuple((token, bias) for token, bias in found.items() if bias)
