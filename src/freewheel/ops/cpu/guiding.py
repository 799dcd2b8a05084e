# SPDX-License-Identifier: Apache-2.0
"""Masks of the host on a CPU: rows without one are left alone."""

from __future__ import annotations

import torch
from torch import Tensor

import freewheel.ops.guiding  # noqa: F401 - declares what this file implements
from freewheel.ops.adjusting import allowed_tokens
from freewheel.ops.constraining import GUIDED, WAITING
from freewheel.ops.registry import implement


@implement("guide", "cpu")
def guide(
    logits: Tensor,  # float [B, C, V]
    positions: Tensor,  # int32 [B, C]
    rows: Tensor,  # int32 [B]
    tokens: Tensor,  # int32 [R, T]
    computed_lens: Tensor,  # int32 [R]
    uses: Tensor,  # int32 [R]
    prompt_lens: Tensor,  # int32 [R]
    grammars: Tensor,  # int32 [R, 5]
    grammar_states: Tensor,  # int32 [R]
    mask_lens: Tensor,  # int32 [R]
    masks: Tensor,  # int32 [R, V / 32]
    steps: int,
) -> tuple[Tensor, Tensor]:
    """(float [B, C, V], bool [B, C]), equal to the specification."""
    out, held = logits.clone(), torch.zeros_like(positions, dtype=torch.bool)
    for index, row in enumerate(rows.tolist()):
        grammar = grammars[row].tolist()
        if not int(uses[row]) & 16 or grammar[2] != GUIDED:
            continue
        begin = max(int(computed_lens[row]), int(prompt_lens[row]))
        for column, position in enumerate(positions[index].tolist()):
            first = max(begin, position - steps + 1)
            past = tokens[row, first : position + 1].tolist()
            state = int(grammar_states[row])
            if state == GUIDED or (state == WAITING and grammar[3] in past):
                if int(mask_lens[row]) != position + 1:
                    held[index, column] = True
                    continue
                allowed = allowed_tokens(masks[row : row + 1], out.shape[-1])[0]
                out[index, column].masked_fill_(~allowed, float("-inf"))
    return out, held
