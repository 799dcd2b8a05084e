# SPDX-License-Identifier: Apache-2.0
"""The one rule by which every token is chosen, by the target and by the drafter alike.

The token after a query is a pure function of (logits, sampling parameters, seed, position):
argmax(filter(logits / T) + gumbel(seed, position)), plain argmax at T = 0. Adding Gumbel noise and
taking the maximum samples from the softmax (E. J. Gumbel, 1954). Because the noise of a position
does not depend on who asks, a draft that equals the choice is the choice: no draft probabilities
are needed, and text with drafts equals text without, token for token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.registry import op


def _fake_choose(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.int32)


@op(
    "choose(Tensor logits, Tensor positions, Tensor rows, Tensor temperature, Tensor top_k, "
    "Tensor top_p, Tensor min_p, Tensor seeds, Tensor stop_ids, Tensor minimum_lens) -> Tensor",
    fake=_fake_choose,
)
def choose(
    logits: Tensor,  # float [B, C, V]
    positions: Tensor,  # int32 [B, C]  position of each query
    rows: Tensor,  # int32 [B]
    temperature: Tensor,  # float32 [R]
    top_k: Tensor,  # int32 [R]  0 = off
    top_p: Tensor,  # float32 [R]
    min_p: Tensor,  # float32 [R]
    seeds: Tensor,  # int64 [R]
    stop_ids: Tensor,  # int32 [R, S]
    minimum_lens: Tensor,  # int32 [R]
) -> Tensor:
    """int32 [B, C]: the token after each query. Equal scores: the lowest id wins.

    -1, no token: the query's logits hold NaN, or none of them is above -inf.
    """
    at = rows.long()
    early = positions + 1 < minimum_lens[at][:, None]  # bool [B, C]
    logits = mask_stop_ids(logits, stop_ids[at], early)
    warm = temperature[at][:, None, None]  # float32 [B, 1, 1]
    best, greedy = logits.max(-1)  # NaN if there is one
    scaled = logits / torch.where(warm > 0, warm, 1).to(logits.dtype)
    kept = filter_logits(scaled, top_k[at], top_p[at], min_p[at])
    noise = gumbel(seeds[at], positions, logits.shape[-1]).to(logits.dtype)
    sampled = (kept + noise).argmax(-1)
    chosen = torch.where(warm[..., 0] > 0, sampled, greedy)
    return torch.where(best > -torch.inf, chosen, -1).int()


def mask_stop_ids(logits: Tensor, stop_ids: Tensor, early: Tensor) -> Tensor:
    """logits [B, C, V] with the row's stop ids at -inf where `early`. stop_ids int32 [B, S]."""
    vocabulary = logits.shape[-1]
    listed = stop_ids.long().clamp(min=-1)  # -1 is parked in an extra column
    listed = torch.where(listed < 0, vocabulary, listed)
    banned = torch.zeros(
        (stop_ids.shape[0], vocabulary + 1), dtype=torch.bool, device=logits.device
    ).scatter(1, listed, True)[:, :vocabulary]
    return torch.where(early[:, :, None] & banned[:, None, :], -torch.inf, logits)


def filter_logits(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """scaled [B, C, V] with filtered tokens at -inf; top_k int32, top_p and min_p float32 [B].

    top_k keeps the k likeliest, top_p the fewest whose share of what is left reaches top_p, min_p
    those at least min_p times as likely as the likeliest. Equal ones: the lowest id is likelier.
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    limit = torch.where(top_k > 0, top_k, scaled.shape[-1])[:, None, None]
    ordered = torch.where(rank < limit, ordered, -torch.inf)
    share = ordered.softmax(-1)
    before = share.cumsum(-1) - share
    share_kept = top_p[
        :, None, None
    ]  # 1 switches the filter off: a rounded sum must not cut the tail
    keep = (before < share_kept) | (share_kept >= 1) | (rank == 0)
    ordered = torch.where(keep, ordered, -torch.inf)
    floor = ordered[..., :1] + min_p.to(scaled.dtype).log()[:, None, None]
    ordered = torch.where(ordered >= floor, ordered, -torch.inf)
    return torch.empty_like(scaled).scatter(-1, order, ordered)


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """float32 [B, C, V]: standard Gumbel noise, a pure function of (seed, position, token).

    seeds int64 [B], positions int32 [B, C]. A counter hashed through 32-bit avalanche rounds gives
    h; -log(-log(1 - (h + 1/2) / 2^32)), arranged so that float32 resolves the upper tail.
    """
    low, high = seeds & 0xFFFFFFFF, (seeds >> 32) & 0xFFFFFFFF
    key = _avalanche(_avalanche(low + 0x9E3779B9) ^ high)  # int64 [B]
    key = _avalanche(key[:, None] ^ (positions.long() * 0x9E3779B1 & 0xFFFFFFFF))  # int64 [B, C]
    token = torch.arange(vocabulary, device=seeds.device) * 0x85EBCA6B & 0xFFFFFFFF
    mixed = _avalanche(_avalanche(key[..., None] ^ token) + key[..., None])  # int64 [B, C, V]
    tail = ((mixed.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -(-torch.log1p(-tail)).log()


def _avalanche(x: Tensor) -> Tensor:
    """A bijection of 32-bit words that flips each output bit with probability near a half.

    Multipliers and shifts: the published search result "lowbias32" (C. Wellons, hash-prospector).
    int64 in and out, the upper half ignored and zero.
    """
    x = x & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)
