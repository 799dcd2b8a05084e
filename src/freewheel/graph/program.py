# SPDX-License-Identifier: Apache-2.0
"""A recorded list of calls as one straight-line Python function.

Temporaries become local variables that die after their last use, so that a replay allocates as the
eager function does and pays, beyond the calls themselves, about a tenth of a microsecond each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from freewheel.graph.callsite import TAPE_FILE

__all__ = ["Call", "Program", "Register"]


@dataclass(frozen=True)
class Register:
    """Stands for a tensor that each replay makes anew."""

    index: int

    def __str__(self) -> str:
        return f"t{self.index}"


@dataclass(frozen=True)
class Call:
    """`results = function(*args, **kwargs)`.

    Registers may stand anywhere in the lists and tuples of `args`, `kwargs` and `results`; all else
    in the arguments is frozen. A `pure_view` computes nothing and is left out if nobody uses it.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: object = None
    pure_view: bool = False


def _registers(tree: object) -> Iterator[Register]:
    if isinstance(tree, Register):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in cast(Iterable[object], tree):
            yield from _registers(item)


def _read_by(call: Call) -> set[Register]:
    return set(_registers((call.args, tuple(call.kwargs.values()))))


class Program:
    """The compiled calls: `run()` performs them, `listing` shows them, `len()` counts them."""

    def __init__(self, calls: list[Call]) -> None:
        self._names: dict[str, object] = {}
        self._known: dict[int, str] = {}
        calls = _without_unused_views(calls)
        last_use = {register: i for i, call in enumerate(calls) for register in _read_by(call)}
        used = set(last_use)
        lines: list[str] = []
        for i, call in enumerate(calls):
            lines.append(self._statement(call, used))
            dead = sorted(str(r) for r in _read_by(call) if last_use[r] == i)
            if dead:
                lines.append("del " + ", ".join(dead))
        self._length = len(calls)
        self.listing = "\n    ".join(["def replay():", *(lines or ["pass"])]) + "\n"
        exec(compile(self.listing, TAPE_FILE, "exec"), self._names)
        self.run = cast(Callable[[], None], self._names["replay"])

    def __len__(self) -> int:
        return self._length

    def _statement(self, call: Call, used: set[Register]) -> str:
        operands = [self._expression(value) for value in call.args]
        operands += [f"{key}={self._expression(value)}" for key, value in call.kwargs.items()]
        stem = call.name.replace("::", "_").replace(".", "_")
        text = f"{self._named(call.function, stem)}({', '.join(operands)})"
        if used.isdisjoint(_registers(call.results)):
            return text
        return f"{_pattern(call.results, used)} = {text}"

    def _expression(self, value: object) -> str:
        if isinstance(value, Register):
            return str(value)
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        if isinstance(value, (list, tuple)) and any(_registers(cast(object, value))):
            items = [self._expression(item) for item in cast(Iterable[object], value)]
            return "[" + ", ".join(items) + "]"
        return self._named(cast(object, value), f"c{len(self._names)}")

    def _named(self, value: object, stem: str) -> str:
        """The name of a frozen object in the generated function; one object has one name."""
        if id(value) not in self._known:
            name = stem if stem not in self._names else f"{stem}_{len(self._names)}"
            self._names[name] = value
            self._known[id(value)] = name
        return self._known[id(value)]


def _without_unused_views(calls: list[Call]) -> list[Call]:
    kept: list[Call] = []
    used: set[Register] = set()
    for call in reversed(calls):
        if not call.pure_view or not used.isdisjoint(_registers(call.results)):
            kept.append(call)
            used |= _read_by(call)
    return kept[::-1]


def _pattern(results: object, used: set[Register]) -> str:
    """The left side of an assignment: used registers by name, everything else dropped as `_`."""
    if isinstance(results, (list, tuple)):
        parts = [_pattern(item, used) for item in cast(Iterable[object], results)]
        return "(" + "".join(part + ", " for part in parts) + ")"
    return str(results) if isinstance(results, Register) and results in used else "_"
