# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chosen tokens, and of the likeliest ones."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.registry import op


def _fake_score(logits: Tensor, targets: Tensor, top: int) -> Tensor:
    return targets.new_empty((*targets.shape, 1 + 2 * top))


@op("score(Tensor logits, Tensor targets, int top) -> Tensor", fake=_fake_score)
def score(
    logits: Tensor,  # float [B, N, V]
    targets: Tensor,  # int32 [B, N]
    top: int,
) -> Tensor:
    """int32 [B, N, 1 + 2 * top]: the target's log-probability, the `top` likeliest, and theirs.

    Log-probabilities travel as the bits of float32. Equal logits: the lower id is likelier. Where
    the vocabulary is smaller than `top`, ids are -1 and log-probabilities -inf. A target of -1
    scores as token 0. NaN counts as the smallest logit here.
    """
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    logged = logits.log_softmax(-1)
    own = logged.gather(2, targets.long().clamp(min=0)[..., None])
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[..., :top]
    values = logged.gather(2, ids)
    if (missing := top - ids.shape[-1]) > 0:
        ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    floats = torch.cat((own, values), -1).float().contiguous().view(torch.int32)
    return torch.cat((floats[..., :1], ids.int(), floats[..., 1:]), -1)
