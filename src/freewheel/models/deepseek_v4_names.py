# SPDX-License-Identifier: Apache-2.0
"""The names of DeepSeek-V4's tensors: DeepSeek's own, which are asked for, and transformers'.

transformers calls its modules by other names, and saves under a mixture of both: DeepSeek's behind
a prefix, but for the tables, the heads, and the norm of the keys. The draft layer is mtp.0, or in
some files the layer behind the last one, with its norm and tables named as DeepSeek-V3 named them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.nn import WeightSource
from freewheel.nn.cut import Cut
from freewheel.nn.matrix import Matrix
from freewheel.spec.mesh import Mesh

TOP_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}

MODULE_PARTS = (
    (".hc_attn_", ".attn_hc."),
    (".hc_ffn_", ".ffn_hc."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".attn.indexer.weights_proj.", ".attn.indexer.scorer.weights_proj."),
    (".attn.indexer.compressor.", ".attn.indexer."),
    (".attn.indexer.", ".attn.compressor.indexer."),
    (".attn.", ".self_attn."),
    (".ffn.", ".mlp."),
    (".attn_sink", ".sinks"),
    (".q_norm.", ".q_a_norm."),
    (".norm.", ".kv_norm."),
    (".ape", ".position_bias"),
    (".wq_a.", ".q_a_proj."),
    (".wq_b.", ".q_b_proj."),
    (".wkv.", ".kv_proj."),
    (".wgate.", ".gate_proj."),
    (".wo_a.", ".o_a_proj."),
    (".wo_b.", ".o_b_proj."),
    (".gate.bias", ".gate.e_score_correction_bias"),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)
"""Part of DeepSeek's name -> part of transformers' module name, in this order."""


DRAFT_PARTS = {
    "norm.weight": "shared_head.norm.weight",
    "head.weight": "shared_head.head.weight",
    "emb.tok_emb.weight": "embed_tokens.weight",
    "hc_head_fn": "hc_head.hc_fn",
    "hc_head_base": "hc_head.hc_base",
    "hc_head_scale": "hc_head.hc_scale",
}
"""Names within the draft layer -> what they are called where it is the layer behind the last."""


def saved_name(name: str) -> str:
    """As transformers' `save_pretrained` writes it."""
    if name == "head.weight":
        return name
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    return f"model.{name}".replace(".attn.kv_norm.", ".attn.norm.")


def module_name(name: str) -> str:
    """As transformers calls the parameter."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    for part, other in MODULE_PARTS:
        name = name.replace(part, other)
    return f"model.{name}"


def draft_names(name: str, layer: int) -> tuple[str, ...]:
    """Of a tensor of mtp.0, where it is stored as model layer `layer`; none of any other tensor."""
    part = name.removeprefix("mtp.0.")
    if part == name:
        return ()
    own = f"layers.{layer}.{part}"
    other = f"model.layers.{layer}.{DRAFT_PARTS.get(part, part)}"
    return f"model.{own}", other, saved_name(own), module_name(own)


class PublishedNames:
    """Asks a source by DeepSeek's name for what it may store under another."""

    def __init__(self, source: WeightSource, layers: int) -> None:
        """`layers`: of the model, the draft layer not counted."""
        self._source = source
        self._layers = layers

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        return self._source.device

    @property
    def mesh(self) -> Mesh:
        return self._source.mesh

    def has(self, name: str) -> bool:
        return self._source.has(self._stored(name))

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        return self._source.tensor(self._stored(name), shape, dtype, cut)

    def matrix(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Matrix:
        return self._source.matrix(self._stored(name), shape, cut)

    def fill(
        self, name: str, shape: tuple[int, ...], target: Matrix, cut: Cut | None = None
    ) -> None:
        self._source.fill(self._stored(name), shape, target, cut)

    def settle(self) -> None:
        self._source.settle()

    def elsewhere(self, name: str, shape: tuple[int, ...]) -> None:
        self._source.elsewhere(self._stored(name), shape)

    def dense(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        return self._source.dense(self._stored(name), shape, dtype, cut)

    def ids(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        return self._source.ids(self._stored(name), shape, below)

    def same(self, name: str, other: str) -> bool:
        return self._source.same(self._stored(name), self._stored(other))

    def skip(self, pattern: str, reason: str) -> None:
        self._source.skip(self._stored(pattern), reason)

    def _stored(self, name: str) -> str:
        """The first of its names that is stored; DeepSeek's own if none is."""
        names = (
            name,
            saved_name(name),
            module_name(name),
            *draft_names(name, self._layers),
        )
        return next((n for n in names if self._source.has(n)), name)
