# SPDX-License-Identifier: Apache-2.0
"""What a canary found changed that nobody had written, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

KV, PAGE_TABLE, TOKENS = 1, 2, 4
"""Bits of a verdict: stored rows, entries of a page table, tokens or lengths."""

KINDS = {KV: "kv", PAGE_TABLE: "page_table", TOKENS: "tokens"}

COLUMNS_A_WORD = 31
"""Columns of a page table for which one int32 says whether their pages are as they were."""


@dataclass(frozen=True)
class Watch:
    """What a canary is asked for.

    `pages`: of each group and row, those that a decoding round looks at, in turns; None: all.
    `perturb`: damage something in every so many rounds, as `seed` says; 0: never.
    """

    pages: int | None = None
    perturb: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Violation:
    """A row holds what nobody wrote. `kinds`: of KINDS; `columns[g]`: those of group g whose pages
    are not what their checksums say."""

    kinds: tuple[str, ...]
    columns: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class VerdictLayout:
    """Words of a row's verdict, the last ones of its outbox: its kinds, then for each group a bit
    for each of the `columns[g]` columns of its page table."""

    columns: tuple[int, ...]

    @property
    def words(self) -> int:
        return 1 + sum(-(-count // COLUMNS_A_WORD) for count in self.columns)

    def read(self, words: list[int]) -> Violation | None:
        """What the words of one row say; None if all is as it should be."""
        if not words[0]:
            return None
        kinds = tuple(name for bit, name in KINDS.items() if words[0] & bit)
        found: list[tuple[int, ...]] = []
        at = 1
        for count in self.columns:
            size = -(-count // COLUMNS_A_WORD)
            bits = enumerate(words[at : at + size])
            found.append(
                tuple(
                    COLUMNS_A_WORD * nth + bit
                    for nth, word in bits
                    for bit in range(COLUMNS_A_WORD)
                    if word >> bit & 1
                )
            )
            at += size
        return Violation(kinds, tuple(found))
