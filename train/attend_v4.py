# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's attention over whole rows, the selection of entries, the indexer's loss, drafts.

Windows are computed in blocks of their own width: a block's queries see it and the one before. A
*chain* step is a draft step at every position at once, as in `attend`: its query sees the keys that
the first step stored up to its start, and those of the chain's own earlier steps.

The functions of `PIECES` are compiled one by one for training. They take a layer as an argument,
so that layers of one kind share their code, and only tensors change from phase to phase.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attend import LossRows, Sparsity
from hyper_v4 import Hyper, HyperHead, close
from model import RMSNorm
from model_v4 import (
    SLIDING,
    DemoV4Config,
    DemoV4Model,
    DraftLayer,
    Layer,
    MoE,
    Rope,
    rope_at,
)


def blocks(x: Tensor, size: int) -> Tensor:
    """x [B, T, ...] padded and cut: [B, T / size, size, ...]."""
    missing = -x.shape[1] % size
    if missing:
        x = F.pad(x, (*[0, 0] * (x.dim() - 2), 0, missing))
    return x.unflatten(1, (-1, size))


def window_keys(key: Tensor, window: int) -> Tensor:
    """[B, N, 2 * window, d] of key [B, T, d]: each block behind the one before."""
    own = blocks(key, window)
    before = F.pad(own, (0, 0, 0, 0, 1, 0))[:, :-1]
    return torch.cat([before, own], dim=2)


def window_scores(query: Tensor, keys: Tensor, window: int, behind: int = 0) -> Tensor:
    """Float32 [B, T, H, 2 * window] of query [B, T, H, d]; -inf outside the window.

    `behind`: how many steps the query is further on, and so has left as many of the oldest.
    """
    length, heads = query.shape[1:3]
    folded = blocks(query, window).flatten(2, 3)  # [B, N, window * H, d]
    scores = torch.matmul(folded, keys.mT).unflatten(2, (window, heads)).flatten(1, 2)
    at = torch.arange(length, device=query.device)
    slot = torch.arange(2 * window, device=query.device)
    back = window + at[:, None] % window - slot  # [T, 2 * window]
    seen = (back >= 0) & (back < window - behind) & ((at[:, None] >= window) | (slot >= window))
    return scores[:, :length].float().masked_fill(~seen[:, None], -math.inf)


def mix_windows(probs: Tensor, keys: Tensor, window: int) -> Tensor:
    """[B, T, H, d] of probs [B, T, H, 2 * window]."""
    length, heads = probs.shape[1:3]
    folded = blocks(probs, window).flatten(2, 3)
    mixed = torch.matmul(folded, keys).unflatten(2, (window, heads)).flatten(1, 2)
    return mixed[:, :length]


def with_sink(parts: list[Tensor], sink: Tensor) -> list[Tensor]:
    """Softmax over all parts [B, T, H, K] and the head's sink, whose own weight is dropped."""
    sink = sink.float()[:, None]
    with torch.no_grad():  # the result does not depend on what is taken off
        top = functools.reduce(torch.maximum, [p.amax(-1, keepdim=True) for p in parts], sink)
    powers = [(p - top).exp() for p in parts]
    total = functools.reduce(torch.add, [p.sum(-1, keepdim=True) for p in powers])
    total = total + (sink - top).exp()
    return [p / total for p in powers]


def visible(length: int, count: int, ratio: int, device: torch.device) -> Tensor:
    """bool [T, E]: entries of windows that have closed up to a query, itself included."""
    at = torch.arange(1, length + 1, device=device)
    return at[:, None] // ratio > torch.arange(count, device=device)


@torch.no_grad()
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
        logits = torch.einsum("bthd,bed->bthe", query[:, rows], entries).float() * scale
        target = logits.masked_fill(~own[:, None], -math.inf).softmax(-1).mean(2)  # [B, n, E]
    log_probs = scores[:, rows].masked_fill(~own, -math.inf).log_softmax(-1).masked_fill(~own, 0.0)
    loss = -(target * log_probs).sum(-1) - torch.special.entr(target).sum(-1)
    return (loss * any_seen).sum() / (any_seen.sum() * loss.shape[0]).clamp(min=1)


