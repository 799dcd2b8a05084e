# SPDX-License-Identifier: Apache-2.0
"""What a text with control tokens may be, as a tree of lists that travels as JSON.

A node is a list; its first item says of what kind it is:

    said, part..      exactly these: texts, and ids of control tokens
    row, node..       one behind another
    any, node..       one of them
    maybe, node       it, or nothing
    many, node        it, any number of times
    rule, name        the rule of that name, which comes before
    word, regex       a text that the expression matches whole
    until, regex, part..   such a text and then these parts: without a control token among them,
                      they stand there for the first time
    free, text        any text in which `text` does not occur; empty: any text
    json, schema      JSON of a schema

`lark` writes it for a parser on the host, `weaving` makes an automaton of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Node = list[Any]
Part = str | int

ANY_TEXT = "(?s:.*)"


@dataclass(frozen=True)
class Tree:
    """`start`, and the rules that it and they name."""

    start: Node
    rules: Mapping[str, Node]

    def text(self) -> str:
        """JSON that `read_tree` reads."""
        return json.dumps({"start": self.start, "rules": dict(self.rules)}, ensure_ascii=False)


def read_tree(text: str) -> Tree:
    """Raises ValueError for text that is none."""
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("rules"), dict):
        raise ValueError("is no tree of a grammar")
    known = set[str]()
    for name, node in found["rules"].items():
        _check(node, known)
        known.add(name)
    _check(found.get("start"), known)
    return Tree(found["start"], found["rules"])


def _check(node: Any, known: set[str]) -> None:
    kind, *inside = node if isinstance(node, list) and node else (None,)
    whole = _INSIDE.get(kind) if isinstance(kind, str) else None
    if whole is None or not whole(inside):
        raise ValueError(f"has a part that is none: {str(node)[:60]}")
    if kind in _NESTED:
        for one in inside:
            _check(one, known)
    if kind == "rule" and inside[0] not in known:
        raise ValueError(f"names a rule {inside[0]!r}, which is not there, or comes later")


def _parts(inside: list[Any]) -> bool:
    return all(isinstance(one, str) or (type(one) is int and one >= 0) for one in inside)


def _text(inside: list[Any]) -> bool:
    return len(inside) == 1 and isinstance(inside[0], str)


def _one(inside: list[Any]) -> bool:
    return len(inside) == 1


_INSIDE: dict[str, Callable[[list[Any]], bool]] = {
    "said": _parts,
    "row": lambda inside: True,
    "any": bool,
    "maybe": _one,
    "many": _one,
    "rule": _text,
    "word": _text,
    "until": lambda inside: _parts(inside) and len(inside) > 1 and isinstance(inside[0], str),
    "free": _text,
    "json": _one,
}
_NESTED = frozenset({"row", "any", "maybe", "many"})


class Splitter:
    """Texts in which control tokens, given with their ids, stand for themselves."""

    def __init__(self, control_tokens: Mapping[str, int]) -> None:
        self._tokens = control_tokens
        longest = sorted(control_tokens, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    def parts(self, text: str) -> list[Part]:
        """`text` cut at control tokens."""
        found: list[Part] = []
        place = 0
        for match in self._split.finditer(text):
            found += [text[place : match.start()]] if match.start() > place else []
            found.append(self._tokens[match.group()])
            place = match.end()
        return [*found, text[place:]] if place < len(text) else found


def said(parts: Sequence[Part]) -> Node:
    return ["said", *parts]


def row(*nodes: Node) -> Node:
    return nodes[0] if len(nodes) == 1 else ["row", *(one for one in nodes if one != ["said"])]


def either(*nodes: Node) -> Node:
    return nodes[0] if len(nodes) == 1 else ["any", *nodes]


def maybe(node: Node) -> Node:
    return ["maybe", node]


def many(node: Node) -> Node:
    return ["many", node]


def rule(name: str) -> Node:
    return ["rule", name]


def word(regex: str) -> Node:
    return ["word", regex]


def until(regex: str, parts: Sequence[Part]) -> Node:
    return ["until", regex, *parts]


def free(text: str) -> Node:
    return ["free", text]


def json_of(schema: Any, root: Mapping[str, Any]) -> Node:
    """References in `schema` are looked for in `root`."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return ["json", {key: root[key] for key in ("$defs", "definitions") if key in root} | schema]
