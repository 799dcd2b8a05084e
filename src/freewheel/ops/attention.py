# SPDX-License-Identifier: Apache-2.0
"""DeepSeek sparse attention over paged caches: score every key, keep the best k, attend to those.

A cache is [n_pages, page_size, D]; slot s is row s of its [n_pages * page_size, D] view. Position t
of row r lies in slot page_table[r, t // page_size] * page_size + t % page_size. A query sees
positions below its kv_len, itself included; kv_len 0 marks padding. What a query does not see is
never followed: not stale page numbers past its row's length, not the values behind them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops.dense import wide
from freewheel.ops.registry import op

GATHER_LIMIT = 1 << 24
"""Elements of gathered keys held at once; wider rectangles are cut into pieces of whole queries."""


def _fake_index_logits(
    query: Tensor, head_weights: Tensor, index_keys: Tensor, page_table: Tensor, *_: object
) -> Tensor:
    return head_weights.new_empty((*query.shape[:2], page_table.shape[1] * index_keys.shape[1]))


@op(
    "index_logits(Tensor query, Tensor head_weights, Tensor index_keys, Tensor page_table, "
    "Tensor rows, Tensor kv_lens, int skip=0) -> Tensor",
    fake=_fake_index_logits,
)
def index_logits(
    query: Tensor,  # [B, W, Hi, Di]
    head_weights: Tensor,  # float [B, W, Hi]  all scales folded in
    index_keys: Tensor,  # [n_pages, page_size, Di]
    page_table: Tensor,  # int32 [R, P]
    rows: Tensor,  # int32 [B]
    kv_lens: Tensor,  # int32 [B, W]
    skip: int = 0,
) -> Tensor:  # float [B, W, P * page_size]
    """sum over heads h of head_weights[h] * relu(query[h] . key(t)); -inf for t >= kv_len.

    With `skip` = k > 0 the result is for `topk_slots` of k alone: a body may leave undefined what
    that does not look at, which is t >= kv_len, and all of a query that sees at most k keys.

    The lightning indexer's score (DeepSeek-V3.2, arXiv:2512.02556, 2.1). Heads are summed one by
    one, so no tensor here is larger than the result.

    Error: products and sums are float32. Against float64 on the same inputs a body stays within
    2e-5 of the largest logit from float32, 2^-6 from bfloat16 (in which products are exact, so the
    bound is slack).
    """
    pages = live_pages(page_table, rows, kv_lens, index_keys.shape[1])  # int32 [B, P]
    (batch, columns), (_, page_size, dim) = pages.shape, index_keys.shape
    length = columns * page_size
    gathered = index_keys.index_select(0, pages.flatten())  # [B * P, page_size, Di]
    keys = gathered.view(batch, length, dim).to(head_weights.dtype).transpose(1, 2)  # [B, Di, S]
    logits = head_weights.new_zeros((*query.shape[:2], length))
    for head in range(query.shape[2]):
        products = query[:, :, head].to(head_weights.dtype) @ keys  # [B, W, S]
        logits += products.relu_() * head_weights[:, :, head, None]
    beyond = torch.arange(length, device=kv_lens.device) >= kv_lens[..., None]
    return logits.masked_fill_(beyond, float("-inf"))


def live_pages(page_table: Tensor, rows: Tensor, kv_lens: Tensor, page_size: int) -> Tensor:
    """int32 [B, P]: page numbers of each batch row, 0 past its longest kv_len."""
    columns = torch.arange(page_table.shape[1], device=rows.device) * page_size
    used = columns < kv_lens.amax(dim=1, keepdim=True)  # bool [B, P]
    return page_table.index_select(0, rows).masked_fill(~used, 0)


def _fake_topk_slots(
    logits: Tensor, page_table: Tensor, rows: Tensor, kv_lens: Tensor, page_size: int, k: int
) -> Tensor:
    return logits.new_empty((*logits.shape[:2], k), dtype=torch.int32)


@op(
    "topk_slots(Tensor logits, Tensor page_table, Tensor rows, Tensor kv_lens, int page_size, "
    "int k) -> Tensor",
    fake=_fake_topk_slots,
)
def topk_slots(
    logits: Tensor,  # float [B, W, S], S = P * page_size
    page_table: Tensor,  # int32 [R, P]
    rows: Tensor,  # int32 [B]
    kv_lens: Tensor,  # int32 [B, W]
    page_size: int,
    k: int,
) -> Tensor:  # int32 [B, W, k]
    """Slots of the k best positions below kv_len, by ascending position, then -1.

    Equal logits: the lowest position wins. NaN counts as -inf. k may exceed S. A kv_len of at most
    k selects every position below it.
    """
    length = logits.shape[2]
    beyond = torch.arange(length, device=logits.device) >= kv_lens[..., None]
    ranked = logits.masked_fill(beyond | logits.isnan(), float("-inf"))
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :k]  # int64 [B, W, k']
    # A position past kv_len can only be here because fewer than k precede it.
    positions = order.masked_fill(order >= kv_lens[..., None], length).sort(dim=-1).values
    slots = slots_at(positions, page_table.index_select(0, rows), page_size)
    slots = slots.masked_fill(positions >= kv_lens[..., None], -1)
    return F.pad(slots, (0, k - slots.shape[2]), value=-1)


def slots_at(positions: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """int32 slots of int64 positions [B, W, k] in pages [B, P]; meaningless past the last page."""
    columns = (positions // page_size).clamp(max=pages.shape[1] - 1)
    page = pages.long().gather(1, columns.flatten(1)).view_as(positions)
    return (page * page_size + positions % page_size).int()


def _fake_sparse_mla(
    query: Tensor, latent: Tensor, slots: Tensor, scale: float, value_dim: int, *_: object
) -> Tensor:
    return query.new_empty((*query.shape[:3], value_dim))


@op(
    "sparse_mla(Tensor query, Tensor latent, Tensor slots, float scale, int value_dim, "
    "bool fixed=False, Tensor? page_table=None, Tensor? rows=None) -> Tensor",
    fake=_fake_sparse_mla,
)
def sparse_mla(
    query: Tensor,  # [B, W, H, D]
    latent: Tensor,  # [n_pages, page_size, D]
    slots: Tensor,  # int32 [B, W, K]  negative: no key
    scale: float,
    value_dim: int,
    fixed: bool = False,
    page_table: Tensor | None = None,  # int32 [R, P]
    rows: Tensor | None = None,  # int32 [B]
) -> Tensor:  # [B, W, H, value_dim]
    """softmax(scale * query . key) over the listed keys, times the keys' first `value_dim` columns.

    Absorbed multi-query MLA (DeepSeek-V2, arXiv:2405.04434, 2.1.2) over the selected tokens. A
    negative lane is not read, wherever it stands; a query without any lane gives zeros. `fixed`:
    a query's sums are split the same way whatever the number of queries.

    With `page_table` and `rows` a query's slots are distinct and lie in its row's pages, as those
    of `topk_slots` do: then a body may read a key once for all queries of the row.

    Error: weights are rounded to the cache's dtype before they meet the values, sums are float32.
    Against float64 a bfloat16 body stays within 2^-6 of the largest value, a float32 body within
    2e-5.
    """
    flat = latent.view(-1, latent.shape[2])
    queries, lanes = query.flatten(0, 1), slots.flatten(0, 1)  # [N, H, D], [N, K]
    step = max(1, GATHER_LIMIT // (lanes.shape[1] * flat.shape[1]))
    pieces = zip(queries.split(step), lanes.split(step), strict=True)
    outputs = [_attend(q, flat, lane, scale, value_dim) for q, lane in pieces]
    return torch.cat(outputs).view(*query.shape[:3], value_dim).to(query.dtype)


def _attend(query: Tensor, flat: Tensor, slots: Tensor, scale: float, value_dim: int) -> Tensor:
    """query [N, H, D], flat [n_slots, D], slots [N, K] -> [N, H, value_dim]"""
    dead = slots < 0  # bool [N, K]
    gathered = flat.index_select(0, slots.clamp(min=0).flatten()).view(*slots.shape, flat.shape[1])
    keys = gathered.to(wide(query).dtype).masked_fill(dead[:, :, None], 0)  # [N, K, D]
    scores = (wide(query) @ keys.transpose(1, 2)) * scale  # [N, H, K]
    scores = scores.masked_fill(dead[:, None], float("-inf"))
    # With no key at all the maximum is -inf, and -inf - -inf would be NaN.
    highest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / total.masked_fill(total == 0, 1)) @ keys[:, :, :value_dim]
