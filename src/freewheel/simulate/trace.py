# SPDX-License-Identifier: Apache-2.0
"""Traces of requests in Mooncake's public format: lengths, times, and which blocks are alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freewheel.errors import RequestError

BLOCK = 512
"""Tokens that a hash id of the public traces stands for."""

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids", "priority", "tenant")
_LARGEST = 1 << 40


@dataclass(frozen=True)
class Call:
    """One request of a trace.

    `arrival`: seconds from the trace's beginning. `prompt`, `answer`: tokens. `blocks`: what each
    block of tokens is, from the prompt's first token on; two calls with the same ids at the
    beginning begin with the same tokens. Ids behind those of the prompt are the answer's, so that
    a later turn can begin with it; public traces have none, and then no answer is found again.
    """

    arrival: float
    prompt: int
    answer: int
    blocks: tuple[int, ...]
    priority: int = 0
    tenant: str = ""


@dataclass(frozen=True)
class Trace:
    """Calls in order of arrival, and names of fields that nothing here reads.

    `block`: tokens that each of `Call.blocks` stands for.
    """

    calls: tuple[Call, ...]
    block: int = BLOCK
    ignored: tuple[str, ...] = ()


def read_trace(path: Path, block: int = BLOCK, limit: int | None = None) -> Trace:
    """The first `limit` lines of a JSONL file (None: all).

    Raises RequestError, naming the line and the field, for what is missing or malformed.
    """
    calls: list[Call] = []
    ignored: set[str] = set()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(calls) == limit:
                    break
                if line.strip():
                    fields = _fields(line, number)
                    ignored |= fields.keys() - set(FIELDS)
                    calls.append(_call(fields, number, block))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("trace", f"{path} cannot be read: {error}") from error
    if not calls:
        raise RequestError("trace", f"{path} holds no request")
    first = min(call.arrival for call in calls)
    calls.sort(key=lambda call: call.arrival)
    moved = (_moved(call, first) for call in calls)
    return Trace(tuple(moved), block, tuple(sorted(ignored)))


def write_trace(path: Path, calls: Iterable[Call]) -> None:
    """One line a call; fields that hold nothing are left out."""
    with path.open("w", encoding="utf-8") as file:
        for call in calls:
            line: dict[str, Any] = {
                "timestamp": round(1000 * call.arrival),
                "input_length": call.prompt,
                "output_length": call.answer,
                "hash_ids": list(call.blocks),
            }
            line |= {"priority": call.priority} if call.priority else {}
            line |= {"tenant": call.tenant} if call.tenant else {}
            file.write(json.dumps(line) + "\n")


def _moved(call: Call, first: float) -> Call:
    return Call(
        call.arrival - first, call.prompt, call.answer, call.blocks, call.priority, call.tenant
    )


def _fields(line: str, number: int) -> Mapping[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError("trace", f"line {number} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("trace", f"line {number} must be an object")
    return fields


def _call(fields: Mapping[str, Any], number: int, block: int) -> Call:
    milliseconds = fields.get("timestamp")
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float):
        raise _wrong(number, "timestamp", "must be milliseconds", milliseconds)
    prompt = _count(fields, number, "input_length", 1)
    answer = _count(fields, number, "output_length", 1)
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(_is_id(one) for one in ids):
        raise _wrong(number, "hash_ids", f"must be a list of whole numbers below {_LARGEST}", ids)
    if len(ids) * block < prompt:
        raise _wrong(number, "hash_ids", f"must cover {prompt} tokens in blocks of {block}", ids)
    priority, tenant = fields.get("priority", 0), fields.get("tenant", "")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise _wrong(number, "priority", "must be a whole number", priority)
    if not isinstance(tenant, str):
        raise _wrong(number, "tenant", "must be text", tenant)
    return Call(milliseconds / 1000, prompt, answer, tuple(ids), priority, tenant)


def _count(fields: Mapping[str, Any], number: int, name: str, least: int) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _LARGEST:
        raise _wrong(number, name, f"must be a whole number, at least {least}", value)
    return value


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _wrong(number: int, name: str, rule: str, value: object) -> RequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return RequestError("trace", f"line {number}: {name} {rule}, got {shown}")
