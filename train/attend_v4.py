# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's attention over whole rows, the selection of entries, the indexer's loss, drafts.

Windows are computed in blocks of their own width: a block's queries see it and the one before. A
*chain* step is a draft step at every position at once, as in `attend`: its query sees the keys that
the first step stored up to its start, and those of the chain's own earlier steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attend import LossRows, Sparsity
from model_v4 import SLIDING, DemoV4Model, Layer, Rope, close, rope_at


def blocks(x: Tensor, size: int) -> Tensor:
    """x [..., T, d] padded and cut: [..., T / size, size, d]."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % size)).unflatten(-2, (-1, size))


def window_scores(query: Tensor, key: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """(scores [B, H, N, window, 2 * window], keys [B, N, 2 * window, d]); -inf outside."""
    own = blocks(key, window)  # [B, N, window, d]
    before = F.pad(own, (0, 0, 0, 0, 1, 0))[:, :-1]
    keys = torch.cat([before, own], dim=2)
    scores = torch.einsum("bhnqd,bnkd->bhnqk", blocks(query, window), keys).float()
    at = torch.arange(window, device=key.device)
    back = window + at[:, None] - torch.arange(2 * window, device=key.device)
    seen = (back >= 0) & (back < window)
    first = torch.arange(own.shape[1], device=key.device) == 0
    seen = seen & ~(first[:, None, None] & (torch.arange(2 * window, device=key.device) < window))
    return scores.masked_fill(~seen, -math.inf), keys


def with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    """Softmax over scores [B, H, ..., K] and the head's sink, whose own weight is dropped."""
    shape = (1, -1, *[1] * (scores.dim() - 2))
    column = sink.float().view(shape).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]


def visible(length: int, count: int, ratio: int, device: torch.device) -> Tensor:
    """bool [T, E]: entries of windows that have closed up to a query, itself included."""
    at = torch.arange(1, length + 1, device=device)
    return at[:, None] // ratio > torch.arange(count, device=device)


def keep_entries(scores: Tensor, seen: Tensor, sparsity: Sparsity) -> Tensor:
    """bool [B, T, E]: the best of those seen, for each row's own number; 0 keeps all."""
    ranked = scores.masked_fill(~seen, -math.inf)
    width = min(sparsity.widest, scores.shape[-1])
    best = ranked.topk(width, dim=-1).indices
    row_topk = sparsity.row_topk[:, None, None]
    within = torch.arange(width, device=scores.device) < row_topk
    keep = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, within.expand_as(best))
    return (keep | (row_topk == 0)) & seen


def index_loss(
    query: Tensor, entries: Tensor, scores: Tensor, seen: Tensor, rows: Tensor, scale: float
) -> Tensor:
    """Mean KL(head-averaged attention over entries || softmax of index scores) of `rows`."""
    own = seen[rows]  # bool [n, E]
    any_seen = own.any(-1)
    own = own | ~any_seen[:, None]
    with torch.no_grad():
        logits = torch.einsum("bhtd,bed->bhte", query[:, :, rows], entries).float() * scale
        target = logits.masked_fill(~own, -math.inf).softmax(-1).mean(1)  # [B, n, E]
    log_probs = scores[:, rows].masked_fill(~own, -math.inf).log_softmax(-1).masked_fill(~own, 0.0)
    loss = -(target * log_probs).sum(-1) - torch.special.entr(target).sum(-1)
    return (loss * any_seen).sum() / (any_seen.sum() * loss.shape[0]).clamp(min=1)


