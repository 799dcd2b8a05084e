# SPDX-License-Identifier: Apache-2.0
"""A model folder's own chat template, in a sandbox.

The template gets the conversation as plain data and can reach nothing else. Control tokens that
data spells are replaced before rendering by marks that no tokenizer knows, and put back behind it
as text; the ones left are the template's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from freewheel.chat.pieces import GOES_ON, Piece

MAX_PROMPT = 1 << 24
"""Characters of a rendered prompt."""

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters: no text needs them. Text that has them all the same is marked as well."""

_HERE = _OPEN + _CLOSE
"""Where a prompt ends that goes on with its last turn. No mark of a control token is like it."""


class Refusal(ValueError):
    """The template says no, or cannot be rendered; says why."""


class _Unmarked:
    """Replaces control tokens in data by marks, and finds them again in what was rendered."""

    def __init__(self, control_tokens: Sequence[str]) -> None:
        names = sorted((one for one in control_tokens if one), key=len, reverse=True)
        self._names = [*names, _OPEN, _CLOSE]
        self._places = {name: place for place, name in enumerate(self._names)}
        self._in_data = re.compile("|".join(map(re.escape, self._names)))
        self._in_prompt = re.compile("(" + "|".join(map(re.escape, names)) + ")")
        self._marks = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
        self._any = bool(names)

    def data(self, value: Any) -> Any:
        """The same data without a control token in any of its texts, names included."""
        if isinstance(value, str):
            return self._in_data.sub(self._mark, value)
        if isinstance(value, list):
            return [self.data(one) for one in value]
        if isinstance(value, dict):
            return {self.data(name): self.data(one) for name, one in value.items()}
        return value

    def pieces(self, prompt: str) -> Iterator[Piece]:
        """A rendered prompt, its own control tokens apart from text."""
        parts = self._in_prompt.split(prompt) if self._any else [prompt]
        for place, part in enumerate(parts):
            if place % 2:
                yield part, True
            elif part:
                yield self._marks.sub(self._name, part), False

    def _mark(self, found: re.Match[str]) -> str:
        return f"{_OPEN}{self._places[found[0]]}{_CLOSE}"

    def _name(self, found: re.Match[str]) -> str:
        place = int(found[1])
        return self._names[place] if place < len(self._names) else found[0]


class Template:
    """A compiled chat template. Raises Refusal for one that is not valid."""

    def __init__(self, sources: Mapping[str, str], control_tokens: Sequence[str]) -> None:
        """`sources`: "default" and, where a folder has one, "tool_use"."""
        self._unmarked = _Unmarked(control_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in sources.items()
            }
        except (TemplateError, RecursionError) as error:
            raise Refusal(f"the model's chat template is not valid: {error}") from error

    def render(self, given: Mapping[str, Any]) -> list[Piece]:
        """Pieces of the prompt for what a template is given. Raises Refusal."""
        named = "tool_use" if given.get("tools") and "tool_use" in self._templates else "default"
        size = 0
        parts: list[str] = []
        data = {
            name: self._unmarked.data(value) if name in ("messages", "tools") else value
            for name, value in given.items()
        }
        goes_on = given.get(GOES_ON, False)
        if goes_on:
            turn = data["messages"][-1]
            turn["content" if turn["content"] else "reasoning_content"] += _HERE
        try:
            for part in self._templates[named].generate(data):
                parts.append(part)
                size += len(part)
                if size > MAX_PROMPT:
                    raise Refusal(f"the prompt is longer than {MAX_PROMPT} characters")
        except SecurityError as error:
            raise Refusal(
                f"the model's chat template reaches for what it may not: {error}"
            ) from error
        except TemplateError as error:
            raise Refusal(
                f"the model's chat template refuses this conversation: {error}"
            ) from error
        except _FAULTS as error:
            kind = type(error).__name__
            raise Refusal(
                f"the model's chat template fails on this conversation: {kind}: {error}"
            ) from error
        prompt = "".join(parts)
        return list(self._unmarked.pieces(_until_here(prompt) if goes_on else prompt))


def _until_here(prompt: str) -> str:
    """What is before the end of the turn that goes on. Raises Refusal if that cannot be told."""
    before, *behind = prompt.split(_HERE)
    if len(behind) != 1:
        raise Refusal(
            "the model's chat template does not write the last turn, which is to go on, as it is"
        )
    return before


_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What an expression of a template may raise when the data is not what it expects."""


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter as transformers has it: Jinja's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> str:
    raise TemplateError(str(message))
