# SPDX-License-Identifier: Apache-2.0
"""The second demo model while it trains: DeepSeek-V4 in plain torch, without a cache.

Module names give DeepSeek's own tensor names, except that the routed experts of a layer are
stacked. Formulas: DeepSeek-V4 report; `DeepseekV4ForCausalLM` of transformers.

`B` rows, `T` positions, `H` heads, `S` streams, `D` hidden size, `E` entries.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_v4 import Hyper, HyperHead, unit
from model import RMSNorm

SLIDING, OVERLAPPING = 0, 4
"""Ratios of layers that see their window alone, and of those whose windows overlap."""


@dataclass(frozen=True)
class DemoV4Config:
    """The fields of `config.json` that shape the model; names are DeepSeek's."""

    vocab_size: int = 1024
    hidden_size: int = 128
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 4
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 4
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 128
    o_groups: int = 2
    o_lora_rank: int = 64
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (128, 4, 128, 4, 0)
    index_n_heads: int = 4
    index_head_dim: int = 128
    index_topk: int = 32
    n_routed_experts: int = 6
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    num_hash_layers: int = 1
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn_factor: float = 4.0
    yarn_original: int = 2048
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Rope(NamedTuple):
    """Angles at some positions: float32 [T, rope / 2] each."""

    cos: Tensor
    sin: Tensor


