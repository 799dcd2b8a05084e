# SPDX-License-Identifier: Apache-2.0
"""Random automata in device tables, and rows that follow them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops.adjust_cases import ints

ROWS, LENGTH, VOCABULARY, CLASSES, STATES = 7, 30, 40, 5, 6


@dataclass(frozen=True)
class GrammarCase:
    """Arguments of `constrain`, by name; two grammars lie one behind the other."""

    logits: Tensor  # float [B, C, V]
    positions: Tensor  # int32 [B, C]
    rows: Tensor  # int32 [B]
    tokens: Tensor  # int32 [R, T]
    computed_lens: Tensor  # int32 [R]
    uses: Tensor  # int32 [R]
    stop_ids: Tensor  # int32 [R, 8]
    prompt_lens: Tensor  # int32 [R]
    grammars: Tensor  # int32 [R, 5]
    grammar_states: Tensor  # int32 [R]
    tables: Tensor  # int16 [cells]
    steps: int

    @property
    def arguments(self) -> tuple[object, ...]:
        return tuple(vars(self).values())


def grammar_case(seed: int, choices: int, dtype: torch.dtype = torch.float32) -> GrammarCase:
    """A batch of four rows and scratch: with a grammar, waiting, free, dead, or without."""
    rng, chance = random.Random(seed), torch.Generator().manual_seed(seed)
    cells = VOCABULARY + STATES * (CLASSES + 1)
    tables = torch.zeros(2 * cells + 1, dtype=torch.int16)
    for base in (0, cells):
        kinds = torch.randint(0, CLASSES, (VOCABULARY,), generator=chance)
        lines = torch.randint(-2, STATES, (STATES, CLASSES + 1), generator=chance).clamp(min=-1)
        lines[:, -1] = torch.randint(0, 2, (STATES,), generator=chance)
        tables[base : base + cells] = torch.cat((kinds, lines.flatten())).short()
    rows = ints(*rng.sample(range(1, ROWS), 4), 0)
    computed = ints(0, *[rng.randrange(LENGTH - choices) for _ in range(ROWS - 1)])
    live = [rng.randint(1, choices) for _ in range(5)]
    places = [
        int(computed[row]) + c if c < n else 0
        for row, n in zip(rows.tolist(), live, strict=True)
        for c in range(choices)
    ]
    grammars = torch.zeros(ROWS, 5, dtype=torch.int32)
    states = torch.full((ROWS,), -2, dtype=torch.int32)
    for row in range(1, ROWS):
        classes = rng.choice([CLASSES, CLASSES, CLASSES, 0])
        trigger = rng.choice([-1, 3]) if classes else 3
        budget = rng.choice([-2, -1, int(computed[row]) + 1, 4]) if trigger >= 0 else -1
        base = rng.choice([0, cells])
        grammars[row] = ints(base, classes, rng.randrange(STATES), trigger, budget)
        states[row] = rng.choice([-1, -2, -3, 2, 4]) if classes else rng.choice([-1, -2])
    stop_ids = torch.full((ROWS, 8), -1, dtype=torch.int32)
    stop_ids[:, 0] = 7
    return GrammarCase(
        torch.randn(5, choices, VOCABULARY, generator=chance).to(dtype),
        ints(*places).view(5, choices),
        rows,
        torch.randint(0, 6, (ROWS, LENGTH), generator=chance, dtype=torch.int32),
        computed,
        ints(0, *[rng.choice([0, 16, 31, 16]) for _ in range(ROWS - 1)]),
        stop_ids,
        ints(*[rng.randrange(LENGTH) for _ in range(ROWS)]),
        grammars,
        states,
        tables,
        choices,
    )
