# SPDX-License-Identifier: Apache-2.0
"""The engine's end of the worker: ask for a grammar, wait so long and no longer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from freewheel.errors import RequestError, StartError
from freewheel.spec import Form, Grammar, HostGrammar
from freewheel.structured.process import WorkerProcess

MAX_KEPT = 64
"""Compiled grammars that are kept for further requests."""


@dataclass(frozen=True)
class Wish:
    """What the output must be. `kind`: a field of SamplingParams that says it; `source`: its text.

    The source of choices is a JSON list of strings.
    """

    kind: str
    source: str


class Compiler:
    """Turns wishes into grammars over one vocabulary. Not thread-safe."""

    def __init__(self, vocabulary: Sequence[bytes | None], seconds: float) -> None:
        """`vocabulary`: what each token says; None for one that no text contains.

        `seconds`: the most that one wish may take.
        """
        self._seconds = seconds
        self._kept: OrderedDict[Wish, Form] = OrderedDict()
        self._process = WorkerProcess("freewheel.structured.worker", vocabulary)

    def compile(self, wish: Wish) -> Form:
        """A table for the device if there is one, else a grammar that the host follows.

        Raises RequestError, naming the wish's field, for one that is refused.
        """
        if wish in self._kept:
            self._kept.move_to_end(wish)
            return self._kept[wish]
        form = self._kept[wish] = self._form(wish)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return form

    def close(self) -> None:
        """Stop the worker. The next wish starts another."""
        self._process.close()

    def _form(self, wish: Wish) -> Form:
        found = self._ask(wish)
        if found is None:
            raise RequestError(
                wish.kind, f"was not compiled in {self._seconds:g} s, or took too much memory"
            )
        answer, table = found
        if "error" in answer:
            raise RequestError(wish.kind, str(answer["error"]))
        if "source" in answer:
            return HostGrammar(str(answer["source"]))
        states, classes, start = (int(answer[name]) for name in ("states", "classes", "start"))
        return Grammar(str(answer["key"]), states, classes, start, table)

    def _ask(self, wish: Wish) -> tuple[dict[str, Any], bytes] | None:
        try:
            return self._process.ask({"kind": wish.kind, "source": wish.source}, self._seconds)
        except StartError as error:
            raise RequestError(wish.kind, f"cannot be compiled: {error}") from error
