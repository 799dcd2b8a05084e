# SPDX-License-Identifier: Apache-2.0
"""Columns of the rows that only rounds with `StepShape.adjusts` read, and how they arrive."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel import ops
from freewheel.spec.adjustments import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_GRAMMAR_CELLS,
)
from freewheel.state.arena import Arena


def table_cells(vocabulary: int) -> int:
    """int16 cells of one grammar's place in the tables."""
    return vocabulary + MAX_GRAMMAR_CELLS


def allowed_words(vocabulary: int) -> int:
    """int32 words that hold one bit for each token."""
    return (vocabulary + 31) // 32


@dataclass(frozen=True)
class AdjustColumns:
    """Set whole by an admission whose request uses any of it; see `SequenceState.uses`.

    Nothing here but `grammar_states` changes while a request runs: what a penalty counts is counted
    anew, from the row's tokens, in every round. A grammar's state is that after the row's computed
    tokens; drafts are followed from there in every round, and leave nothing behind.
    """

    prompt_lens: Tensor  # int32 [R]
    penalties: Tensor  # float32 [R, 3]  presence, frequency, repetition
    bias_ids: Tensor  # int32 [R, MAX_BIASES]  -1 where unused
    bias_values: Tensor  # float32 [R, MAX_BIASES]
    bad_words: Tensor  # int32 [R, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]  -1 before a sequence
    grammars: Tensor  # int32 [R, 5]  base, classes, start, trigger, budget (`ops.constraining`)
    grammar_states: Tensor  # int32 [R]
    allowed: Tensor  # int32 [R, V / 32]  bit v % 32 of word v / 32: token v may be chosen

    mask_lens: Tensor  # int32 [R]  the position that the row's mask is for
    masks: Tensor  # int32 [R, V / 32]  as `allowed`, from the host (`ops.guiding`)

    tables: Tensor  # int16 [cells]  the last one is scratch

    @classmethod
    def build(cls, arena: Arena, rows: int, vocabulary: int, grammars: int) -> AdjustColumns:
        """`grammars`: tables that fit at one time."""

        def ints(name: str, *shape: int, fill: int = 0) -> Tensor:
            return arena.new(f"adjust.{name}", (rows, *shape), torch.int32, fill)

        def floats(name: str, *shape: int) -> Tensor:
            return arena.new(f"adjust.{name}", (rows, *shape), torch.float32)

        return cls(
            prompt_lens=ints("prompt_lens"),
            penalties=floats("penalties", 3),
            bias_ids=ints("bias_ids", MAX_BIASES, fill=-1),
            bias_values=floats("bias_values", MAX_BIASES),
            bad_words=ints("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS, fill=-1),
            grammars=ints("grammars", 5),
            grammar_states=ints("grammar_states", fill=-2),
            allowed=ints("allowed", allowed_words(vocabulary)),
            mask_lens=ints("mask_lens"),
            masks=ints("masks", allowed_words(vocabulary)),
            tables=arena.new_undefined(
                "adjust.tables", (grammars * table_cells(vocabulary) + 1,), torch.int16
            ),
        )

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What `ops.adjust` reads, in its order."""
        return (
            self.prompt_lens,
            self.penalties,
            self.bias_ids,
            self.bias_values,
            self.bad_words,
            self.allowed,
        )

    @property
    def automata(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `ops.constrain` and `ops.follow` read, in their order."""
        return self.prompt_lens, self.grammars, self.grammar_states, self.tables

    @property
    def guides(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What `ops.guide` reads, in its order."""
        held = (self.mask_lens, self.masks)
        return self.prompt_lens, self.grammars, self.grammar_states, *held

    def receive(self, rows: Tensor, words: Tensor) -> None:
        """Take in a letter's part. rows int32 [B]; words int32 [B, words], see InboxLayout."""
        ops.apply_adjustments(
            rows,
            words,
            self.prompt_lens,
            self.penalties,
            self.grammars,
            self.grammar_states,
            self.bias_ids,
            self.bias_values,
            self.bad_words,
            self.allowed,
        )
