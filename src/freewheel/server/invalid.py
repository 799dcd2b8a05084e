# SPDX-License-Identifier: Apache-2.0
"""What becomes of bodies that do not fit their schema: one error, which names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from freewheel.server.failures import ApiError
from freewheel.server.naming import deeper, path_of
from freewheel.spec.elsewhere import field_hint
from freewheel.spec.elsewhere.fixed import ABSENT, reason_of

_OBJECTS = frozenset({"model_type", "model_attributes_type", "dict_type", "mapping_type"})
_WORDS = {
    "missing": "is required",
    "string_type": "must be text",
    "string_unicode": "must be text of whole Unicode characters",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "none_required": "must be null, or left out",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "literal_error": "must be {expected}",
    "union_tag_invalid": "{discriminator} must be one of {expected_tags}",
    "union_tag_not_found": "needs {discriminator}",
}
"""By pydantic's types of errors."""
_ONE_VALUE = frozenset({"none_required", "literal_error"})
_SENSES = {"image": "images", "audio": "sounds", "video": "videos", "file": "files"} | {
    "document": "documents"
}


def refusal_of(errors: Sequence[Any], body: Any) -> ApiError:
    """400 for pydantic's `errors` of a value that was to be a `body`, a type."""
    first = max(errors, key=_tells)
    parts = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error")
        at = first["loc"][-1:] if why else ()
        return _refusal("", f"is not valid JSON{f': {why}' if why else ''}{_place(at)}")
    if not parts and first["type"] in _OBJECTS:
        raw = first["type"] == "model_attributes_type"
        sent = ", sent with content-type: application/json" if raw else ""
        return _refusal("", f"must be a JSON object{sent}")
    unknown = first["type"] == "extra_forbidden"
    path, _ = path_of(body, parts[:-1] if unknown else parts)
    message = _words(first)
    if unknown:
        _, beside = path_of(body, parts)
        hint = _hint_of(body, parts, beside, ".".join(path))
        path.append(parts[-1])
        message = "is not a field that this server knows" + (f"; {hint}" if hint else "")
    elif first["type"] in _ONE_VALUE and (why := reason_of(path)):
        message += f"; {why}"
    return _refusal(".".join(path), message)


def _place(at: Sequence[Any]) -> str:
    """Where in the text it is; its first character is the first."""
    return f", at character {at[0] + 1}" if at and isinstance(at[0], int) else ""


def _tells(error: Mapping[str, Any]) -> tuple[int, bool, bool]:
    """How much an error says: of the ways in which a value may be meant, the one that it fits
    furthest says most; of a misspelt field, what was written more than what was not; and of a list
    that is empty, that it is, more than that it might have been no list."""
    kind = error["type"]
    return len(error["loc"]), kind != "missing", not kind.endswith("_type")


def _hint_of(body: Any, parts: list[str], beside: list[str], path: str) -> str:
    """What was meant by a field that is none, or why there is none; `path`: where it stands."""
    if len(parts) == 1 and parts[0] in ABSENT:
        return ABSENT[parts[0]]
    inside = deeper(body, parts)
    return f"use {inside}" if inside else field_hint(parts[-1], beside, path)


def _refusal(path: str, message: str) -> ApiError:
    """`path`: of the field to blame; empty: the whole body."""
    return ApiError(400, f"{path or 'body'}: {message}", param=path or None, code="invalid_value")


def _words(error: Mapping[str, Any]) -> str:
    """What is wrong with a value, as the end of a sentence that its field begins."""
    kind, given = error["type"], error.get("ctx", {})
    if kind in _OBJECTS:
        return "must be an object"
    if (sense := _sense(error, given)) is not None:
        return f"{sense} are not supported: this server takes text"
    if given.get("min_length") == 1:
        return "must not be empty"
    words = _WORDS.get(kind)
    if words is None:
        return re.sub(r"^[A-Z]\w+ should ", "must ", error["msg"])
    said = words.format(**given)
    return re.sub(r"\b(True|False)\b", lambda found: found[0].lower(), said)


def _sense(error: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """What else than text was sent as a part of a turn, if that is what is wrong."""
    if error["type"] == "union_tag_invalid":
        tag = given["tag"]
    elif error["type"] == "literal_error" and error["loc"][-1] == "type":
        tag = error["input"]
    else:
        return None
    words = re.split(r"[^a-z]+", tag) if isinstance(tag, str) else []
    return next((_SENSES[word] for word in words if word in _SENSES), None)
