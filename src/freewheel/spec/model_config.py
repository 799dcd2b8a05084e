# SPDX-License-Identifier: Apache-2.0
"""Turns config.json into a ModelSpec, or refuses it: nothing that changes the maths is ignored."""

from __future__ import annotations

from collections.abc import Mapping

from freewheel.errors import CheckpointError, UnsupportedModel
from freewheel.spec.common_config import (
    bos_id,
    eos_ids,
    read_mtp,
    refuse_other_values,
    with_ignored,
)
from freewheel.spec.compressed import V4
from freewheel.spec.compressed_config import read_compressed
from freewheel.spec.config_fields import Fields
from freewheel.spec.layer_kinds import full_layers, sparse_layers
from freewheel.spec.model import AttentionSpec, DsaSpec, IndexerSpec, ModelSpec, MoeSpec, MtpSpec
from freewheel.spec.quantization import read_quantization
from freewheel.spec.rope_config import read_rope

FAMILIES = ("deepseek_v32", "glm_moe_dsa", V4)
"""Values of `model_type` that Freewheel runs."""

GLM = "glm_moe_dsa"

REQUIRED_VALUES: Mapping[str, object] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "moe_router_dtype": "float32",
    "index_kpool": 1,
    "index_kpool_compress": False,
}
"""Fields that change the maths, and the one value of each that is implemented or implied."""

REFUSED_FIELDS = (
    "compress_ratios",
    "logit_scale",
    "num_hash_layers",
    "sliding_window",
    "swiglu_limit",
)
"""Fields of related models that change the maths, and that these families do not have."""


def read_model_spec(
    config: Mapping[str, object], generation_config: Mapping[str, object] | None = None
) -> ModelSpec:
    """The model that `config` (config.json's object) describes.

    Raises UnsupportedModel, naming the field, for a model that is not implemented, and
    CheckpointError, naming the field, for one that is missing or malformed.
    """
    if _family(Fields(config, "config.json")) == V4:
        return read_compressed(config, generation_config)
    return read_dsa(config, generation_config)


def read_dsa(
    config: Mapping[str, object], generation_config: Mapping[str, object] | None = None
) -> DsaSpec:
    """As `read_model_spec`, of the families with DeepSeek sparse attention over every token."""
    fields = Fields(config, "config.json")
    family = _family(fields)
    _refuse_other_maths(fields)
    layers, vocab_size = fields.whole("num_hidden_layers"), fields.whole("vocab_size")
    max_positions = fields.whole("max_position_embeddings")
    rope, scale_factor = read_rope(fields, fields.whole("qk_rope_head_dim", low=2), max_positions)
    sparse = sparse_layers(fields, layers)
    mtp = _mtp(fields, layers, sparse)
    spec = DsaSpec(
        family=family,
        vocab_size=vocab_size,
        hidden_size=fields.whole("hidden_size"),
        layers=layers,
        dense_width=fields.whole("intermediate_size"),
        norm_eps=fields.positive("rms_norm_eps"),
        max_positions=max_positions,
        tied_head=fields.flag("tie_word_embeddings", False),
        quantization=read_quantization(fields),
        attention=_attention(fields, scale_factor),
        indexer=_indexer(fields, family, layers, max_positions),
        rope=rope,
        moe=_moe(fields) if any(sparse) or (mtp is not None and mtp.sparse) else None,
        sparse_layers=sparse[:layers],
        mtp=mtp,
        bos_id=bos_id(fields, vocab_size),
        eos_ids=eos_ids(fields, generation_config, vocab_size),
        notes=_notes(fields),
    )
    return with_ignored(spec, fields)