def rope_at(c: DemoV4Config, positions: Tensor, *, entries: bool) -> Rope:
    """`entries`: for layers that have them, stretched by YaRN (arXiv:2309.00071, section 3.2)."""
    dim, device = c.qk_rope_head_dim, positions.device
    steps = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
    if not entries:
        rates = 1.0 / c.rope_theta**steps
    else:
        periods = c.compress_rope_theta**steps
        low, high = (
            dim * math.log(c.yarn_original / (turns * 2 * math.pi))
            / (2 * math.log(c.compress_rope_theta))
            for turns in (32, 1)
        )  # fmt: skip
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        pairs = torch.arange(dim // 2, device=device, dtype=torch.float32)
        kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
        rates = (1 / (c.yarn_factor * periods)) * (1 - kept) + (1 / periods) * kept
    angles = positions.float()[:, None] * rates
    return Rope(angles.cos(), angles.sin())


def turn_tail(x: Tensor, rope: Rope, *, back: bool = False) -> Tensor:
    """The last dimensions of x [B, T, D] or [B, T, H, D], neighbours in pairs; `back`: back."""
    span = 2 * rope.cos.shape[-1]
    a, b = x[..., -span:].float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = (t if x.dim() == 3 else t[:, None] for t in rope)
    sin = -sin if back else sin
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([x[..., :-span], turned.to(x.dtype)], dim=-1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Compressor(nn.Module):
    def __init__(self, c: DemoV4Config, ratio: int, dim: int) -> None:
        super().__init__()
        self.c, self.ratio, self.dim = c, ratio, dim
        channels = 2 * dim if ratio == OVERLAPPING else dim
        self.ape = nn.Parameter(torch.zeros(ratio, channels))
        self.wkv, self.wgate = _linear(c.hidden_size, channels), _linear(c.hidden_size, channels)
        self.norm = RMSNorm(dim, c.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> entries [B, T // ratio, dim]."""
        ratio, dim, count = self.ratio, self.dim, x.shape[1] // self.ratio
        whole = x[:, : count * ratio]
        kv = self.wkv(whole).float().unflatten(1, (count, ratio))  # [B, E, ratio, C]
        gate = self.wgate(whole).float().unflatten(1, (count, ratio)) + self.ape.float()
        if ratio == OVERLAPPING:
            before = F.pad(kv[..., :dim], (0, 0, 0, 0, 1, 0))[:, :count]
            gates = F.pad(gate[..., :dim], (0, 0, 0, 0, 1, 0), value=-math.inf)[:, :count]
            kv = torch.cat([before, kv[..., dim:]], dim=2)
            gate = torch.cat([gates, gate[..., dim:]], dim=2)
        mixed = self.norm((gate.softmax(2) * kv).sum(2))
        at = torch.arange(count, device=x.device) * ratio
        return turn_tail(mixed, rope_at(self.c, at, entries=True)).to(x.dtype)


class Indexer(nn.Module):
    def __init__(self, c: DemoV4Config) -> None:
        super().__init__()
        self.heads, self.dim = c.index_n_heads, c.index_head_dim
        self.wq_b = _linear(c.q_lora_rank, self.heads * self.dim)
        self.weights_proj = _linear(c.hidden_size, self.heads)
        self.compressor = Compressor(c, OVERLAPPING, self.dim)

    def forward(self, x: Tensor, q_latent: Tensor, rope: Rope) -> Tensor:
        """Scores, float32 [B, T, E]. It learns from its own loss alone."""
        x, q_latent = x.detach(), q_latent.detach()
        query = self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim))
        query = turn_tail(query, rope)
        keys = self.compressor(x).to(query.dtype)
        weight = self.weights_proj(x).float() * (self.heads * self.dim) ** -0.5  # [B, T, Hi]
        products = torch.matmul(query.flatten(1, 2), keys.mT).unflatten(1, query.shape[1:3])
        return (products.relu().float() * weight[..., None]).sum(2)


class Attention(nn.Module):
    def __init__(self, c: DemoV4Config, ratio: int) -> None:
        super().__init__()
        self.c, self.ratio = c, ratio
        heads, dim = c.num_attention_heads, c.head_dim
        self.wq_a, self.q_norm = (
            _linear(c.hidden_size, c.q_lora_rank),
            RMSNorm(c.q_lora_rank, c.rms_norm_eps),
        )
        self.wq_b = _linear(c.q_lora_rank, heads * dim)
        self.wkv, self.kv_norm = _linear(c.hidden_size, dim), RMSNorm(dim, c.rms_norm_eps)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.wo_a = _linear(heads * dim // c.o_groups, c.o_groups * c.o_lora_rank)
        self.wo_b = _linear(c.o_groups * c.o_lora_rank, c.hidden_size)
        if ratio != SLIDING:
            self.compressor = Compressor(c, ratio, dim)
        if ratio == OVERLAPPING:
            self.indexer = Indexer(c)

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """query [B, T, H, d], key [B, T, d], query latent [B, T, q_lora]."""
        q_latent = self.q_norm(self.wq_a(x))
        query = self.wq_b(q_latent).unflatten(-1, (self.c.num_attention_heads, -1))
        query = turn_tail(unit(query, self.c.rms_norm_eps), rope)
        return query, turn_tail(self.kv_norm(self.wkv(x)), rope).to(query.dtype), q_latent

    def output(self, mixed: Tensor, rope: Rope) -> Tensor:
        """Attention result [B, T, H, d], turned back, to [B, T, D]."""
        flat = turn_tail(mixed, rope, back=True).flatten(2)
        groups = flat.unflatten(-1, (self.c.o_groups, -1))
        down = self.wo_a.weight.unflatten(0, (self.c.o_groups, -1)).to(groups.dtype)
        return self.wo_b(torch.einsum("btgi,gri->btgr", groups, down).flatten(2))


def clamp_mul(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class SharedExperts(nn.Module):
    def __init__(self, c: DemoV4Config) -> None:
        super().__init__()
        inner, self.limit = c.moe_intermediate_size * c.n_shared_experts, c.swiglu_limit
        self.w1, self.w3 = _linear(c.hidden_size, inner), _linear(c.hidden_size, inner)
        self.w2 = _linear(inner, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(clamp_mul(self.w1(x), self.w3(x), self.limit))


class Gate(nn.Module):
    """Square roots of softplus scores; the best two, or those of the token's row of a table."""

    load: Tensor
    bias: Tensor
    tid2eid: Tensor

    def __init__(self, c: DemoV4Config, *, hashed: bool) -> None:
        super().__init__()
        self.c, self.hashed = c, hashed
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        self.register_buffer("load", torch.zeros(c.n_routed_experts), persistent=False)
        if hashed:
            chance = torch.Generator().manual_seed(0)
            order = torch.rand((c.vocab_size, c.n_routed_experts), generator=chance).argsort(-1)
            self.register_buffer("tid2eid", order[:, : c.num_experts_per_tok].contiguous())
        else:
            self.register_buffer("bias", torch.zeros(c.n_routed_experts))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Routing weights float32 [N, E] of x [N, D] and int64 [N], zero where not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.softplus(F.linear(x.float(), self.weight.float())).sqrt()
        if self.hashed:
            best = self.tid2eid[tokens]
        else:
            choice = scores.detach() + self.bias
            best = choice.topk(self.c.num_experts_per_tok, dim=-1).indices
        chosen = torch.zeros_like(scores).scatter(1, best, 1.0)
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.training:
            self.load += chosen.mean(0)
        return weights * self.c.routed_scaling_factor

    @torch.no_grad()
    def balance(self, speed: Tensor | float) -> None:
        """Move the selection bias towards even load (auxiliary-loss-free balancing)."""
        if not self.hashed:
            self.bias += speed * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Experts(nn.Module):
    """All experts at once: for a handful, one wide product beats any gathering."""

    def __init__(self, c: DemoV4Config) -> None:
        super().__init__()
        count, inner, hidden = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
        self.limit = c.swiglu_limit
        self.w1 = nn.Parameter(torch.empty(count, inner, hidden))
        self.w3 = nn.Parameter(torch.empty(count, inner, hidden))
        self.w2 = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [N, D], weights [N, E] -> [N, D]."""
        gate, up = (F.linear(x, w.flatten(0, 1)) for w in (self.w1, self.w3))  # [N, E * I]
        inner = clamp_mul(gate, up, self.limit).unflatten(1, (weights.shape[1], -1))
        scaled = inner * weights[..., None].to(inner.dtype)
        return F.linear(scaled.flatten(1), self.w2.permute(1, 0, 2).flatten(1))


class MoE(nn.Module):
    def __init__(self, c: DemoV4Config, *, hashed: bool) -> None:
        super().__init__()
        self.gate = Gate(c, hashed=hashed)
        self.experts = Experts(c)
        self.shared_experts = SharedExperts(c)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        routed = self.experts(flat, self.gate(flat, tokens.flatten())).view_as(x)
        return routed + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, c: DemoV4Config, ratio: int, *, hashed: bool) -> None:
        super().__init__()
        count = (2 + c.hc_mult) * c.hc_mult
        for place in ("attn", "ffn"):
            width = c.hc_mult * c.hidden_size
            self.register_parameter(f"hc_{place}_fn", nn.Parameter(torch.empty(count, width)))
            self.register_parameter(f"hc_{place}_base", nn.Parameter(torch.zeros(count)))
            self.register_parameter(f"hc_{place}_scale", nn.Parameter(torch.full((3,), 0.1)))
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn = Attention(c, ratio)
        self.ffn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.ffn = MoE(c, hashed=hashed)

    def hyper(self, place: str) -> Hyper:
        return Hyper(*(self.get_parameter(f"hc_{place}_{n}") for n in ("fn", "base", "scale")))


class Collapse(nn.Module):
    """Parameters of a head's collapse lie beside its owner's others: hc_head_fn and so on."""

    hc_head_fn: nn.Parameter
    hc_head_base: nn.Parameter
    hc_head_scale: nn.Parameter

    def _add_collapse(self, c: DemoV4Config) -> None:
        self.hc_head_fn = nn.Parameter(torch.empty(c.hc_mult, c.hc_mult * c.hidden_size))
        self.hc_head_base = nn.Parameter(torch.zeros(c.hc_mult))
        self.hc_head_scale = nn.Parameter(torch.full((1,), 0.1))

    def hyper_head(self) -> HyperHead:
        return HyperHead(self.hc_head_fn, self.hc_head_base, self.hc_head_scale)


class DraftLayer(Layer, Collapse):
    def __init__(self, c: DemoV4Config) -> None:
        super().__init__(c, SLIDING, hashed=False)
        self._add_collapse(c)
        self.enorm, self.hnorm = (RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(2))
        self.e_proj = _linear(c.hidden_size, c.hidden_size)
        self.h_proj = _linear(c.hidden_size, c.hidden_size)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def join(self, embedded: Tensor, streams: Tensor) -> Tensor:
        """[B, T, S, D] of the next tokens' [B, T, D] and streams [B, T, S, D]."""
        return self.e_proj(self.enorm(embedded))[:, :, None] + self.h_proj(self.hnorm(streams))


class DemoV4Model(Collapse):
    def __init__(self, c: DemoV4Config) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(
            Layer(c, c.compress_ratios[i], hashed=i < c.num_hash_layers)
            for i in range(c.num_hidden_layers)
        )
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = _linear(c.hidden_size, c.vocab_size)
        self._add_collapse(c)
        self.mtp = nn.ModuleList([DraftLayer(c)])
        self._initialise()

    @property
    def draft_layer(self) -> DraftLayer:
        layer = self.mtp[0]
        assert isinstance(layer, DraftLayer)
        return layer

    @property
    def main_layers(self) -> list[Layer]:
        return [m for m in self.layers if isinstance(m, Layer)]

    def gates(self) -> list[Gate]:
        return [m for m in self.modules() if isinstance(m, Gate)]

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, p in self.named_parameters():
            if name.endswith("_base") and p.numel() > self.c.hc_mult:
                self._set_bases(p)
            elif name.endswith("ape"):
                nn.init.normal_(p, std=0.1)
            elif p.dim() < 2:
                continue
            elif name.startswith("embed"):
                nn.init.normal_(p, std=0.5)
            elif name.endswith(("wo_b.weight", "w2", "w2.weight", "_fn")):
                nn.init.normal_(p, std=0.02)
            else:
                nn.init.normal_(p, std=0.6 / math.sqrt(p.shape[-1]))

    def _set_bases(self, base: Tensor) -> None:
        """Streams begin nearly apart, and each takes its own share of what a layer adds."""
        count = self.c.hc_mult
        pre, post, mix = base.split([count, count, count * count])
        pre.normal_(-1.0, 0.5)
        post.normal_(0.0, 0.5)
        mix.copy_(4.0 * torch.eye(count, device=base.device).flatten())
