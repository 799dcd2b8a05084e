# SPDX-License-Identifier: Apache-2.0
"""A row of the tables of names: what vLLM and SGLang call a thing, and what it is called here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Row:
    """`vllm`, `sglang`: their names, with spaces between, in which `*` stands for any letters;
    empty if they have none. `ours`: likewise; empty if there is none, and then `note` says why or
    what is done instead. Else `note` says what is not quite the same."""

    vllm: str
    sglang: str
    ours: str
    note: str = ""

    @property
    def theirs(self) -> list[str]:
        """All names that the others have."""
        return list(dict.fromkeys(f"{self.vllm} {self.sglang}".split()))

    def advice(self, written: str) -> str:
        """The end of a sentence that a name of theirs begins. `written`: ours, as it is written."""
        if not written:
            return self.note
        return f"use {written}: {self.note}" if self.note else f"use {written}"


Section = tuple[str, tuple[Row, ...]]
"""A heading, and its rows."""


class Names:
    """Rows by the names of others."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = tuple(rows)
        self._exact: dict[str, list[Row]] = {}
        self._patterns: list[tuple[str, Row]] = []
        for row in self.rows:
            for name in row.theirs:
                if "*" in name:
                    self._patterns.append((name, row))
                else:
                    self._exact.setdefault(name, []).append(row)

    @classmethod
    def of(cls, *sections: Section) -> Names:
        return cls(row for _, rows in sections for row in rows)

    def find(self, name: str) -> Row | None:
        """The first row that has the name, or a pattern that it fits."""
        found = self._exact.get(name)
        if found:
            return found[0]
        return next((row for pattern, row in self._patterns if fnmatchcase(name, pattern)), None)
