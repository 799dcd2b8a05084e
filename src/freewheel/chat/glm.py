# SPDX-License-Identifier: Apache-2.0
"""Calls as GLM's templates write them.

    <tool_call>f
    <arg_key>city</arg_key>
    <arg_value>Rome</arg_value>
    </tool_call>

Later templates leave the line breaks out. Whether a value is text or JSON, the tool's schema says;
where it does not, a value that is JSON counts as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from freewheel.chat.markup import LONGEST_NAME, SPACE, Parser, is_json, is_text
from freewheel.chat.turns import Tool

CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
KEY, END_OF_KEY = "<arg_key>", "</arg_key>"
VALUE, END_OF_VALUE = "<arg_value>", "</arg_value>"
TOKENS = (CALL, END_OF_CALL, KEY, END_OF_KEY, VALUE, END_OF_VALUE)


class GlmParser(Parser):
    """Reads `<tool_call>` elements."""

    def __init__(
        self, tools: Sequence[Tool], at_most: int | None = None, only_calls: bool = False
    ) -> None:
        super().__init__((f"\n{CALL}", CALL), tools, at_most, only_calls)
        self._key = ""

    def _open(self) -> Callable[[], bool]:
        return self._header

    def _in_block(self) -> bool:
        return False

    def _closer(self) -> str:
        return END_OF_VALUE

    def _header(self) -> bool:
        self._skip_space()
        ends = [at for at in (self._held.find(end) for end in ("<", *SPACE)) if at >= 0]
        name = self._held[: min(ends)] if ends else self._held
        known = name in self._tools if ends else any(tool.startswith(name) for tool in self._tools)
        if not known:
            return self._break()
        if not ends:
            return False
        self._take(len(name))
        self._name, self._names = name, set()
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        self._skip_space()
        found = self._expect((KEY, END_OF_CALL))
        if not found:
            return found is None and self._break()
        if found == END_OF_CALL:
            self._state = self._content
            self._end()
        else:
            self._state = self._argument_name
        return True

    def _argument_name(self) -> bool:
        at = self._held.find(END_OF_KEY, 0, LONGEST_NAME + len(END_OF_KEY))
        if at < 0:
            too_long = len(self._held) >= LONGEST_NAME + len(END_OF_KEY)
            return too_long and self._break()
        name = self._held[:at].strip(SPACE)
        if name in self._names:
            return self._break()
        self._key = name
        self._take(at + len(END_OF_KEY))
        self._state = self._opening
        return True

    def _opening(self) -> bool:
        self._skip_space()
        found = self._expect((VALUE,))
        if not found:
            return found is None and self._break()
        as_text = is_text(self._tools[self._name].parameters, self._key)
        self._argument(self._key, as_text)
        self._state = self._text_value if as_text else self._json_value
        return True

    def _text_value(self) -> bool:
        whole = self._text()
        if whole:
            self._state = self._arguments
        return whole

    def _json_value(self) -> bool:
        """JSON, or else text."""
        at = self._held.find(END_OF_VALUE)
        if at < 0:
            return False
        text = self._held[:at]
        value = text.strip(SPACE)
        self._grow(value if is_json(value) else json.dumps(text, ensure_ascii=False))
        self._take(at + len(END_OF_VALUE))
        self._state = self._arguments
        return True