def _family(fields: Fields) -> str:
    family = fields.text("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"{fields.where}: model_type {family!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    return family


def _refuse_other_maths(fields: Fields) -> None:
    refuse_other_values(fields, REQUIRED_VALUES)
    refused = [name for name in REFUSED_FIELDS if fields.has(name)]
    if refused:
        raise UnsupportedModel(
            f"{fields.where}: {', '.join(refused)} is not supported for this model_type"
        )
    for kind in fields.items("layer_types") or ():
        if kind not in ("indexed_attention", "full_attention"):
            raise UnsupportedModel(f"{fields.where}: layer_types holds {kind!r}: not supported")


def _attention(fields: Fields, scale_factor: float) -> AttentionSpec:
    heads = fields.whole("num_attention_heads")
    if fields.whole("num_key_value_heads", heads) != heads:
        raise UnsupportedModel(
            f"{fields.where}: num_key_value_heads must equal num_attention_heads ({heads}): "
            "latent attention has no key-value groups"
        )
    nope, rope = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    if rope % 2:
        raise CheckpointError(f"{fields.where}: qk_rope_head_dim must be even, got {rope}")
    return AttentionSpec(
        heads=heads,
        q_lora_rank=fields.whole("q_lora_rank"),
        kv_lora_rank=fields.whole("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=fields.whole("v_head_dim"),
        scale=(nope + rope) ** -0.5 * scale_factor,
        interleaved=fields.flag("rope_interleave", True),
    )


def _indexer(fields: Fields, family: str, layers: int, max_positions: int) -> IndexerSpec:
    dim, rope_dim = fields.whole("index_head_dim"), fields.whole("qk_rope_head_dim")
    if dim < rope_dim:
        raise CheckpointError(
            f"{fields.where}: index_head_dim {dim} is smaller than qk_rope_head_dim {rope_dim}"
        )
    return IndexerSpec(
        heads=fields.whole("index_n_heads"),
        dim=dim,
        topk=min(fields.whole("index_topk"), max_positions),  # there are no more keys to pick
        interleaved=fields.flag("indexer_rope_interleave", family == GLM),
        full_layers=_own_indexers(fields, family, layers),
    )


def _own_indexers(fields: Fields, family: str, layers: int) -> tuple[bool, ...]:
    full = full_layers(fields, layers)
    if family != GLM and not all(full):
        raise UnsupportedModel(
            f"{fields.where}: {family} with shared indexer layers is not supported"
        )
    return full


def _moe(fields: Fields) -> MoeSpec:
    moe = MoeSpec(
        experts=fields.whole("n_routed_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        groups=fields.whole("n_group"),
        top_groups=fields.whole("topk_group"),
        width=fields.whole("moe_intermediate_size"),
        shared=fields.whole("n_shared_experts", low=0),
        normalise=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"),
    )
    if moe.experts % moe.groups or moe.experts < 2 * moe.groups:
        raise CheckpointError(
            f"{fields.where}: n_group {moe.groups} must split n_routed_experts {moe.experts} into "
            "equal groups of at least two"
        )
    if moe.top_groups > moe.groups:
        raise CheckpointError(
            f"{fields.where}: topk_group {moe.top_groups} exceeds n_group {moe.groups}"
        )
    if moe.top_k > moe.experts // moe.groups * moe.top_groups:
        raise CheckpointError(
            f"{fields.where}: num_experts_per_tok {moe.top_k} exceeds what topk_group groups hold"
        )
    return moe


def _mtp(fields: Fields, layers: int, sparse: tuple[bool, ...]) -> MtpSpec | None:
    """The MTP layer: a mixture of experts wherever the model has any, as in every published one."""
    own = sparse[layers] if len(sparse) > layers else fields.has("n_routed_experts")
    return read_mtp(fields, layers, own)


def _notes(fields: Fields) -> tuple[str, ...]:
    notes: list[str] = []
    if fields.flag("index_share_for_mtp_iteration", False):
        notes.append(
            "index_share_for_mtp_iteration: each draft step picks its own keys instead; drafts may "
            "differ, the text cannot"
        )
    if fields.has("auto_map"):
        notes.append("auto_map: code that ships with a checkpoint is never run")
    return tuple(notes)