def attend(
    layer: Layer, x: Tensor, rope: Rope, sparsity: Sparsity | None, loss_rows: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    attention, loss = layer.attn, None
    window, scale = attention.c.sliding_window, attention.c.head_dim**-0.5
    ratio, length = attention.ratio, x.shape[1]
    query, key, q_latent = attention.project(x, rope)
    keys = window_keys(key, window)
    parts = [window_scores(query, keys, window) * scale]
    entries = key[:, :0] if ratio == SLIDING else attention.compressor(x).to(query.dtype)
    if entries.shape[1]:
        seen = visible(length, entries.shape[1], ratio, x.device)
        keep = seen[None]
        if ratio == 4:
            index = attention.indexer(x, q_latent, rope)
            if loss_rows is not None:
                loss = index_loss(query, entries, index, seen, loss_rows, scale)
            if sparsity is not None:
                keep = keep_entries(index, seen, sparsity)
        own = torch.matmul(query.flatten(1, 2), entries.mT).unflatten(1, query.shape[1:3])
        parts.append((own.float() * scale).masked_fill(~keep[:, :, None], -math.inf))
    probs = [p.to(query.dtype) for p in with_sink(parts, attention.attn_sink)]
    mixed = mix_windows(probs[0], keys, window)
    if len(parts) > 1:
        own = torch.matmul(probs[1].flatten(1, 2), entries).unflatten(1, query.shape[1:3])
        mixed = mixed + own
    return attention.output(mixed, rope), loss


def attend_layer(
    layer: Layer,
    streams: Tensor,
    rope: Rope,
    sparsity: Sparsity | None,
    loss_rows: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """A layer's first half: [B, T, S, D] to the same, and the indexer's loss if it has one."""
    x, post, mix = layer.hyper("attn").open(layer.attn.c, streams)
    y, loss = attend(layer, layer.attn_norm(x), rope, sparsity, loss_rows)
    return close(y, streams, post, mix), loss


def feed(
    c: DemoV4Config, hyper: Hyper, norm: RMSNorm, ffn: MoE, streams: Tensor, tokens: Tensor
) -> Tensor:
    """A layer's second half."""
    x, post, mix = hyper.open(c, streams)
    return close(ffn(norm(x), tokens), streams, post, mix)


def attend_chain(
    layer: DraftLayer, streams: Tensor, rope: Rope, stored: Tensor | None, own: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The draft layer's first half at one step of the chain, and its key [B, T, d].

    `stored`: the first step's keys, None in the first step; `own`: those of the steps between.
    """
    c = layer.attn.c
    window, scale = c.sliding_window, c.head_dim**-0.5
    x, post, mix = layer.hyper("attn").open(c, streams)
    query, key, _ = layer.attn.project(layer.attn_norm(x), rope)
    later = [] if stored is None else [*own, key]
    keys = window_keys(key if stored is None else stored, window)
    parts = [window_scores(query, keys, window, behind=len(later)) * scale]
    parts += [((query * k[:, :, None]).float().sum(-1, keepdim=True)) * scale for k in later]
    probs = [p.to(query.dtype) for p in with_sink(parts, layer.attn.attn_sink)]
    mixed = mix_windows(probs[0], keys, window)
    for share, k in zip(probs[1:], later, strict=True):
        mixed = mixed + share * k[:, :, None]
    return close(layer.attn.output(mixed, rope), streams, post, mix), key


def join(layer: DraftLayer, embedded: Tensor, streams: Tensor) -> Tensor:
    return layer.join(embedded, streams).float()


def head_input(c: DemoV4Config, head: HyperHead, norm: RMSNorm, streams: Tensor) -> Tensor:
    return norm(head.collapse(c, streams))


PIECES: dict[str, Callable[..., Any]] = {
    "attend_layer": attend_layer,
    "feed": feed,
    "attend_chain": attend_chain,
    "join": join,
    "head_input": head_input,
}


def bounded(piece: Callable[..., Any], deadline: float) -> Callable[..., Any]:
    """The piece compiled; what is not compiled by `deadline` (of time.monotonic) stays eager."""
    fast = torch.compile(piece, dynamic=False)

    @functools.wraps(piece)
    def call(*args: Any) -> Any:
        if time.monotonic() > deadline:
            torch.compiler.set_stance("eager_on_recompile")
        return fast(*args)

    return call


class RunnerV4:
    """Runs a DemoV4Model over whole rows. Its hidden states are streams [B, T, S, D].

    `deadline` (of time.monotonic): compile the pieces until then; None compiles nothing.
    """

    def __init__(self, model: DemoV4Model, *, deadline: float | None = None) -> None:
        self.model, self.c = model, model.c
        pieces = {n: f if deadline is None else bounded(f, deadline) for n, f in PIECES.items()}
        self._attend_layer, self._feed_piece = pieces["attend_layer"], pieces["feed"]
        self._attend_chain, self._join = pieces["attend_chain"], pieces["join"]
        self._head_input = pieces["head_input"]

    @property
    def device(self) -> torch.device:
        return self.model.head.weight.device

    def ropes(self, length: int, start: int = 0) -> tuple[Rope, Rope]:
        at = torch.arange(length, device=self.device) + start
        return rope_at(self.c, at, entries=False), rope_at(self.c, at, entries=True)

    def trunk(
        self,
        tokens: Tensor,
        sparsity: Sparsity | None = None,
        *,
        loss: LossRows | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Streams behind the last layer, of tokens int64 [B, T]."""
        # One layout whatever the caller cut it from: the compiled pieces depend on it.
        tokens = tokens.contiguous()
        x = F.dropout(self.model.embed(tokens), dropout, self.model.training)
        streams = x.float()[:, :, None].repeat(1, 1, self.c.hc_mult, 1)
        plain, stretched = self.ropes(tokens.shape[1])
        for layer in self.model.main_layers:
            rope = plain if layer.attn.ratio == SLIDING else stretched
            rows = None if loss is None else loss.positions
            streams, own = self._attend_layer(layer, streams, rope, sparsity, rows)
            streams = self._feed(layer, streams, tokens)
            if loss is not None and own is not None:
                loss.losses.append(own)
        return streams

    def hidden(self, streams: Tensor) -> Tensor:
        """What the target's head reads: [B, T, D]."""
        return self._head_input(self.c, self.model.hyper_head(), self.model.norm, streams)

    def draft_hidden(self, streams: Tensor) -> Tensor:
        """What the head reads of the draft layer's streams: [B, T, D]."""
        layer = self.model.draft_layer
        return self._head_input(self.c, layer.hyper_head(), layer.norm, streams)

    def _feed(self, layer: Layer, streams: Tensor, tokens: Tensor) -> Tensor:
        hyper = layer.hyper("ffn")
        return self._feed_piece(self.c, hyper, layer.ffn_norm, layer.ffn, streams, tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.model.head.weight.float())

    def chain(
        self,
        streams: Tensor,
        tokens: Tensor,
        depth: int,
        sparsity: Sparsity | None = None,  # the draft layer sees its window alone
        *,
        dropout: float = 0.0,
    ) -> list[Tensor]:
        """Draft streams of steps 1 .. depth, [B, T, S, D] each.

        tokens int64 [B, T + depth]: step j at position t reads token t + j.
        """
        layer, length = self.model.draft_layer, streams.shape[1]
        stored: Tensor | None = None
        own: list[Tensor] = []
        drafts: list[Tensor] = []
        for step in range(depth):
            after = tokens[:, step + 1 : step + 1 + length].contiguous()
            embedded = F.dropout(self.model.embed(after), dropout, self.model.training)
            x = self._join(layer, embedded, streams)
            rope, _ = self.ropes(length, step)
            x, key = self._attend_chain(layer, x, rope, stored, own)
            if stored is None:
                stored = key
            else:
                own = [*own, key]
            streams = self._feed(layer, x, after)
            drafts.append(streams)
        return drafts