class RunnerV4:
    """Runs a DemoV4Model over whole rows. Its hidden states are streams [B, T, S, D]."""

    def __init__(self, model: DemoV4Model, *, compiled: bool = False) -> None:
        self.model, self.c = model, model.c
        self._layer: Callable[..., Any] = self._run_layer
        if compiled:
            self._layer = torch.compile(self._run_layer, dynamic=False)

    def ropes(self, length: int, device: torch.device, start: int = 0) -> tuple[Rope, Rope]:
        at = torch.arange(length, device=device) + start
        return rope_at(self.c, at, entries=False), rope_at(self.c, at, entries=True)

    def trunk(
        self,
        tokens: Tensor,
        sparsity: Sparsity | None,
        *,
        loss: LossRows | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Streams behind the last layer, of tokens int64 [B, T]."""
        x = F.dropout(self.model.embed(tokens), dropout, self.model.training)
        streams = x.float()[:, :, None].expand(-1, -1, self.c.hc_mult, -1)
        ropes = self.ropes(tokens.shape[1], tokens.device)
        for layer in self.model.main_layers:
            rows = None if loss is None else loss.positions
            streams, own = self._layer(layer, streams, tokens, ropes, sparsity, rows)
            if loss is not None and own is not None:
                loss.losses.append(own)
        return streams

    def hidden(self, streams: Tensor) -> Tensor:
        """What the target's head reads: [B, T, D]."""
        return self.model.norm(self.model.collapsed(self.c, streams))

    def draft_hidden(self, streams: Tensor) -> Tensor:
        """What the head reads of the draft layer's streams: [B, T, D]."""
        layer = self.model.draft_layer
        return layer.norm(layer.collapsed(self.c, streams))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.model.head.weight.float())

    def chain(
        self, streams: Tensor, tokens: Tensor, depth: int, *, dropout: float = 0.0
    ) -> list[Tensor]:
        """Draft streams of steps 1 .. depth, [B, T, S, D] each.

        tokens int64 [B, T + depth]: step j at position t reads token t + j.
        """
        layer, length = self.model.draft_layer, streams.shape[1]
        stored: Tensor | None = None
        own: list[Tensor] = []
        drafts: list[Tensor] = []
        for step in range(depth):
            after = tokens[:, step + 1 : step + 1 + length]
            embedded = F.dropout(self.model.embed(after), dropout, self.model.training)
            x = layer.join(embedded, streams).float()
            rope, _ = self.ropes(length, tokens.device, step)
            h, post, mix = layer.hyper("attn").open(self.c, x)
            query, key, _ = layer.attn.project(layer.attn_norm(h), rope)
            if stored is None:
                stored = key
            else:
                own.append(key)
            mixed = self._mix_chain(layer, query, stored, own)
            x = close(layer.attn.output(mixed, rope), x, post, mix)
            h, post, mix = layer.hyper("ffn").open(self.c, x)
            streams = close(layer.ffn(layer.ffn_norm(h), after), x, post, mix)
            drafts.append(streams)
        return drafts

    def _mix_chain(self, layer: Layer, query: Tensor, stored: Tensor, own: list[Tensor]) -> Tensor:
        window, scale, length = self.c.sliding_window, self.c.head_dim**-0.5, query.shape[2]
        scores, keys = window_scores(query, stored, window)
        # A step further on, the window has left as many of the oldest keys behind.
        back = window + torch.arange(window, device=query.device)[:, None]
        back = back - torch.arange(2 * window, device=query.device)
        scores = scores.masked_fill(back >= window - len(own), -math.inf)
        extras = [(blocks(query, window) * blocks(k, window)[:, None]).sum(-1).float() for k in own]
        joined = torch.cat([scores, *(e[..., None] for e in extras)], dim=-1) * scale
        probs = with_sink(joined, layer.attn.attn_sink).to(query.dtype)
        mixed = torch.einsum("bhnqk,bnkd->bhnqd", probs[..., : 2 * window], keys)
        for at, k in enumerate(own):
            mixed = mixed + probs[..., 2 * window + at, None] * blocks(k, window)[:, None]
        return mixed.flatten(2, 3)[:, :, :length]

    def _run_layer(
        self,
        layer: Layer,
        streams: Tensor,
        tokens: Tensor,
        ropes: tuple[Rope, Rope],
        sparsity: Sparsity | None,
        loss_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        x, post, mix = layer.hyper("attn").open(self.c, streams)
        y, loss = self._attend(layer, layer.attn_norm(x), ropes, sparsity, loss_rows)
        streams = close(y, streams, post, mix)
        x, post, mix = layer.hyper("ffn").open(self.c, streams)
        return close(layer.ffn(layer.ffn_norm(x), tokens), streams, post, mix), loss

    def _attend(
        self,
        layer: Layer,
        x: Tensor,
        ropes: tuple[Rope, Rope],
        sparsity: Sparsity | None,
        loss_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        attention, window = layer.attn, self.c.sliding_window
        ratio, length, scale = attention.ratio, x.shape[1], self.c.head_dim**-0.5
        rope = ropes[0] if ratio == SLIDING else ropes[1]
        query, key, q_latent = attention.project(x, rope)
        scores, keys = window_scores(query, key, window)
        parts, loss = [scores], None
        entries = key[:, :0] if ratio == SLIDING else attention.compressor(x).to(query.dtype)
        if ratio != SLIDING and entries.shape[1]:
            seen = visible(length, entries.shape[1], ratio, x.device)
            keep = seen[None]
            if ratio == 4:
                index = attention.indexer(x, q_latent, rope)
                if loss_rows is not None:
                    loss = index_loss(query, entries, index, seen, loss_rows, scale)
                if sparsity is not None:
                    keep = keep_entries(index, seen, sparsity)
            own = torch.einsum("bhnqd,bed->bhnqe", blocks(query, window), entries).float()
            allowed = blocks(keep.float(), window).bool()  # [B or 1, N, window, E]
            parts.append(own.masked_fill(~allowed[:, None], -math.inf))
        probs = with_sink(torch.cat(parts, dim=-1) * scale, attention.attn_sink).to(query.dtype)
        mixed = torch.einsum("bhnqk,bnkd->bhnqd", probs[..., : 2 * window], keys)
        if len(parts) > 1:
            mixed = mixed + torch.einsum("bhnqe,bed->bhnqd", probs[..., 2 * window :], entries)
        mixed = mixed.flatten(2, 3)[:, :, :length]
        return attention.output(mixed, rope), loss
