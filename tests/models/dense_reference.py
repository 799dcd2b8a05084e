# SPDX-License-Identifier: Apache-2.0
"""DeepSeek sparse attention written the slow way: float64, whole sequences, expanded keys, masks.

Reads config.json and the tensors of a folder as they are named on disk. Shares no code with the
package; no YaRN; rotary angles are float32, as models of this kind are trained with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class DenseReference:
    """A folder's model over sequences of N tokens."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    interleaved_indexer: bool

    @classmethod
    def read(cls, folder: Path) -> DenseReference:
        config = json.loads((folder / "config.json").read_text())
        weights: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            weights |= {name: t.double() for name, t in load_file(file).items()}
        default = config["model_type"] == "glm_moe_dsa"
        return cls(config, weights, config.get("indexer_rope_interleave", default))

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """[N, H] behind the final norm."""
        x = self.weights["model.embed_tokens.weight"][list(tokens)]
        kinds = self.config.get("indexer_types") or ["full"] * self.config["num_hidden_layers"]
        picks = None
        for layer, kind in enumerate(kinds):
            x, picks = self._layer(x, layer, None if kind == "full" else picks)
        return self._norm(x, "model.norm", self.config["rms_norm_eps"])

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V]."""
        return hidden @ self.weights["lm_head.weight"].T

    def mtp_hidden(self, next_tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """[N, H] behind the MTP layer's norm. next_tokens[i] follows position i; hidden [N, H]."""
        eps, name = self.config["rms_norm_eps"], f"model.layers.{self.mtp_layer}"
        table = self.weights.get(
            f"{name}.embed_tokens.weight", self.weights["model.embed_tokens.weight"]
        )
        token = self._norm(table[list(next_tokens)], f"{name}.enorm", eps)
        joined = torch.cat((token, self._norm(hidden, f"{name}.hnorm", eps)), dim=-1)
        x, _ = self._layer(joined @ self.weights[f"{name}.eh_proj.weight"].T, self.mtp_layer, None)
        return self._norm(x, f"{name}.shared_head.norm", eps)

    def mtp_logits(self, hidden: Tensor) -> Tensor:
        """[N, V]."""
        name = f"model.layers.{self.mtp_layer}.shared_head.head.weight"
        return hidden @ self.weights.get(name, self.weights["lm_head.weight"]).T

    @property
    def mtp_layer(self) -> int:
        return self.config["num_hidden_layers"]

    def _norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _layer(self, x: Tensor, layer: int, picks: Tensor | None) -> tuple[Tensor, Tensor]:
        name, eps = f"model.layers.{layer}", self.config["rms_norm_eps"]
        normed = self._norm(x, f"{name}.input_layernorm", eps)
        attended, picks = self._attention(normed, f"{name}.self_attn", picks)
        x = x + attended
        normed = self._norm(x, f"{name}.post_attention_layernorm", eps)
        return x + self._mlp(normed, f"{name}.mlp"), picks

    def _attention(self, x: Tensor, name: str, picks: Tensor | None) -> tuple[Tensor, Tensor]:
        """picks bool [N, N]: whether query i may look at key j; computed here if None."""
        config, count = self.config, x.shape[0]
        heads, nope, rope = (
            config["num_attention_heads"],
            config["qk_nope_head_dim"],
            config["qk_rope_head_dim"],
        )
        rank = config["kv_lora_rank"]
        q_latent = self._norm(self._linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", 1e-6)
        if picks is None:
            picks = self._picks(x, q_latent, f"{name}.indexer")
        query = self._linear(q_latent, f"{name}.q_b_proj").view(count, heads, nope + rope)
        query = torch.cat((query[..., :nope], rotate(query[..., nope:], True, self.config)), -1)
        stored = self._linear(x, f"{name}.kv_a_proj_with_mqa")
        latent = self._norm(stored[:, :rank], f"{name}.kv_a_layernorm", 1e-6)
        shared = rotate(stored[:, None, rank:], True, self.config)
        pairs = self._linear(latent, f"{name}.kv_b_proj").view(count, heads, -1)
        key = torch.cat((pairs[..., :nope], shared.expand(-1, heads, -1)), dim=-1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * (nope + rope) ** -0.5
        scores = scores.masked_fill(~picks, float("-inf"))
        mixed = torch.einsum("hqk,khv->qhv", scores.softmax(-1), pairs[..., nope:])
        return self._linear(mixed.flatten(1), f"{name}.o_proj"), picks

    def _picks(self, x: Tensor, q_latent: Tensor, name: str) -> Tensor:
        """bool [N, N]: the index_topk best keys of a query; among equals the lowest positions."""
        config, count = self.config, x.shape[0]
        heads, dim, rope = (
            config["index_n_heads"],
            config["index_head_dim"],
            config["qk_rope_head_dim"],
        )
        query = self._linear(q_latent, f"{name}.wq_b").view(count, heads, dim)
        key = self._linear(x, f"{name}.wk")
        key = key - key.mean(-1, keepdim=True)
        key = key / (key.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        key = key * self.weights[f"{name}.k_norm.weight"] + self.weights[f"{name}.k_norm.bias"]
        key = key[:, None]

        def turned(y: Tensor) -> Tensor:
            rotated = rotate(y[..., :rope], self.interleaved_indexer, config)
            return torch.cat((rotated, y[..., rope:]), dim=-1)

        products = torch.einsum("qhd,kd->qhk", turned(query), turned(key)[:, 0])
        gates = self._linear(x, f"{name}.weights_proj") * (heads * dim) ** -0.5
        scores = (products.relu() * gates[..., None]).sum(1)
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        order = scores.masked_fill(~causal, float("-inf")).argsort(
            dim=-1, descending=True, stable=True
        )
        chosen = torch.zeros_like(causal).scatter(1, order[:, : config["index_topk"]], True)
        return chosen & causal

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        if f"{name}.gate.weight" not in self.weights:
            return self._dense(x, name)
        return torch.stack([self._moe(token, name) for token in x])

    def _dense(self, x: Tensor, name: str) -> Tensor:
        gate = torch.nn.functional.silu(self._linear(x, f"{name}.gate_proj"))
        return self._linear(gate * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def _moe(self, x: Tensor, name: str) -> Tensor:
        """One token x [H]."""
        config = self.config
        scores = self._linear(x, f"{name}.gate").sigmoid()
        biased = scores + self.weights[f"{name}.gate.e_score_correction_bias"]
        groups = biased.view(config["n_group"], -1)
        strength = groups.sort(-1, descending=True).values[:, :2].sum(-1)
        best = strength.argsort(descending=True, stable=True)[: config["topk_group"]]
        allowed = torch.full_like(groups, float("-inf"))
        allowed[best] = groups[best]
        experts = allowed.flatten().argsort(descending=True, stable=True)
        experts = experts[: config["num_experts_per_tok"]].tolist()
        total = sum(float(scores[e]) for e in experts) if config["norm_topk_prob"] else 1.0
        out = self._dense(x, f"{name}.shared_experts")
        for expert in experts:
            weight = float(scores[expert]) / total * config["routed_scaling_factor"]
            out = out + weight * self._dense(x, f"{name}.experts.{expert}")
        return out


def rotate(x: Tensor, interleaved: bool, config: dict[str, Any]) -> Tensor:
    """x [N, heads, D] turned by the angles of positions 0 .. N-1, each pair where it was."""
    dim = x.shape[-1]
    steps = torch.arange(dim // 2, dtype=torch.float32)
    inverse = 1.0 / config["rope_theta"] ** (2 * steps / dim)
    angles = (torch.arange(x.shape[0], dtype=torch.float32)[:, None] * inverse)[:, None]
    cos, sin = angles.cos().double(), angles.sin().double()
    out = torch.empty_like(x)
    if interleaved:
        first, second = slice(0, dim, 2), slice(1, dim, 2)
    else:
        first, second = slice(0, dim // 2), slice(dim // 2, dim)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out
