# SPDX-License-Identifier: Apache-2.0
"""Dense and sparse attention over whole rows, the selection, and the indexer's loss.

A *chain* step is a draft step at every position at once: its query sees the stored keys up to
its start and, besides them, the keys of the chain's own earlier steps (extra columns). This is
what a drafter sees that has written its drafts' KV past the last known token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model import (
    MLP,
    Attention,
    DecoderLayer,
    DemoModel,
    MoE,
    Projected,
    RMSNorm,
    Rope,
    rope_at,
)


@dataclass(frozen=True)
class Sparsity:
    """How many keys each row of the batch may select; 0 stands for all keys."""

    widest: int
    row_topk: Tensor  # int64 [B]


@dataclass
class LossRows:
    """Query positions whose indexer loss is taken, and the losses collected so far."""

    positions: Tensor  # int64 [n]
    losses: list[Tensor]


def index_scores(p: Projected, key: Tensor) -> Tensor:
    """Sum over heads of weight * relu(query . key); float32 [B, T, S]."""
    s = torch.matmul(p.index_query, key[:, None].transpose(-1, -2)).relu()  # [B, Hi, T, S]
    return (s.float() * p.index_weight[..., None]).sum(1)


def extra_index_scores(p: Projected, chain: list[Projected]) -> Tensor:
    """The same against one own key a position for each chain step: float32 [B, T, j]."""
    keys = torch.stack([c.index_key for c in chain], dim=2)  # [B, T, j, D]
    s = torch.einsum("bhtd,btjd->bhtj", p.index_query, keys.to(p.index_query.dtype)).relu()
    return (s.float() * p.index_weight[..., None]).sum(1)


def causal(length: int, device: torch.device) -> Tensor:
    at = torch.arange(length, device=device)
    return at[:, None] >= at[None, :]  # bool [T, T]


def selection_scores(p: Projected, stored: Projected, chain: list[Projected]) -> Tensor:
    """Scores that the selection ranks, -inf where a query may not look: [B, T, S + j]."""
    scores = index_scores(p, stored.index_key)
    scores = scores.masked_fill(~causal(scores.shape[-1], scores.device), -math.inf)
    if chain:
        scores = torch.cat([scores, extra_index_scores(p, chain)], dim=-1)
    return scores


def keep_best(scores: Tensor, sparsity: Sparsity) -> Tensor:
    """Keys that each query keeps: bool [B, T, S + j]."""
    width = min(sparsity.widest, scores.shape[-1])
    best = scores.topk(width, dim=-1).indices
    row_topk = sparsity.row_topk[:, None, None]
    within = torch.arange(width, device=scores.device) < row_topk  # [B, 1, k]
    keep = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, within.expand_as(best))
    return (keep | (row_topk == 0)) & (scores > -math.inf)


def attention_logits(
    p: Projected, stored: Projected, chain: list[Projected], scale: float
) -> Tensor:
    """Float32 [B, H, T, S + j], neither causal nor sparse."""
    logits = torch.matmul(p.query, stored.key.transpose(-1, -2)).float()
    if chain:
        extras = [(p.query.float() * c.key.float()).sum(-1, keepdim=True) for c in chain]
        logits = torch.cat([logits, *extras], dim=-1)
    return logits * scale


def mix_masked(
    p: Projected, stored: Projected, chain: list[Projected], keep: Tensor, scale: float
) -> Tensor:
    logits = attention_logits(p, stored, chain, scale)
    probs = logits.masked_fill(~keep[:, None], -math.inf).softmax(-1).to(p.query.dtype)
    if not chain:
        return torch.matmul(probs, stored.value)
    split = stored.key.shape[2]
    mixed = torch.matmul(probs[..., :split], stored.value)
    for i, c in enumerate(chain):
        mixed = mixed + probs[..., split + i, None] * c.value
    return mixed


def mix_fused(p: Projected, keep: Tensor | None, scale: float) -> Tensor:
    """The same through torch's fused kernels; `keep` None means dense and causal."""
    query, key, value = p.query, p.key.to(p.query.dtype), p.value.to(p.query.dtype)
    if keep is not None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=keep[:, None], scale=scale
        )
    # One width for query, key and value lets the fastest kernel take the call.
    value = F.pad(value, (0, query.shape[-1] - value.shape[-1]))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return mixed[..., : p.value.shape[-1]]


def index_loss(
    p: Projected, stored: Projected, chain: list[Projected], rows: Tensor, scale: float
) -> Tensor:
    """Mean KL(head-averaged dense attention || softmax of index scores) over `rows` queries."""
    take = lambda t: t[:, :, rows]  # noqa: E731
    q = Projected(
        take(p.query), p.key, p.value, take(p.index_query), p.index_key, take(p.index_weight)
    )
    own = [
        Projected(
            c.query, take(c.key), c.value, c.index_query, c.index_key[:, rows], c.index_weight
        )
        for c in chain
    ]
    at = torch.arange(stored.key.shape[2], device=rows.device)
    seen = rows[:, None] >= at[None, :]
    seen = F.pad(seen, (0, len(chain)), value=True)  # [n, S + j]
    with torch.no_grad():
        logits = attention_logits(q, stored, own, scale).masked_fill(~seen, -math.inf)
        target = logits.softmax(-1).mean(1)  # [B, n, S + j]
    scores = index_scores(q, stored.index_key)
    if chain:
        scores = torch.cat([scores, extra_index_scores(q, own)], dim=-1)
    log_probs = scores.masked_fill(~seen, -math.inf).log_softmax(-1).masked_fill(~seen, 0.0)
    entropy = torch.special.entr(target).sum(-1)
    return (-(target * log_probs).sum(-1) - entropy).mean()


