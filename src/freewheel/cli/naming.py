# SPDX-License-Identifier: Apache-2.0
"""Errors name fields; who wrote a command line is told of its options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

OTHERWISE = {
    "json_schema": "schema",
    "bad_words": "bad_word",
    "allowed_token_ids": "allowed_token_id",
    "stop_token_ids": "stop_token_id",
    "api_key": "api_key_file",
    "make": "make_trace",
    "max_batch": "batch",
    "context_len": "context",
}
"""Fields whose option has another name: parameters of commands."""

_ADVICE = ("lower ", "raise ", "give ", "use ")
"""Words behind which a name is a field."""

_QUOTED = r"""(?<!\w)'[^']*'(?!\w)|(?<!\w)"[^"]*"(?!\w)"""


@dataclass(frozen=True)
class Option:
    """How one is written, and how it is switched off; empty if it cannot be."""

    on: str
    off: str = ""


def by_field(options: Iterable[tuple[str, Option]]) -> dict[str, Option]:
    """Options by every name of a field that they stand for. `options`: by their parameter."""
    known = dict(options)
    return {field: known[own] for field, own in OTHERWISE.items() if own in known} | known


def as_options(message: str, options: Mapping[str, Option]) -> str:
    """`message` as a command line has it: `--cache-bytes: ..` and `--dtype float64` for
    `cache_bytes: ..` and `dtype="float64"`.

    A name of one word is a field where the message begins with it, behind advice such as "lower",
    and where a value is given; elsewhere it is a word. What stands in quotes was given, and stays.
    """
    named = "|".join(sorted(options, key=len, reverse=True)) or "(?!)"
    value = r'(?:="?(?P<value>\w+(?:\.\w+)*)"?)?'
    said = rf"{_QUOTED}|(?<![\w/.-])(?P<name>{named}){value}(?![\w/=-]|\.\w)"

    def spelt(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        if name is None:
            return found[0]
        if value is not None:
            switch = {"True": options[name].on, "False": options[name].off}
            return switch.get(value, f"{options[name].on} {value}") or found[0]
        leads = not found.start() and message.startswith(":", found.end())
        advised = message.endswith(_ADVICE, 0, found.start())
        return options[name].on if leads or advised or "_" in name else found[0]

    return re.sub(said, spelt, message)
