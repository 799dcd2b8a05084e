# SPDX-License-Identifier: Apache-2.0
"""Tables that are printed row by row: on a terminal that is too narrow, a row takes several lines.

Nothing is left out, and what is piped has a line a row whatever its length.
"""

from __future__ import annotations

from collections.abc import Sequence

GAP = "  "
Column = tuple[str, int]
"""A heading, and the letters that its cells take."""


class Columns:
    """`columns` in their order; behind them, `last`, whose cells have any length; none if empty.

    `room`: letters of a line; None: there is no end to it.
    """

    def __init__(self, columns: Sequence[Column], last: str = "", room: int | None = None) -> None:
        self._columns, self._last, self._room = columns, last, room
        self._margin = " " * (columns[0][1] + len(GAP))

    def head(self) -> str:
        """The headings."""
        return self.row([name for name, _ in self._columns], self._last)

    def row(self, cells: Sequence[object], last: str = "") -> str:
        """One row: the first column stands alone in the margin of lines that go on."""
        lines = [""]
        for cell, (_, width) in zip(cells, self._columns, strict=True):
            self._add(lines, f"{cell:>{width}}")
        if last:
            self._add(lines, last)
        return "\n".join(lines)

    def _add(self, lines: list[str], text: str) -> None:
        if not lines[-1]:
            lines[-1] = text
        elif self._room is None or len(lines[-1]) + len(GAP) + len(text) <= self._room:
            lines[-1] += GAP + text
        else:
            lines.append(self._margin + text)
