# SPDX-License-Identifier: Apache-2.0
"""A tree of a grammar as one automaton over bytes and control tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from freewheel.structured.automata import Net, both, up_to, without
from freewheel.structured.tables import ByteAutomaton
from freewheel.structured.tree import ANY_TEXT, Node, Tree

Make = Callable[[str], ByteAutomaton]


class Weaver:
    """`regex` and `json`: the automata of an expression, and of a schema. Raise Refusal."""

    def __init__(self, tree: Tree, regex: Make, json: Callable[[Any], ByteAutomaton]) -> None:
        self._tree, self._json = tree, json
        self._regex = cache(regex)
        self._up_to = cache(self._ending)
        self._net = Net(_control_ids(tree))
        self._rules: dict[tuple[str, int], int] = {}

    def automaton(self) -> ByteAutomaton:
        """Of the whole tree. Raises Refusal if a part has none, or if it is too large."""
        return self._net.determined(self._before(self._tree.start, self._net.end))

    def _before(self, node: Node, then: int) -> int:
        """The state from which `node` leads to `then`."""
        net, (kind, *inside) = self._net, node
        if kind == "rule":
            place = inside[0], then  # calls that go on alike share their states
            if place not in self._rules:
                self._rules[place] = self._before(self._tree.rules[inside[0]], then)
            return self._rules[place]
        if kind in ("said", "row"):
            for one in reversed(inside):
                then = net.said(one, then) if kind == "said" else self._before(one, then)
            return then
        if kind == "any":
            return net.state(*(self._before(one, then) for one in inside))
        if kind == "maybe":
            return net.state(then, self._before(inside[0], then))
        if kind == "many":
            again = net.state(then)
            net.join(again, self._before(inside[0], again))
            return again
        return self._text(kind, inside, then)

    def _text(self, kind: str, inside: Node, then: int) -> int:
        net = self._net
        if kind == "json":
            return net.block(self._json(inside[0]), then)
        if kind == "word":
            return net.block(self._regex(inside[0]), then)
        if kind == "free":
            text = self._regex(ANY_TEXT)
            return net.block(both(text, without(inside[0])) if inside[0] else text, then)
        body, *parts = inside
        if all(isinstance(part, str) for part in parts):
            return net.block(self._up_to(body, "".join(parts)), then)
        return net.block(self._regex(body), self._before(["said", *parts], then))

    def _ending(self, body: str, text: str) -> ByteAutomaton:
        """Texts that `body` matches, and then `text` for the first time."""
        whole = Net(())
        start = whole.block(self._regex(body), whole.said(text, whole.end))
        return both(whole.determined(start), up_to(text))


def _control_ids(tree: Tree) -> Iterator[int]:
    waiting = [tree.start, *tree.rules.values()]
    while waiting:
        kind, *inside = waiting.pop()
        if kind in ("said", "until"):
            yield from (part for part in inside if isinstance(part, int))
        elif kind in ("row", "any", "maybe", "many"):
            waiting += inside
