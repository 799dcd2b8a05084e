# SPDX-License-Identifier: Apache-2.0
"""The choice of tokens on a CPU: no sorting and no noise for rows that do not sample."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.choosing import filter_logits, gumbel, mask_stop_ids
from freewheel.ops.registry import implement


@implement("choose", "cpu")
def choose(
    logits: Tensor,  # float [B, C, V]
    positions: Tensor,  # int32 [B, C]
    rows: Tensor,  # int32 [B]
    temperature: Tensor,  # float32 [R]
    top_k: Tensor,  # int32 [R]
    top_p: Tensor,  # float32 [R]
    min_p: Tensor,  # float32 [R]
    seeds: Tensor,  # int64 [R]
    stop_ids: Tensor,  # int32 [R, S]
    minimum_lens: Tensor,  # int32 [R]
) -> Tensor:
    """int32 [B, C], equal to the specification: each row does only what its parameters ask."""
    at = rows.long()
    early = positions + 1 < minimum_lens[at][:, None]
    if early.any():
        logits = mask_stop_ids(logits, stop_ids[at], early)
    best, chosen = logits.max(-1)
    for row in (temperature[at] > 0).nonzero().flatten().tolist():
        one = at[row : row + 1]
        scaled = logits[row : row + 1] / temperature[one].to(logits.dtype)
        if top_k[one] > 0 or top_p[one] < 1 or min_p[one] > 0:
            scaled = filter_logits(scaled, top_k[one], top_p[one], min_p[one])
        noise = gumbel(seeds[one], positions[row : row + 1], logits.shape[-1])
        chosen[row] = (scaled + noise.to(logits.dtype)).argmax(-1)[0]
    return chosen.where(best > -torch.inf, -1).int()
