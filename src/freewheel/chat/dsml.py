# SPDX-License-Identifier: Apache-2.0
"""Calls as DeepSeek-V3.2 and V4 write them.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

The block is named `tool_calls` in V4. An empty line before it belongs to it. `string="false"` says
that the value is JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from freewheel.chat.markup import LONGEST_NAME, Parser
from freewheel.chat.turns import Tool

DSML = "｜DSML｜"
_KINDS = ('" string="true">', '" string="false">')


class DsmlParser(Parser):
    """Reads blocks called `block`."""

    def __init__(
        self,
        block: str,
        tools: Sequence[Tool],
        at_most: int | None = None,
        only_calls: bool = False,
    ) -> None:
        opening = f"<{DSML}{block}>"
        super().__init__((f"\n\n{opening}", opening), tools, at_most, only_calls)
        self._end_of_block = f"</{DSML}{block}>"
        self._headers = tuple(f'{name}">' for name in self._tools)
        self._before = 0  # calls that had ended when this block began
        self._key = ""

    def _open(self) -> Callable[[], bool]:
        self._before = self.ended
        return self._block

    def _in_block(self) -> bool:
        return self.ended > self._before

    def _closer(self) -> str:
        return f"</{DSML}parameter>"

    def _block(self) -> bool:
        self._skip_space()
        found = self._expect((f'<{DSML}invoke name="', self._end_of_block))
        if not found:
            return found is None and self._break()
        if found != self._end_of_block:
            self._state = self._header
        elif self.ended == self._before:
            return self._break()
        else:
            self._raw, self._state = "", self._content
        return True

    def _header(self) -> bool:
        found = self._expect(self._headers)
        if not found:
            return found is None and self._break()
        self._name, self._names = found[:-2], set()
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        self._skip_space()
        found = self._expect((f'<{DSML}parameter name="', f"</{DSML}invoke>"))
        if not found:
            return found is None and self._break()
        if found.startswith("</"):
            self._state = self._block
            self._end()
        else:
            self._state = self._argument_name
        return True

    def _argument_name(self) -> bool:
        at = self._held.find('"', 0, LONGEST_NAME + 1)
        if at < 0:
            return len(self._held) > LONGEST_NAME and self._break()
        if self._held[:at] in self._names:
            return self._break()
        self._key = self._take(at)
        self._state = self._kind
        return True

    def _kind(self) -> bool:
        found = self._expect(_KINDS)
        if not found:
            return found is None and self._break()
        is_text = found == _KINDS[0]
        self._argument(self._key, is_text)
        self._state = self._text_value if is_text else self._json_value
        return True

    def _text_value(self) -> bool:
        return self._after(self._text())

    def _json_value(self) -> bool:
        return self._after(self._json())

    def _after(self, whole: bool) -> bool:
        if whole and self._state != self._content:
            self._state = self._arguments
        return whole
