# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 written the slow way: float64, whole sequences, loops over tokens, windows, streams.

Reads config.json and the tensors of a folder in DeepSeek's names. Shares no code with the package;
no YaRN; rotary angles are float32, as models of this kind are trained with.
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
from torch.nn.functional import silu, softplus


@dataclass(frozen=True)
class StreamReference:
    """A folder's model over sequences of N tokens. Streams are [N, S, D]."""

    config: dict[str, Any]
    weights: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> StreamReference:
        config = json.loads((folder / "config.json").read_text())
        weights: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            weights |= load_file(file)
        assert config["rope_scaling"] is None
        floats = {n: w.double() if w.is_floating_point() else w for n, w in weights.items()}
        return cls(config, floats)

    def streams(self, tokens: Sequence[int]) -> Tensor:
        """[N, S, D] behind the last layer."""
        x = self.weights["embed.weight"][list(tokens)]
        x = torch.stack([x] * self.config["hc_mult"], dim=1)
        for layer in range(self.config["num_hidden_layers"]):
            ratio = self.config["compress_ratios"][layer]
            x = self._layer(x, f"layers.{layer}", ratio, tokens)
        return x

    def logits(self, streams: Tensor) -> Tensor:
        """[N, V]."""
        return self._head(streams, "hc_head", "norm", self.weights["head.weight"])

    def mtp_streams(self, next_tokens: Sequence[int], streams: Tensor) -> Tensor:
        """[N, S, D] behind the draft layer. next_tokens[i] follows position i."""
        table = self.weights.get("mtp.0.emb.tok_emb.weight", self.weights["embed.weight"])
        token = self._norm(table[list(next_tokens)], "mtp.0.enorm")
        joined = torch.stack(
            [
                self._linear(self._norm(streams[:, s], "mtp.0.hnorm"), "mtp.0.h_proj")
                + self._linear(token, "mtp.0.e_proj")
                for s in range(streams.shape[1])
            ],
            dim=1,
        )
        return self._layer(joined, "mtp.0", 0, None)

    def mtp_logits(self, streams: Tensor) -> Tensor:
        """[N, V]."""
        head = self.weights.get("mtp.0.head.weight", self.weights["head.weight"])
        return self._head(streams, "mtp.0.hc_head", "mtp.0.norm", head)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self._unit(x) * self.weights[f"{name}.weight"]

    def _unit(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _head(self, streams: Tensor, hyper: str, norm: str, head: Tensor) -> Tensor:
        logits = self._unit(streams.flatten(1)) @ self.weights[f"{hyper}_fn"].T
        share = torch.sigmoid(
            logits * self.weights[f"{hyper}_scale"] + self.weights[f"{hyper}_base"]
        )
        share = share + self.config["hc_eps"]
        return self._norm((share[:, :, None] * streams).sum(1), norm) @ head.T

    def _layer(
        self, streams: Tensor, name: str, ratio: int, tokens: Sequence[int] | None
    ) -> Tensor:
        mixes = self._mixes(streams, f"{name}.hc_attn")
        x = self._norm(self._collapsed(streams, mixes), f"{name}.attn_norm")
        streams = self._expanded(self._attention(x, f"{name}.attn", ratio), streams, mixes)
        mixes = self._mixes(streams, f"{name}.hc_ffn")
        x = self._norm(self._collapsed(streams, mixes), f"{name}.ffn_norm")
        routed = torch.stack(
            [
                self._moe(one, f"{name}.ffn", None if tokens is None else tokens[i])
                for i, one in enumerate(x)
            ]
        )
        return self._expanded(routed, streams, mixes)

    def _mixes(self, streams: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """pre [N, S], post [N, S], mix [N, S, S]."""
        count, eps = streams.shape[1], self.config["hc_eps"]
        logits = self._unit(streams.flatten(1)) @ self.weights[f"{name}_fn"].T
        base, scale = self.weights[f"{name}_base"], self.weights[f"{name}_scale"]
        pre = torch.sigmoid(logits[:, :count] * scale[0] + base[:count]) + eps
        second = slice(count, 2 * count)
        post = 2 * torch.sigmoid(logits[:, second] * scale[1] + base[second])
        mix = (logits[:, 2 * count :] * scale[2] + base[2 * count :]).view(-1, count, count)
        mix = mix.softmax(-1) + eps
        for turn in range(2 * self.config["hc_sinkhorn_iters"] - 1):
            mix = mix / (mix.sum(1 if turn % 2 == 0 else 2, keepdim=True) + eps)
        return pre, post, mix

    def _collapsed(self, streams: Tensor, mixes: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return (mixes[0][:, :, None] * streams).sum(1)

    def _expanded(self, y: Tensor, streams: Tensor, mixes: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        _, post, mix = mixes
        return post[:, :, None] * y[:, None] + torch.einsum("njk,njd->nkd", mix, streams)

    def _attention(self, x: Tensor, name: str, ratio: int) -> Tensor:
        config, count = self.config, x.shape[0]
        heads, dim = config["num_attention_heads"], config["head_dim"]
        positions = torch.arange(count)
        latent = self._norm(self._linear(x, f"{name}.wq_a"), f"{name}.q_norm")
        query = self._unit(self._linear(latent, f"{name}.wq_b").view(count, heads, dim))
        query = self._turn(query, positions, ratio)
        key = self._norm(self._linear(x, f"{name}.wkv"), f"{name}.kv_norm")
        key = self._turn(key[:, None], positions, ratio)[:, 0]
        entries, seen = key[:0], torch.zeros(count, 0, dtype=torch.bool)
        if ratio:
            entries = self._entries(x, f"{name}.compressor", ratio, dim)
            seen = positions[:, None] + 1 >= (torch.arange(len(entries)) + 1) * ratio
            if f"{name}.indexer.wq_b.weight" in self.weights:
                seen &= self._picks(x, latent, f"{name}.indexer", ratio, seen)
        back = positions[:, None] - positions
        window = (back >= 0) & (back < config["sliding_window"])
        allowed = torch.cat((window, seen), dim=1)
        values = torch.cat((key, entries))
        scores = torch.einsum("qhd,kd->hqk", query, values) * dim**-0.5
        scores = scores.masked_fill(~allowed, float("-inf"))
        sink = self.weights[f"{name}.attn_sink"][:, None, None].expand(-1, count, 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        mixed = torch.einsum("hqk,kd->qhd", weights, values)
        mixed = self._turn(mixed, -positions, ratio)
        groups = mixed.reshape(count, config["o_groups"], -1)
        down = self.weights[f"{name}.wo_a.weight"].view(config["o_groups"], -1, groups.shape[-1])
        low = torch.cat([groups[:, g] @ down[g].T for g in range(config["o_groups"])], dim=-1)
        return self._linear(low, f"{name}.wo_b")

    def _entries(self, x: Tensor, name: str, ratio: int, dim: int) -> Tensor:
        """[N // ratio, dim]."""
        kv, gate = self._linear(x, f"{name}.wkv"), self._linear(x, f"{name}.wgate")
        bias = self.weights[f"{name}.ape"]
        entries: list[Tensor] = []
        for w in range(x.shape[0] // ratio):
            own = range(w * ratio, (w + 1) * ratio)
            if kv.shape[1] == dim:
                parts = [(t, slice(0, dim)) for t in own]
            else:
                before = range((w - 1) * ratio, w * ratio) if w else range(0)
                parts = [(t, slice(0, dim)) for t in before] + [(t, slice(dim, None)) for t in own]
            gates = torch.stack([gate[t, part] + bias[t % ratio, part] for t, part in parts])
            values = torch.stack([kv[t, part] for t, part in parts])
            mixed = self._norm((gates.softmax(0) * values).sum(0), f"{name}.norm")
            entries.append(self._turn(mixed[None, None], torch.tensor([w * ratio]), ratio)[0, 0])
        return torch.stack(entries) if entries else x.new_zeros(0, dim)

    def _picks(self, x: Tensor, latent: Tensor, name: str, ratio: int, seen: Tensor) -> Tensor:
        """bool [N, E]: the best entries among those seen, lowest first among equals."""
        config, count = self.config, x.shape[0]
        heads, dim = config["index_n_heads"], config["index_head_dim"]
        keys = self._entries(x, f"{name}.compressor", ratio, dim)
        query = self._linear(latent, f"{name}.wq_b").view(count, heads, dim)
        query = self._turn(query, torch.arange(count), ratio)
        gates = self._linear(x, f"{name}.weights_proj") * heads**-0.5
        scores = torch.einsum("qhd,kd->qhk", query, keys).clamp(min=0) * dim**-0.5
        scores = (scores * gates[:, :, None]).sum(1).masked_fill(~seen, float("-inf"))
        picks = torch.zeros_like(seen)
        for q in range(count):
            order = scores[q].argsort(descending=True, stable=True)[: config["index_topk"]]
            picks[q, order] = True
        return picks

    def _turn(self, x: Tensor, positions: Tensor, ratio: int) -> Tensor:
        """x [N, heads, D] with its last dimensions turned, pair by pair."""
        rope, theta = self.config["qk_rope_head_dim"], self.config["rope_theta"]
        if ratio:
            theta = self.config["compress_rope_theta"]
        out = x.clone()
        for pair in range(rope // 2):
            inverse = torch.tensor(1.0) / torch.tensor(float(theta)) ** (
                torch.tensor(2.0 * pair) / rope
            )
            angle = positions.float() * inverse
            cos, sin = angle.cos().double()[:, None], angle.sin().double()[:, None]
            first, second = x[..., 2 * pair - rope], x[..., 2 * pair + 1 - rope]
            out[..., 2 * pair - rope] = first * cos - second * sin
            at = 2 * pair + 1 - rope
            out[..., at] = second * cos + first * sin
        return out

    def _moe(self, x: Tensor, name: str, token: int | None) -> Tensor:
        """One token x [D]. `token`: its id; used where a table chooses."""
        config = self.config
        scores = softplus(self._linear(x, f"{name}.gate")).sqrt()
        table = self.weights.get(f"{name}.gate.tid2eid")
        if table is None:
            biased = scores + self.weights[f"{name}.gate.bias"]
            chosen = biased.argsort(descending=True, stable=True)
            experts = chosen[: config["num_experts_per_tok"]].tolist()
        else:
            assert token is not None
            experts = table[token].tolist()
        total = sum(float(scores[e]) for e in experts)
        out = self._expert(x, f"{name}.shared_experts")
        for expert in experts:
            share = float(scores[expert]) / total * config["routed_scaling_factor"]
            out = out + share * self._expert(x, f"{name}.experts.{expert}")
        return out

    def _expert(self, x: Tensor, name: str) -> Tensor:
        limit = self.config["swiglu_limit"]
        gate = self._linear(x, f"{name}.w1").clamp(max=limit)
        up = self._linear(x, f"{name}.w3").clamp(-limit, limit)
        return self._linear(silu(gate) * up, f"{name}.w2")
