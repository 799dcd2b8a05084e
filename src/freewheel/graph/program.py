# SPDX-License-Identifier: Apache-2.0
"""A recorded list of calls, resolved once into steps that a plain loop performs.

Frozen operands and temporaries live side by side in one list of slots; a temporary's slot is
emptied after its last use, so that a replay allocates as the eager function does. Beyond the calls
themselves a step costs about a fifth of a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, cast

from torch import Tensor

__all__ = ["Call", "Program", "Register"]

Slots = list[Any]
Operands = Callable[[Slots], tuple[Any, ...]]


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


def _is_frozen(operand: object) -> bool:
    return next(_registers(operand), None) is None


@dataclass(frozen=True)
class _Step:
    """`slots[target] = function(*operands(slots))`, then every slot in `dead` is emptied."""

    function: Callable[..., Any]
    operands: Operands
    target: Any  # a slot, None to drop the result, or a tuple of targets for its items
    dead: tuple[int, ...]


class Program:
    """The resolved calls: `run()` performs them, `listing` shows them, `len()` counts them."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = _without_unused_views(calls)
        self._slots: Slots = []
        self._slot_of: dict[Register, int] = {}
        self._last_use = {r: i for i, call in enumerate(self._calls) for r in _read_by(call)}
        steps = [self._step(i, call) for i, call in enumerate(self._calls)]
        self._steps = [(s.function, s.operands, s.target, s.dead) for s in steps]

    def __len__(self) -> int:
        return len(self._calls)

    def run(self) -> None:
        slots = self._slots
        for function, operands, target, dead in self._steps:
            result = function(*operands(slots))
            if type(target) is int:
                slots[target] = result
            elif target is not None:
                _scatter(slots, target, result)
            for slot in dead:
                slots[slot] = None

    @property
    def listing(self) -> str:
        """One line a call; `t*` are temporaries, everything else is frozen."""
        return "\n".join(_line(call) for call in self._calls)

    def _step(self, index: int, call: Call) -> _Step:
        frozen = {key: value for key, value in call.kwargs.items() if _is_frozen(value)}
        live = {key: value for key, value in call.kwargs.items() if key not in frozen}
        function = partial(call.function, **frozen) if frozen else call.function
        if live:
            function = _named_tail(function, tuple(live))
        operands = self._operands((*call.args, *live.values()))
        dead = [self._slot_of[r] for r in _read_by(call) if self._last_use[r] == index]
        target = self._target(call.results, dead)
        return _Step(function, operands, target, tuple(dead))

    def _operands(self, values: tuple[object, ...]) -> Operands:
        """A function from the slots to the positional arguments of a call."""
        if not all(_is_frozen(value) or isinstance(value, Register) for value in values):
            parts = [self._operand(value) for value in values]
            return lambda slots: tuple([part(slots) for part in parts])
        indices = [self._slot(value) for value in values]
        if len(indices) > 1:
            return itemgetter(*indices)
        if not indices:
            return lambda slots: ()
        (only,) = indices
        return lambda slots: (slots[only],)

    def _operand(self, value: object) -> Callable[[Slots], Any]:
        if isinstance(value, (list, tuple)) and not _is_frozen(cast(object, value)):
            parts = [self._operand(item) for item in cast(Iterable[object], value)]
            return lambda slots: [part(slots) for part in parts]
        return itemgetter(self._slot(cast(object, value)))

    def _slot(self, value: object) -> int:
        return self._slot_of[value] if isinstance(value, Register) else self._new_slot(value)

    def _new_slot(self, value: object) -> int:
        self._slots.append(value)
        return len(self._slots) - 1

    def _target(self, results: object, dead: list[int]) -> Any:
        """Where the results go: into slots that this very call empties, as far as there are any."""
        if isinstance(results, (list, tuple)):
            items = cast(Iterable[object], results)
            targets = tuple(self._target(item, dead) for item in items)
            return None if all(target is None for target in targets) else targets
        if not isinstance(results, Register) or results not in self._last_use:
            return None
        slot = self._slot_of[results] = dead.pop() if dead else self._new_slot(None)
        return slot


def _scatter(slots: Slots, target: Any, result: Any) -> None:
    if isinstance(target, tuple):
        for each, item in zip(cast(tuple[Any, ...], target), result, strict=True):
            _scatter(slots, each, item)
    elif target is not None:
        slots[target] = result


def _named_tail(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """`function` with its last positional arguments passed by name."""
    count = -len(names)
    return lambda *values: function(
        *values[:count], **dict(zip(names, values[count:], strict=True))
    )


def _without_unused_views(calls: list[Call]) -> list[Call]:
    kept: list[Call] = []
    used: set[Register] = set()
    for call in reversed(calls):
        if not call.pure_view or not used.isdisjoint(_registers(call.results)):
            kept.append(call)
            used |= _read_by(call)
    return kept[::-1]


def _line(call: Call) -> str:
    operands = [_shown(value) for value in call.args]
    operands += [f"{key}={_shown(value)}" for key, value in call.kwargs.items()]
    text = f"{call.name}({', '.join(operands)})"
    return text if _is_frozen(call.results) else f"{_shown(call.results)} = {text}"


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_shown(item) for item in cast(Iterable[object], value)) + "]"
    return str(value)
