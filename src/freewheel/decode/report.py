# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and picked keys on their way home: the last words of the outbox."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel import ops
from freewheel.models.base import Model
from freewheel.spec.sampling import MAX_LOGPROBS
from freewheel.spec.shape import StepShape
from freewheel.state import OutboxLayout, Picks, SequenceState, StepView

ECHO_COLUMNS = 64
"""Prompt positions whose logits exist at one time: all of a rectangle's would take
`width * vocabulary` floats."""


def report(logits: Tensor, choice: Tensor, given: Tensor, shape: StepShape, outbox: Tensor) -> None:
    """Scores of the chosen tokens, in the outbox's order: the first decided token first.

    logits float [B, C, V], as the model gave them; choice int32 [B, C]; given int32 [B].
    """
    layout, choices = OutboxLayout.of(shape), choice.shape[1]
    words = ops.score(logits, choice, MAX_LOGPROBS)  # int32 [B, C, SCORE_WORDS]
    index = torch.arange(choices, device=choice.device, dtype=torch.int32)
    first = given - 1 if choices > 1 else torch.zeros_like(given)
    place = (first[:, None] + index).clamp(0, choices - 1).long()  # int64 [B, C]
    packed = words.gather(1, place[:, :, None].expand(-1, -1, words.shape[2]))
    outbox[:, layout.scores : layout.echo].copy_(packed.flatten(1))


def echo(
    state: SequenceState,
    view: StepView,
    target: Model,
    hidden: Tensor,
    shape: StepShape,
    outbox: Tensor,
) -> None:
    """Scores of the token behind each position of a prompt's rectangle. hidden float [B, W, H]."""
    last = state.tokens.shape[1] - 1
    behind = (view.positions + 1).clamp(max=last).long()  # int64 [B, W]
    following = state.tokens[view.rows.long()[:, None], behind]  # int32 [B, W]
    at = OutboxLayout.of(shape).echo
    for start in range(0, shape.width, ECHO_COLUMNS):
        part = slice(start, min(start + ECHO_COLUMNS, shape.width))
        words = ops.score(target.logits(hidden[:, part]), following[:, part], MAX_LOGPROBS)
        flat = words.flatten(1)  # int32 [B, columns * SCORE_WORDS]
        outbox[:, at : at + flat.shape[1]].copy_(flat)
        at += flat.shape[1]


def show(picks: Picks, shape: StepShape, outbox: Tensor) -> None:
    """Which keys the last certain query of the rectangle picked."""
    words, at = picks.words(), OutboxLayout.of(shape).picks
    outbox[:, at : at + words.shape[1]].copy_(words)
