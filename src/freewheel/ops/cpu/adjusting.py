# SPDX-License-Identifier: Apache-2.0
"""Adjusted logits on a CPU: rows that use nothing are left alone."""

from __future__ import annotations

from torch import Tensor

from freewheel.ops.adjusting import allowed_tokens, banned_tokens, penalise, spread
from freewheel.ops.registry import implement


@implement("adjust", "cpu")
def adjust(
    logits: Tensor,  # float [B, C, V]
    positions: Tensor,  # int32 [B, C]
    rows: Tensor,  # int32 [B]
    tokens: Tensor,  # int32 [R, T]
    uses: Tensor,  # int32 [R]
    prompt_lens: Tensor,  # int32 [R]
    penalties: Tensor,  # float32 [R, 3]
    bias_ids: Tensor,  # int32 [R, N]
    bias_values: Tensor,  # float32 [R, N]
    bad_words: Tensor,  # int32 [R, S, L]
    allowed: Tensor,  # int32 [R, V / 32]
) -> Tensor:
    """float [B, C, V], equal to the specification."""
    out = logits.clone()
    vocabulary = logits.shape[-1]
    at = rows.long()
    for index in uses[at].nonzero().flatten().tolist():
        one = at[index : index + 1]
        used, place = int(uses[one]), positions[index : index + 1]
        text = tokens[one, : int(place.max()) + 1]
        line, behind = out[index : index + 1], prompt_lens[one]
        if used & 1:
            line.copy_(penalise(line, place, text, behind, penalties[one]))
        if used & 2:
            line.add_(spread(bias_ids[one], bias_values[one], line))
        if used & 4:
            line.masked_fill_(~allowed_tokens(allowed[one], vocabulary)[:, None], float("-inf"))
        if used & 8:
            banned = banned_tokens(bad_words[one], place, text, behind, vocabulary)
            line.masked_fill_(banned, float("-inf"))
    return out
