# SPDX-License-Identifier: Apache-2.0
"""Tool calls in an answer's text, read as the text comes.

What a parser says depends on the text alone, not on how it was cut into pieces. Text is held back
only while it may still be markup. A call is told of as soon as its first argument begins or it
ends, and from then on its arguments grow; what breaks off before that is content, markup and all.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freewheel.chat.turns import Tool
from freewheel.spec.references import steps_of

SPACE = " \t\r\n"
LONGEST_NAME = 256
"""Characters of an argument's name; a longer one is no name."""


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """Call `index` of the answer has begun."""

    index: int
    name: str


@dataclass(frozen=True)
class CallDelta:
    """More of the JSON text of its arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    """Its arguments are whole: a JSON object. A call that breaks off has no such event."""

    index: int


Event = Content | CallBegun | CallDelta | CallEnded


class Parser(ABC):
    """Reads one answer. Never raises for what the answer holds."""

    def __init__(
        self,
        openings: Sequence[str],
        tools: Sequence[Tool],
        at_most: int | None = None,
        only_calls: bool = False,
    ) -> None:
        """`openings`: what begins markup. `at_most` so many calls: behind them nothing is read.
        `only_calls`: the answer is held to calls, so that what is no call yet is no content."""
        self._openings = tuple(openings)
        self._tools = {tool.name: tool for tool in tools}
        self._at_most, self._only_calls = at_most, only_calls
        self._held = ""  # text not understood yet
        self._raw = ""  # markup read since something was told of it
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._content
        self._names: set[str] = set()  # arguments of the call that is open
        self._name = ""
        self._begun = False
        self.calls = 0
        """Calls begun."""
        self.ended = 0
        """Calls whose arguments are whole."""
        self.full = False
        """The most calls have been read: nothing that follows counts."""

    def push(self, text: str) -> list[Event]:
        """What `text` adds."""
        if not self.full:
            self._held += text
            while not self.full and self._state():
                pass
        return self._told()

    def finish(self) -> list[Event]:
        """What was held back, now that nothing follows."""
        if self._state == self._content:
            self._say(self._held)
        elif self._begun:
            self._cut()
        elif not self._in_block():
            self._say(self._raw + self._held)
        self._held = self._raw = ""
        return self._told()

    @abstractmethod
    def _open(self) -> Callable[[], bool]:
        """The state behind an opening."""

    @abstractmethod
    def _in_block(self) -> bool:
        """A call has ended and markup may go on: what is cut there is no text."""

    @abstractmethod
    def _closer(self) -> str:
        """What ends the value of an argument."""

    @abstractmethod
    def _json_value(self) -> bool:
        """The state in which a value is held back until it is whole."""

    # ---- states: read what can be read; False if more text is needed first

    def _content(self) -> bool:
        found = [at for at in (self._held.find(one) for one in self._openings) if at >= 0]
        if found:
            start = min(found)
            opening = max((o for o in self._openings if self._held.startswith(o, start)), key=len)
            self._say(self._held[:start])
            self._held, self._raw = self._held[start + len(opening) :], opening
            self._state = self._open()
            return True
        kept = max(tail_of(self._held, one) for one in self._openings)
        self._say(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return False

    def _text(self) -> bool:
        """A text argument: what is here goes on at once."""
        text, ends = self._value_so_far()
        self._grow(json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if ends else ""))
        return ends

    def _json(self) -> bool:
        """Any other argument: JSON, which counts when it is whole."""
        at = self._held.find(self._closer())
        if at < 0:
            return False
        text = self._held[:at].strip(SPACE)
        if not is_json(text):
            return self._break()
        self._grow(text)
        self._take(at + len(self._closer()))
        return True

    # ---- what states are made of

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        self._raw += taken
        return taken

    def _skip_space(self) -> None:
        self._take(len(self._held) - len(self._held.lstrip(SPACE)))

    def _expect(self, options: Sequence[str]) -> str | None:
        """The option that comes next; "" if that cannot be said yet; None if none does."""
        for option in options:
            if self._held.startswith(option):
                return self._take(len(option))
        return "" if any(option.startswith(self._held) for option in options) else None

    def _break(self) -> bool:
        """This is no markup after all: it is content if nothing was told of it."""
        if not self._begun:
            self._say(self._raw)
        self._raw, self._begun = "", False
        self._state = self._content
        return True

    def _begin(self) -> None:
        if not self._begun:
            self._events.append(CallBegun(self.calls, self._name))
            self.calls, self._begun, self._raw = self.calls + 1, True, ""

    def _argument(self, name: str, is_text: bool) -> None:
        """An argument begins."""
        self._begin()
        opening = ", " if self._names else "{"
        quote = '"' if is_text else ""
        self._grow(f"{opening}{json.dumps(name, ensure_ascii=False)}: {quote}")
        self._names.add(name)

    def _end(self) -> None:
        """The call is whole."""
        self._begin()
        self._grow("}" if self._names else "{}")
        self._events.append(CallEnded(self.calls - 1))
        self.ended += 1
        self._names, self._begun, self._raw = set(), False, ""
        if self._at_most is not None and self.ended >= self._at_most:
            self.full, self._held = True, ""

    def _value_so_far(self) -> tuple[str, bool]:
        """Text of a value, without what may be its end; whether it is whole."""
        closer = self._closer()
        at = self._held.find(closer)
        if at >= 0:
            text = self._held[:at]
            self._take(at + len(closer))
            return text, True
        text = self._held[: len(self._held) - tail_of(self._held, closer)]
        self._take(len(text))
        return text, False

    def _cut(self) -> None:
        """The answer ends within a call: what is known of a value is told."""
        if self._state == self._json_value:
            self._grow(self._value_so_far()[0].lstrip(SPACE))

    def _grow(self, text: str) -> None:
        if text:
            self._events.append(CallDelta(self.calls - 1, text))

    def _say(self, text: str) -> None:
        if text and not self._only_calls:
            self._events.append(Content(text))

    def _told(self) -> list[Event]:
        events, self._events = self._events, []
        told: list[Event] = []
        for event in events:
            last = told[-1] if told else None
            if isinstance(event, Content) and isinstance(last, Content):
                told[-1] = Content(last.text + event.text)
            elif isinstance(event, CallDelta) and last == CallDelta(event.index, _text_of(last)):
                told[-1] = CallDelta(event.index, _text_of(last) + event.text)
            else:
                told.append(event)
        return told


def _text_of(event: Event | None) -> str:
    return event.text if isinstance(event, CallDelta) else ""


def tail_of(text: str, marker: str) -> int:
    """Length of the longest end of `text` with which `marker` begins, the whole of it apart."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value."""
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def values_of(arguments: str) -> dict[str, Any]:
    """The arguments in a call's JSON text, without the last one if the text breaks off in it.

    The text is one that a parser told of: `{"name": value, ...`.
    """
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    found: dict[str, Any] = {}
    at = 1
    while at < len(arguments):
        try:
            name, end = decoder.raw_decode(arguments, at)
            value, end = decoder.raw_decode(arguments, end + len(": "))
        except (ValueError, RecursionError):
            break
        if end >= len(arguments) and type(value) in (int, float):
            break  # it may go on
        found[name], at = value, end + len(", ")
    return found


