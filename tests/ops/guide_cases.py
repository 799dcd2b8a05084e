# SPDX-License-Identifier: Apache-2.0
"""Rows held to masks of the host, beside rows that follow a table or nothing."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from freewheel.ops.constraining import GUIDED
from tests.ops.adjust_cases import ints
from tests.ops.grammar_cases import ROWS, VOCABULARY, grammar_case


def guide_case(seed: int, choices: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Arguments of `guide`."""
    case, rng = grammar_case(seed, choices, dtype), random.Random(seed)
    chance = torch.Generator().manual_seed(seed)
    grammars, states = case.grammars.clone(), case.grammar_states.clone()
    uses = case.uses.clone()
    lens = torch.zeros(ROWS, dtype=torch.int32)
    for row in range(1, ROWS):
        if rng.random() < 0.8:
            grammars[row] = ints(0, 1, GUIDED, rng.choice([-1, 3]), -1)
            states[row] = GUIDED if grammars[row, 3] < 0 or rng.random() < 0.3 else -1
            uses[row] = rng.choice([0, 16, 17, 16])
        lens[row] = int(case.computed_lens[row]) + rng.choice([1, 1, 2, 3])
    masks = torch.randint(-(2**31), 2**31 - 1, (ROWS, (VOCABULARY + 31) // 32), generator=chance)
    return (
        case.logits, case.positions, case.rows, case.tokens, case.computed_lens, uses,
        case.prompt_lens, grammars, states, lens, masks.int(), choices,
    )  # fmt: skip


def mask_letter(seed: int) -> tuple[Tensor, Tensor]:
    """(rows int32 [4], words int32 [4, 1 + V / 32]): two rows get a mask, scratch gets none."""
    chance = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31 - 1, (4, 1 + (VOCABULARY + 31) // 32), generator=chance)
    words = words.int()
    words[:, 0] = ints(9, 0, 31, 0)
    return ints(3, 5, 1, 0), words