def project(attention: Attention, norm: RMSNorm, x: Tensor, rope: Rope) -> Projected:
    return attention.project(norm(x), rope)


def feed_forward(mlp: MLP | MoE, norm: RMSNorm, x: Tensor) -> Tensor:
    return mlp(norm(x))


ROW_WISE = ("project", "feed_forward")
PIECES: dict[str, Callable[..., Any]] = {
    "project": project,
    "feed_forward": feed_forward,
    "scores": selection_scores,
    "mix": mix_masked,
}


@functools.cache
def compiled_piece(name: str) -> Callable[..., Any]:
    return torch.compile(PIECES[name], dynamic=False)


class Runner:
    """Runs a `DemoModel` over whole rows.

    `fused` uses torch's fused attention kernels, `compiled` names the pieces to compile: both
    for training. Measurements use neither.
    """

    def __init__(
        self, model: DemoModel, *, fused: bool = False, compiled: Collection[str] = ()
    ) -> None:
        self.model, self.c, self.fused = model, model.c, fused
        pieces = {n: compiled_piece(n) if n in compiled else f for n, f in PIECES.items()}
        self._project, self._feed_forward = pieces["project"], pieces["feed_forward"]
        self._scores, self._mix = pieces["scores"], pieces["mix"]

    @property
    def device(self) -> torch.device:
        return self.model.lm_head.weight.device

    def layer(
        self,
        layer: DecoderLayer,
        x: Tensor,
        rope: Rope,
        sparsity: Sparsity | None,
        *,
        stored: Projected | None = None,
        chain: tuple[Projected, ...] = (),
        loss: LossRows | None = None,
        dropout: float = 0.0,
    ) -> tuple[Tensor, Projected]:
        """One decoder layer; returns its output and its projections (the layer's KV)."""
        p = self._project(layer.self_attn, layer.input_layernorm, x, rope)
        scale = layer.self_attn.scale
        own = [*chain, p] if stored is not None else []
        base = stored if stored is not None else p
        keep = None
        if sparsity is not None:
            with torch.no_grad():
                keep = keep_best(self._scores(p, base, own), sparsity)
        if self.fused and stored is None:
            mixed = mix_fused(p, keep, scale)
        else:
            if keep is None:
                keep = F.pad(causal(x.shape[1], x.device), (0, len(own)), value=True)[None]
            mixed = self._mix(p, base, own, keep, scale)
        if loss is not None:
            loss.losses.append(index_loss(p, base, own, loss.positions, scale))
        training = self.model.training
        x = x + F.dropout(layer.self_attn.output(mixed), dropout, training)
        flat = x.flatten(0, 1)
        out = self._feed_forward(layer.mlp, layer.post_attention_layernorm, flat)
        return x + F.dropout(out.view_as(x), dropout, training), p

    def trunk(
        self,
        tokens: Tensor,  # int64 [B, T]
        sparsity: Sparsity | None = None,
        *,
        loss: LossRows | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Hidden states after the final norm: [B, T, D]."""
        m = self.model.model
        x = F.dropout(m.embed_tokens(tokens), dropout, self.model.training)
        rope = rope_at(self.model.c, torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.model.layers:
            x, _ = self.layer(layer, x, rope, sparsity, loss=loss, dropout=dropout)
        return m.norm(x)

    def chain(
        self,
        hidden: Tensor,  # [B, T, D], the trunk's
        tokens: Tensor,  # int64 [B, T + depth]
        depth: int,
        sparsity: Sparsity | None = None,
        *,
        loss: LossRows | None = None,
        dropout: float = 0.0,
    ) -> list[Tensor]:
        """Draft hidden states of steps 1..depth from every start: [B, T, D] each.

        Step j from start s reads token s + j, sits at position s + j - 1, predicts s + j + 1.
        """
        mtp, embed = self.model.mtp, self.model.model.embed_tokens
        length = hidden.shape[1]
        at = torch.arange(length, device=hidden.device)
        outputs: list[Tensor] = []
        stored: Projected | None = None
        steps: list[Projected] = []
        for j in range(1, depth + 1):
            x = mtp.join(embed(tokens[:, j : j + length]), hidden)
            rope = rope_at(self.model.c, at + (j - 1))
            x, p = self.layer(
                mtp,
                x,
                rope,
                sparsity,
                stored=stored,
                chain=tuple(steps),
                loss=loss,
                dropout=dropout,
            )
            if stored is None:
                stored = p
            else:
                steps.append(p)
            hidden = mtp.shared_head.norm(x)
            outputs.append(hidden)
        return outputs

    def hidden(self, x: Tensor) -> Tensor:
        """What the head reads of the trunk's result."""
        return x

    def draft_hidden(self, x: Tensor) -> Tensor:
        """What the head reads of a draft step's result."""
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden)


def same_topk(topk: int, batch: int, device: torch.device) -> Sparsity | None:
    """Every row selects `topk` keys; 0 means dense attention."""
    if topk == 0:
        return None
    return Sparsity(topk, torch.full((batch,), topk, dtype=torch.int64, device=device))
