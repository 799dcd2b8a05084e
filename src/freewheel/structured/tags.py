# SPDX-License-Identifier: Apache-2.0
"""Free text in which what begins like a tag is one of several: structural tags of vLLM and SGLang.

In their words: `structures`, each with a `begin`, a `schema` and an `end`, and `triggers`, of which
each begin has one at its start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freewheel.errors import RequestError
from freewheel.structured.tree import (
    ANY_TEXT,
    Node,
    Part,
    Splitter,
    Tree,
    either,
    free,
    json_of,
    many,
    row,
    said,
    until,
)


@dataclass(frozen=True)
class Tag:
    """`begin`, JSON of `schema`, `end`."""

    begin: str
    schema: Mapping[str, Any]
    end: str


def tag_tree(tags: Sequence[Tag], triggers: Sequence[str], tokens: Mapping[str, int]) -> str:
    """SamplingParams' `calls` for text with tags in it, outside of which no trigger stands.

    `tokens`: ids of control tokens by their text, which stand for themselves. Raises RequestError,
    naming `structures` or `triggers`.
    """
    if len(triggers) != 1:
        raise RequestError("triggers", "must be one: a text with which every begin begins")
    (trigger,) = triggers
    splitter = Splitter(tokens)
    opening = splitter.parts(trigger)
    ways: list[Node] = []
    for place, tag in enumerate(tags):
        rest = tag.begin.removeprefix(trigger)
        if not trigger or not tag.begin.startswith(trigger):
            raise RequestError(f"structures.{place}.begin", f"must begin with {trigger!r}")
        if splitter.parts(tag.begin) != _merged([*opening, *splitter.parts(rest)]):
            raise RequestError("triggers", "must not end within a control token")
        if any(trigger.startswith(tag.end[at:]) for at in range(1, len(tag.end))):
            raise RequestError(f"structures.{place}.end", f"must not end as {trigger!r} begins")
        schema = json_of(dict(tag.schema), tag.schema)
        ways.append(row(said(splitter.parts(rest)), schema, said(splitter.parts(tag.end))))
    if not ways:
        raise RequestError("structures", "is empty: give at least one")
    mark = any(isinstance(part, int) for part in opening)
    one = row(until(ANY_TEXT, opening), either(*ways))
    return Tree(row(many(one), free("" if mark else trigger)), {}).text()


def _merged(parts: Sequence[Part]) -> list[Part]:
    """The same with texts that follow one another as one."""
    found: list[Part] = []
    for part in parts:
        if found and isinstance(part, str) and isinstance(last := found[-1], str):
            found[-1] = last + part
        else:
            found.append(part)
    return found
