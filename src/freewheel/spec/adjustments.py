# SPDX-License-Identifier: Apache-2.0
"""What a request changes about the logits before the choice, as the device takes it."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BIASES = 300
"""Entries of `logit_bias` that fit a row of the device state."""

MAX_BAD_WORDS = 64
"""Token sequences of `bad_words` that fit a row."""

MAX_BAD_WORD_TOKENS = 8
"""Tokens of one such sequence."""

MAX_GRAMMAR_CELLS = 1 << 21
"""Cells, states times classes, of a grammar's table on the device."""

USES_PENALTIES, USES_BIASES, USES_ALLOWED, USES_BAD_WORDS, USES_GRAMMAR = 1, 2, 4, 8, 16
"""Bits of `SequenceState.uses`: what the row's columns hold; without its bit, one is not read."""


@dataclass(frozen=True)
class Grammar:
    """A finite automaton over tokens: which may follow, and what then may follow them.

    Tokens that lead from every state to the same one are of one class. `table`: int16 in the
    machine's order; the class of each of V tokens, then for each of `states` the next state by
    class, -1 where the token may not follow, and 1 or 0: the text may end here. From every state
    that can be reached the end can be. `key` names the table: equal keys, equal tables.
    """

    key: str
    states: int
    classes: int
    start: int
    table: bytes

    @property
    def cells(self) -> int:
        """int16 cells of `table`."""
        return len(self.table) // 2


@dataclass(frozen=True)
class HostGrammar:
    """A grammar that has no table of bounded size: the host follows it, and sends masks.

    `source`: its text, as `structured.following` reads it.
    """

    source: str


Form = Grammar | HostGrammar
"""What a request's structure compiles to."""


@dataclass(frozen=True, kw_only=True)
class Adjustments:
    """Applied to the logits after position p, in this order, from the row's tokens 0 to p alone.

    1. `repetition` r: the logit of each token that stands in the prompt or the output is divided by
       r where it is positive and multiplied by r elsewhere (Keskar et al., 2019).
    2. `frequency` times the token's count in the output, and `presence` if it is there, are taken
       off.
    3. `biases`: (token id, what is added).
    4. Tokens outside `allowed` (None: all are in it) are never chosen, nor is the last token of one
       of `bad_words` when the output ends in the tokens before it.

    5. Tokens that `grammar` does not let follow the output are never chosen; stop ids may be chosen
       where the grammar may end, and only there. With a `trigger` (a token id; -1: none) the
       grammar begins behind the first such token of the output, and until then the output may not
       end. Once the output holds `budget` tokens (-1: any number) without it, only the trigger
       may be chosen. `optional`: the output may also end without the trigger.
    6. `guided`: in the place of `grammar`, a mask from the host says what may come next. Where it
       is not there, nothing is decided.

    `prompt_len`: tokens of the row's prompt; output begins behind it. `base`: where the grammar's
    table begins in the device's tables, in cells.
    """

    prompt_len: int
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    biases: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    trigger: int = -1
    budget: int = -1
    base: int = 0
    guided: bool = False
    optional: bool = False

    @property
    def constrains(self) -> bool:
        formed = self.grammar is not None or self.guided
        return formed or (self.trigger >= 0 and self.budget >= 0)

    @property
    def uses(self) -> int:
        """The USES bits of what is there."""
        penalties = bool(self.presence or self.frequency or self.repetition != 1.0)
        return (
            penalties * USES_PENALTIES
            | bool(self.biases) * USES_BIASES
            | (self.allowed is not None) * USES_ALLOWED
            | bool(self.bad_words) * USES_BAD_WORDS
            | self.constrains * USES_GRAMMAR
        )
