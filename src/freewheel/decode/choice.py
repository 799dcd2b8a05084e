# SPDX-License-Identifier: Apache-2.0
"""The rule of choice, applied to rows of the state."""

from __future__ import annotations

from torch import Tensor

from freewheel import ops
from freewheel.state import SequenceState


def choose_next(state: SequenceState, rows: Tensor, positions: Tensor, logits: Tensor) -> Tensor:
    """int32 [B, C]: the token after each query.

    rows int32 [B]; positions int32 [B, C] of the queries; logits float [B, C, V].
    """
    return ops.choose(logits, positions, rows, *state.sampling)