def is_text(schema: Mapping[str, Any] | None, name: str) -> bool:
    """Whether a tool's schema says that argument `name` is text and nothing else, in each of the
    alternatives that name it."""
    found = _named(schema, name, schema, 0)
    return bool(found) and all(_only_text(one, schema, 0) for one in found)


LEVELS = 16
"""References and alternatives inside one another that are followed."""


def _named(schema: Any, name: str, root: Any, level: int) -> list[Any]:
    """What the schema says of a property."""
    schema = _target(schema, root)
    if not isinstance(schema, Mapping) or level > LEVELS:
        return []
    properties = schema.get("properties")
    own = [properties[name]] if isinstance(properties, Mapping) and name in properties else []
    parts = (schema.get(word) for word in ("anyOf", "oneOf", "allOf"))
    branches = [one for part in parts if isinstance(part, list) for one in part]
    return own + [one for branch in branches for one in _named(branch, name, root, level + 1)]


def _only_text(schema: Any, root: Any, level: int) -> bool:
    found = _target(schema, root)
    if not isinstance(found, Mapping) or level > LEVELS:
        return False
    values = found.get("enum", [found["const"]] if "const" in found else None)
    if isinstance(values, list):
        return all(isinstance(value, str) for value in values)
    choices = found.get("anyOf", found.get("oneOf"))
    if isinstance(choices, list) and choices and "type" not in found:
        return all(_only_text(one, root, level + 1) for one in choices)
    return found.get("type") in ("string", ["string"])


def _target(schema: Any, root: Any) -> Any:
    """What a reference names, where it is one."""
    for _ in range(LEVELS):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for name in steps_of(reference):
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema


def _no_constant(text: str) -> None:
    raise ValueError(text)
