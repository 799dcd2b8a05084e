# SPDX-License-Identifier: Apache-2.0
"""The rule of choice, applied to rows of the state."""

from __future__ import annotations

from torch import Tensor

from freewheel import ops
from freewheel.spec.shape import StepShape
from freewheel.state import SequenceState


def choose_next(
    state: SequenceState,
    rows: Tensor,
    positions: Tensor,
    logits: Tensor,
    shape: StepShape,
    steps: int,
) -> Tensor:
    """int32 [B, C]: the token after each query of a round of `shape`; -1 where none can be chosen,
    -2 where the choice waits for a mask of the host.

    rows int32 [B]; positions int32 [B, C] of the queries; logits float [B, C, V]. `steps`: the most
    tokens of a row from its computed ones to a query's own, itself included. The target and the
    drafter both choose here, so a draft obeys what its request asks for.
    """
    if shape.adjusts:
        logits = ops.adjust(
            logits, positions, rows, state.tokens, state.uses, *state.adjust.columns
        )
        logits = ops.constrain(
            logits,
            positions,
            rows,
            state.tokens,
            state.computed_lens,
            state.uses,
            state.stop_ids,
            *state.adjust.automata,
            steps,
        )
    if not shape.guided:
        return ops.choose(logits, positions, rows, *state.sampling)
    logits, held = ops.guide(
        logits,
        positions,
        rows,
        state.tokens,
        state.computed_lens,
        state.uses,
        *state.adjust.guides,
        steps,
    )
    return ops.choose(logits, positions, rows, *state.sampling).masked_fill(held, ops.HELD)
