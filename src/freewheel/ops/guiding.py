# SPDX-License-Identifier: Apache-2.0
"""Rows whose grammar the host follows: a mask that came with the letter, or nothing is decided.

A mask stands for one position. At any other behind the beginning of the grammar the row is held:
the run of decided tokens ends before it, and the row goes on when the next mask is there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.adjusting import allowed_tokens
from freewheel.ops.constraining import GUIDED, WAITING
from freewheel.ops.registry import nothing, op

HELD = -2
"""A choice that is put off: no token, and no end of the row."""


@op(
    "apply_masks(Tensor rows, Tensor words, Tensor(a!) mask_lens, Tensor(b!) masks) -> ()",
    fake=nothing,
)
def apply_masks(
    rows: Tensor,  # int32 [B]
    words: Tensor,  # int32 [B, 1 + V / 32]  the position that the mask is for, then its bits
    mask_lens: Tensor,  # int32 [R]
    masks: Tensor,  # int32 [R, V / 32]
) -> None:
    """Keep the masks of rows whose first word is not 0."""
    live = words[:, 0] != 0
    target = torch.where(live, rows, 0).long()
    lens = torch.where(live, words[:, 0], mask_lens[:1])
    mask_lens.index_put_((target,), lens)
    masks.index_put_((target,), torch.where(live[:, None], words[:, 1:], masks[:1]))


def _fake_guide(logits: Tensor, positions: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logits), torch.empty_like(positions, dtype=torch.bool)


@op(
    "guide(Tensor logits, Tensor positions, Tensor rows, Tensor tokens, Tensor computed_lens, "
    "Tensor uses, Tensor prompt_lens, Tensor grammars, Tensor grammar_states, Tensor mask_lens, "
    "Tensor masks, int steps) -> (Tensor, Tensor)",
    fake=_fake_guide,
)
def guide(
    logits: Tensor,  # float [B, C, V]
    positions: Tensor,  # int32 [B, C]
    rows: Tensor,  # int32 [B]
    tokens: Tensor,  # int32 [R, T]
    computed_lens: Tensor,  # int32 [R]
    uses: Tensor,  # int32 [R]
    prompt_lens: Tensor,  # int32 [R]
    grammars: Tensor,  # int32 [R, 5]
    grammar_states: Tensor,  # int32 [R]  after the row's first `computed_lens` tokens
    mask_lens: Tensor,  # int32 [R]
    masks: Tensor,  # int32 [R, V / 32]
    steps: int,
) -> tuple[Tensor, Tensor]:
    """(float [B, C, V]: -inf at tokens that a mask does not allow; bool [B, C]: held queries).

    A row is guided if its grammar starts in state GUIDED; from there no token leads elsewhere, so
    a query is guided if the row's state is, or if the trigger stands between there and the query.
    """
    at, place = rows.long(), positions[:, :, None]  # int32 [B, C, 1]
    first = torch.maximum(computed_lens[at], prompt_lens[at])[:, None]  # int32 [B, 1]
    # A query looks back over as many tokens as a rectangle has: the first may be that far behind.
    back = torch.arange(steps, device=logits.device, dtype=torch.int32)
    behind = place - back  # int32 [B, C, steps]
    text = tokens[at][:, None].expand(-1, positions.shape[1], -1)
    seen = text.gather(2, behind.clamp(0, text.shape[2] - 1).long())
    begun = (seen == grammars[at, 3][:, None, None]) & (behind >= first[..., None])
    state = grammar_states[at][:, None]  # int32 [B, 1]
    guided = (state == GUIDED) | ((state == WAITING) & begun.any(2))  # bool [B, C]
    used = (uses[at] & 16 != 0) & (grammars[at, 2] == GUIDED)
    guided = guided & used[:, None]
    there = mask_lens[at][:, None] == positions + 1
    allowed = allowed_tokens(masks[at], logits.shape[-1])[:, None]  # bool [B, 1, V]
    banned = (guided & there)[:, :, None] & ~allowed
    return torch.where(banned, -torch.inf, logits), guided & ~there
