# SPDX-License-Identifier: Apache-2.0
"""The demo model while it trains: DeepSeek-V3.2 in plain torch, without a cache.

Module names give DeepSeek's own tensor names, except that the routed experts of a layer are
stacked. Formulas: DeepSeek-V3 and V3.2 reports; field order as in `DeepseekV32ForCausalLM`.

`B` rows, `T` positions, `H` heads, `D` hidden size.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DemoConfig:
    """The fields of `config.json` that shape the model; names are Hugging Face's."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 3
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    first_k_dense_replace: int = 1
    n_routed_experts: int = 4
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    n_group: int = 2
    topk_group: int = 1
    routed_scaling_factor: float = 2.5
    index_n_heads: int = 4
    index_head_dim: int = 128
    index_topk: int = 64
    max_position_embeddings: int = 8192
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    def with_topk(self, index_topk: int) -> DemoConfig:
        return replace(self, index_topk=index_topk)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Rope(NamedTuple):
    """Angles at some positions: float32 [T, rope / 2] each."""

    cos: Tensor
    sin: Tensor


class Projected(NamedTuple):
    """What attention and the indexer need of a run of positions."""

    query: Tensor  # [B, H, T, nope + rope]
    key: Tensor  # [B, H, T, nope + rope]
    value: Tensor  # [B, H, T, v]
    index_query: Tensor  # [B, Hi, T, Di]
    index_key: Tensor  # [B, T, Di]
    index_weight: Tensor  # float32 [B, Hi, T], both scales applied


def rope_at(config: DemoConfig, positions: Tensor) -> Rope:
    dim = config.qk_rope_head_dim
    steps = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32)
    # The order of operations is transformers': angles grow, and so would a rounding difference.
    angles = positions.float()[:, None] * (1.0 / config.rope_theta ** (steps / dim))
    return Rope(angles.cos(), angles.sin())


def rotate_pairs(x: Tensor, rope: Rope) -> Tensor:
    """Interleaved rotary: pairs (0, 1), (2, 3), ... of the last dimension."""
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    out = torch.cat([a * rope.cos - b * rope.sin, b * rope.cos + a * rope.sin], dim=-1)
    return out.to(x.dtype)


