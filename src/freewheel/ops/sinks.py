# SPDX-License-Identifier: Apache-2.0
"""Attention over picked rows of two caches, with a learned sink in every head's denominator."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.attention import GATHER_LIMIT
from freewheel.ops.dense import wide
from freewheel.ops.registry import op


@op(
    "sink_attention(Tensor query, Tensor keys, Tensor slots, Tensor entries, Tensor entry_slots, "
    "Tensor sinks, float scale) -> Tensor",
    fake=lambda query, *_: torch.empty_like(query, memory_format=torch.contiguous_format),
)
def sink_attention(
    query: Tensor,  # [B, W, H, D]
    keys: Tensor,  # [n_pages, page_size, D]
    slots: Tensor,  # int32 [B, W, K]  negative: no key
    entries: Tensor,  # [m_pages, page_rows, D]
    entry_slots: Tensor,  # int32 [B, W, E]  negative: no entry
    sinks: Tensor,  # float [H]
    scale: float,
) -> Tensor:  # [B, W, H, D]
    """The keys and entries listed, weighted by softmax over their scores and the head's sink.

    A score is scale * query . key. The sink takes its share of the weight and adds nothing
    (DeepSeek-V4 report, section 2.3). Lanes may be dead anywhere, and are then not read; none lists
    a row twice. A query without any lane gives zeros.
    """
    width, dim = slots.shape[2] + entry_slots.shape[2], query.shape[3]
    step = max(1, GATHER_LIMIT // (width * dim))
    pieces = zip(
        query.flatten(0, 1).split(step),
        slots.flatten(0, 1).split(step),
        entry_slots.flatten(0, 1).split(step),
        strict=True,
    )
    outputs = [
        _attend(q, torch.cat((_rows(keys, own), _rows(entries, more)), 1), own, more, sinks, scale)
        for q, own, more in pieces
    ]
    return torch.cat(outputs).view_as(query).to(query.dtype)


def _rows(cache: Tensor, slots: Tensor) -> Tensor:
    """[N, K, D] of cache [n_pages, page_size, D] at slots [N, K]; anything where negative."""
    flat = cache.view(-1, cache.shape[2])
    return flat.index_select(0, slots.clamp(min=0).flatten()).view(*slots.shape, flat.shape[1])


def _attend(
    query: Tensor, keys: Tensor, slots: Tensor, entry_slots: Tensor, sinks: Tensor, scale: float
) -> Tensor:
    """query [N, H, D], keys [N, K + E, D] -> [N, H, D]"""
    dead = torch.cat((slots, entry_slots), dim=1) < 0  # bool [N, K + E]
    live_keys = keys.to(wide(query).dtype).masked_fill(dead[:, :, None], 0)
    scores = (wide(query) @ live_keys.transpose(1, 2)) * scale  # [N, H, K + E]
    scores = scores.masked_fill(dead[:, None], float("-inf"))
    sink = sinks.to(scores.dtype)[:, None]  # [H, 1]
    highest = torch.maximum(scores.amax(-1, keepdim=True), sink)  # finite: sinks are
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True) + (sink - highest).exp()
    return (weights / total) @ live_keys
