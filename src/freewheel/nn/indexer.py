# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer: which keys a query attends to (DeepSeek-V3.2, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel import ops
from freewheel.nn.linear import Linear, load_wide_linear
from freewheel.nn.rows import IndexKeys, index_keys_of
from freewheel.nn.scan import merge_candidates, own_candidates, own_pages
from freewheel.nn.source import WeightSource
from freewheel.spec.history import HISTORY, INDEX_KEY
from freewheel.spec.mesh import Share
from freewheel.spec.model import DsaSpec, IndexerSpec
from freewheel.state import CachePool, StepView

LOGITS_LIMIT = 1 << 26
"""Logits of one piece of a rectangle, at most (256 MiB in float32)."""


@dataclass(frozen=True)
class Indexer:
    """Scores every earlier position with a few small heads and keeps the best `spec.topk`.

    `weights` (one gate a head) stays in float32: rounding it changes which keys are kept.
    """

    spec: IndexerSpec
    layer: int
    key_norm_weight: Tensor  # float [Di]
    key_norm_bias: Tensor  # float [Di]
    weights: Linear  # float32 [Hi, H]
    rope_table: Tensor  # float32 [T, rope]
    scan: Share  # of the pages of keys

    def select(
        self,
        gates: Tensor,
        key: Tensor,
        query: Tensor,
        view: StepView,
        cache: CachePool,
        own: tuple[Tensor, Tensor, bool],
    ) -> tuple[Tensor, Tensor]:
        """Store the index keys, then pick: slots int32 [B, W, topk], -1 padded.

        All as projected: gates float [B, W, Hi] and key [B, W, Di] from the attention's input,
        query [B, W, Hi * Di] by `wq_b` from its normed query latent. Also what the attention asks
        by, [B, W, heads, C + Dr]: `ops.absorb_query` of `own`, its queries, their weight, and
        whether pairs that are turned are neighbours.
        """
        spec = self.spec
        keys = index_keys_of(cache, INDEX_KEY, self.layer)
        placed = (
            query.unflatten(-1, (spec.heads, spec.dim)),
            gates,
            (spec.heads * spec.dim) ** -0.5,
            key,
            self.key_norm_weight,
            self.key_norm_bias,
            spec.key_norm_eps,
            view.positions,
            self.rope_table,
            spec.interleaved,
            view.write_slots[HISTORY],
        )
        query, gates, absorbed = keys.place_all(placed, own)  # [B, W, Hi, Di], float [B, W, Hi]
        table = view.page_tables[HISTORY]
        slots = pick(query, gates, keys, table, view.rows, view.kv_lens, spec.topk, self.scan)
        view.note(slots, view.kv_lens, table, keys.page_rows)
        return slots, absorbed


def pick(
    query: Tensor,  # [B, W, Hi, Di]
    gates: Tensor,  # float [B, W, Hi]
    keys: IndexKeys,
    table: Tensor,  # int32 [R, P]
    rows: Tensor,  # int32 [B]
    lens: Tensor,  # int32 [B, W]
    topk: int,
    scan: Share,
) -> Tensor:
    """int32 [B, W, topk]: slots of the best keys, -1 padded.

    Whole queries at a time, so that logits stay below LOGITS_LIMIT. `scan`: which pages this rank
    scores; all ranks get the same picks, those of one that scores every page.
    """
    page_rows = keys.page_rows
    own_table = table if scan.count == 1 else own_pages(table, scan)  # int32 [R, columns]
    per_column = query.shape[0] * own_table.shape[1] * page_rows
    step = max(1, LOGITS_LIMIT // per_column)
    picks = []
    for start in range(0, query.shape[1], step):
        piece = slice(start, start + step)
        asked = (query[:, piece], gates[:, piece])
        if scan.count == 1:
            own = lens[:, piece]
            logits = keys.logits(*asked, table, rows, own, topk)
            picks.append(ops.topk_slots(logits, table, rows, own, page_rows, topk))
        else:
            found = own_candidates(*asked, keys, own_table, rows, lens[:, piece], topk, scan)
            picks.append(merge_candidates(*found, table, rows, page_rows, topk, scan))
    return picks[0] if len(picks) == 1 else torch.cat(picks, dim=1)


def load_indexer(
    source: WeightSource, spec: DsaSpec, name: str, layer: int, table: Tensor
) -> Indexer:
    """The indexer stored under `name`, of model layer `layer`, but for its `wk` and `wq_b`.

    These the attention holds, joined with its own projections of the same inputs.
    """
    own = spec.indexer
    return Indexer(
        spec=own,
        layer=layer,
        key_norm_weight=source.tensor(f"{name}.k_norm.weight", (own.dim,)),
        key_norm_bias=source.tensor(f"{name}.k_norm.bias", (own.dim,)),
        weights=load_wide_linear(source, f"{name}.weights_proj", own.heads, spec.hidden_size),
        rope_table=table,
        scan=source.mesh.scan,
    )