def rotate_halves(x: Tensor, rope: Rope) -> Tensor:
    """Half-split rotary: pairs (i, i + rope / 2) of the last dimension."""
    a, b = x.float().chunk(2, dim=-1)
    out = torch.cat([a * rope.cos - b * rope.sin, b * rope.cos + a * rope.sin], dim=-1)
    return out.to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Indexer(nn.Module):
    def __init__(self, c: DemoConfig) -> None:
        super().__init__()
        self.heads, self.dim, self.rope_dim = c.index_n_heads, c.index_head_dim, c.qk_rope_head_dim
        self.wq_b = _linear(c.q_lora_rank, self.heads * self.dim)
        self.wk = _linear(c.hidden_size, self.dim)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = _linear(c.hidden_size, self.heads)

    def forward(self, x: Tensor, q_latent: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        # The indexer learns from its own loss alone (DeepSeek-V3.2 report, section 2.1.1).
        x, q_latent = x.detach(), q_latent.detach()
        batch, length, _ = x.shape
        query = self.wq_b(q_latent).view(batch, length, self.heads, self.dim).transpose(1, 2)
        query = self._rotate(query, rope)
        key = self._rotate(self.k_norm(self.wk(x)), rope)
        weight = self.weights_proj(x).float() * self.heads**-0.5 * self.dim**-0.5
        return query, key, weight.transpose(1, 2)

    def _rotate(self, x: Tensor, rope: Rope) -> Tensor:
        head, tail = x[..., : self.rope_dim], x[..., self.rope_dim :]
        return torch.cat([rotate_halves(head, rope), tail.to(head.dtype)], dim=-1)


class Attention(nn.Module):
    def __init__(self, c: DemoConfig) -> None:
        super().__init__()
        self.c = c
        heads, nope, rope, v = (
            c.num_attention_heads,
            c.qk_nope_head_dim,
            c.qk_rope_head_dim,
            c.v_head_dim,
        )
        self.q_a_proj = _linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, 1e-6)
        self.q_b_proj = _linear(c.q_lora_rank, heads * (nope + rope))
        self.kv_a_proj_with_mqa = _linear(c.hidden_size, c.kv_lora_rank + rope)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, 1e-6)
        self.kv_b_proj = _linear(c.kv_lora_rank, heads * (nope + v))
        self.o_proj = _linear(heads * v, c.hidden_size)
        self.indexer = Indexer(c)
        self.scale = (nope + rope) ** -0.5

    def project(self, x: Tensor, rope: Rope) -> Projected:
        c = self.c
        batch, length, _ = x.shape
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        query = self.q_b_proj(q_latent).view(batch, length, c.num_attention_heads, -1)
        query = query.transpose(1, 2)
        q_nope, q_rope = query.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        query = torch.cat([q_nope, rotate_pairs(q_rope, rope)], dim=-1)

        latent, k_rope = self.kv_a_proj_with_mqa(x).split(
            [c.kv_lora_rank, c.qk_rope_head_dim], dim=-1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.view(batch, length, c.num_attention_heads, -1).transpose(1, 2)
        k_nope, value = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        k_rope = rotate_pairs(k_rope, rope)[:, None].expand(-1, c.num_attention_heads, -1, -1)
        key = torch.cat([k_nope, k_rope.to(k_nope.dtype)], dim=-1)
        return Projected(query, key, value, *self.indexer(x, q_latent, rope))

    def output(self, mixed: Tensor) -> Tensor:
        """Attention result [B, H, T, v] to [B, T, D]."""
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = _linear(hidden, inner)
        self.up_proj = _linear(hidden, inner)
        self.down_proj = _linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Sigmoid scores, the best groups, then the best experts in them ("noaux_tc")."""

    load: Tensor
    e_score_correction_bias: Tensor

    def __init__(self, c: DemoConfig) -> None:
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))
        self.register_buffer("load", torch.zeros(c.n_routed_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Routing weights float32 [N, E], zero for experts not chosen."""
        c = self.c
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()  # [N, E]
        choice = scores.detach() + self.e_score_correction_bias
        groups = choice.view(-1, c.n_group, c.n_routed_experts // c.n_group)
        group_scores = groups.topk(2, dim=-1).values.sum(-1)  # [N, G]
        best = group_scores.topk(c.topk_group, dim=-1).indices
        open_group = torch.zeros_like(group_scores).scatter(1, best, 1.0).bool()
        choice = groups.masked_fill(~open_group[..., None], -math.inf).flatten(1)
        chosen = torch.zeros_like(scores).scatter(
            1, choice.topk(c.num_experts_per_tok, dim=-1).indices, 1.0
        )
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.training:
            self.load += chosen.mean(0)
        return weights * c.routed_scaling_factor

    @torch.no_grad()
    def balance(self, speed: float) -> None:
        """Move the correction bias towards even load (auxiliary-loss-free balancing)."""
        self.e_score_correction_bias += speed * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Experts(nn.Module):
    """All experts at once: for a handful, one wide product beats any gathering."""

    def __init__(self, c: DemoConfig) -> None:
        super().__init__()
        count, inner, hidden = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
        self.gate_proj = nn.Parameter(torch.empty(count, inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(count, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [N, D], weights [N, E] -> [N, D]."""
        inner = F.silu(F.linear(x, self.gate_proj.flatten(0, 1)))
        inner = inner * F.linear(x, self.up_proj.flatten(0, 1))  # [N, E * I]
        scaled = inner.unflatten(1, (weights.shape[1], -1)) * weights[..., None].to(inner.dtype)
        return F.linear(scaled.flatten(1), self.down_proj.permute(1, 0, 2).flatten(1))


class MoE(nn.Module):
    def __init__(self, c: DemoConfig) -> None:
        super().__init__()
        self.gate = Gate(c)
        self.experts = Experts(c)
        self.shared_experts = MLP(c.hidden_size, c.moe_intermediate_size * c.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        routed = self.experts(flat, self.gate(flat)).view_as(x)
        return routed + self.shared_experts(x)


class DecoderLayer(nn.Module):
    def __init__(self, c: DemoConfig, *, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c.hidden_size, c.intermediate_size) if dense else MoE(c)


class SharedHead(nn.Module):
    def __init__(self, c: DemoConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class MTPLayer(DecoderLayer):
    def __init__(self, c: DemoConfig) -> None:
        super().__init__(c, dense=False)
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = _linear(2 * c.hidden_size, c.hidden_size)
        self.shared_head = SharedHead(c)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))


class Trunk(nn.Module):
    def __init__(self, c: DemoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        layers = [
            DecoderLayer(c, dense=i < c.first_k_dense_replace) for i in range(c.num_hidden_layers)
        ]
        self.layers = nn.ModuleList([*layers, MTPLayer(c)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class DemoModel(nn.Module):
    def __init__(self, c: DemoConfig) -> None:
        super().__init__()
        self.c = c
        self.model = Trunk(c)
        self.lm_head = _linear(c.hidden_size, c.vocab_size)
        self._initialise()

    @property
    def layers(self) -> list[DecoderLayer]:
        return [m for m in self.model.layers if isinstance(m, DecoderLayer)][:-1]

    @property
    def mtp(self) -> MTPLayer:
        last = self.model.layers[-1]
        assert isinstance(last, MTPLayer)
        return last

    def gates(self) -> list[Gate]:
        return [m for m in self.modules() if isinstance(m, Gate)]

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            if "embed_tokens" in name:
                nn.init.normal_(p, std=0.5)
            elif "o_proj" in name or "down_proj" in name:
                nn.init.normal_(p, std=0.02)
            else:
                nn.init.normal_(p, std=0.6 / math.sqrt(p.shape[-1]))
