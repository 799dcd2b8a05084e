# SPDX-License-Identifier: Apache-2.0
"""Rows that change logits in every way, drawn at random."""

from __future__ import annotations

import random

import torch
from torch import Tensor

ROWS, LENGTH, VOCABULARY = 6, 30, 45


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def adjust_case(seed: int, choices: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Arguments of `adjust`: a batch of rows 1 to 4 and scratch row 0, all kinds of uses."""
    rng, chance = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = ints(*rng.sample(range(1, ROWS), 4), 0)
    starts = [rng.randrange(LENGTH - choices) for _ in range(4)]
    live = [rng.randint(1, choices) for _ in range(4)]
    places = [
        [s + c if c < n else 0 for c in range(choices)] for s, n in zip(starts, live, strict=True)
    ]
    positions = ints(*[p for row in [*places, [0] * choices] for p in row]).view(5, choices)
    tokens = torch.randint(0, 6, (ROWS, LENGTH), generator=chance, dtype=torch.int32)
    uses = ints(0, *[rng.choice([0, 1, 2, 4, 8, 15, 15]) for _ in range(ROWS - 1)])
    bias_ids = torch.full((ROWS, 9), -1, dtype=torch.int32)
    bad_words = torch.full((ROWS, 6, 4), -1, dtype=torch.int32)
    for row in range(ROWS):
        for n, token in enumerate(rng.sample(range(VOCABULARY), rng.randint(0, 9))):
            bias_ids[row, n] = token
        for n in range(rng.randint(0, 6)):
            length = rng.randint(1, 4)
            bad_words[row, n, 4 - length :] = ints(*[rng.randrange(6) for _ in range(length)])
    return (
        (torch.randn(5, choices, VOCABULARY, generator=chance) * 3).to(dtype),
        positions,
        rows,
        tokens,
        uses,
        ints(*[rng.randrange(LENGTH) for _ in range(ROWS)]),
        torch.rand(ROWS, 3, generator=chance) + torch.tensor([-0.5, -0.5, 0.6]),
        bias_ids,
        torch.randn(ROWS, 9, generator=chance),
        bad_words,
        torch.randint(-(2**31), 2**31, (ROWS, 2), generator=chance).int(),
    )
