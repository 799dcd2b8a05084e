# SPDX-License-Identifier: Apache-2.0
"""Reads the config.json of a DeepSeek-V4 model, in DeepSeek's own layout and in transformers'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from freewheel.errors import CheckpointError, UnsupportedModel
from freewheel.spec.common_config import (
    bos_id,
    eos_ids,
    read_mtp,
    refuse_other_values,
    with_ignored,
)
from freewheel.spec.compressed import (
    ClampedMoeSpec,
    CompressedSpec,
    EntryIndexerSpec,
    HyperSpec,
    LayerKind,
    SharedKvSpec,
)
from freewheel.spec.compressed_layers import hashed_layers, read_compression, read_kinds
from freewheel.spec.config_fields import Fields
from freewheel.spec.model import RopeSpec
from freewheel.spec.quantization import read_quantization
from freewheel.spec.rope_config import read_yarn, refuse_unknown

REQUIRED_VALUES: Mapping[str, object] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
"""Fields that change the maths, and the one value of each that is implemented."""

EXPERT_DTYPES = ("bf16", "bfloat16", "fp32", "float32", "fp8", "fp4")
"""What experts may be said to be stored as. What they are stored as, their headers say."""

REFUSED_FIELDS = (
    "hc_pre_from_prev_sublayer",
    "index_source_layer_ids",
    "kv_source_layer_ids",
    "q_head_norm",
)
REFUSED_PREFIXES = ("candidate_", "dspark_", "engram_", "vision_")
"""Fields of DeepSeek-V4.1, and of drafters of another kind: not this model."""


def read_compressed(
    config: Mapping[str, object], generation_config: Mapping[str, object] | None
) -> CompressedSpec:
    """The model that `config` describes. Raises as `read_model_spec` does."""
    fields = Fields(config, "config.json")
    _refuse_other_maths(fields)
    layers, vocab_size = fields.whole("num_hidden_layers"), fields.whole("vocab_size")
    max_positions = fields.whole("max_position_embeddings")
    attention = _attention(fields)
    compression = read_compression(fields)
    rope, entry_rope = _ropes(fields, attention.rope_dim, max_positions)
    spec = CompressedSpec(
        family=fields.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=fields.whole("hidden_size"),
        layers=layers,
        norm_eps=fields.positive("rms_norm_eps"),
        max_positions=max_positions,
        tied_head=fields.flag("tie_word_embeddings", False),
        quantization=read_quantization(fields),
        mtp=read_mtp(fields, layers, sparse=True),
        bos_id=bos_id(fields, vocab_size),
        eos_ids=eos_ids(fields, generation_config, vocab_size),
        attention=attention,
        kinds=read_kinds(fields, layers, compression),
        compression=compression,
        indexer=_indexer(fields, attention.rope_dim, max_positions),
        rope=rope,
        entry_rope=entry_rope,
        hyper=HyperSpec(
            streams=fields.whole("hc_mult"),
            iterations=fields.whole("hc_sinkhorn_iters"),
            eps=fields.positive("hc_eps"),
        ),
        moe=_moe(fields, layers),
    )
    _check_ratios(fields, spec)
    return with_ignored(spec, fields)


def _refuse_other_maths(fields: Fields) -> None:
    refuse_other_values(fields, REQUIRED_VALUES)
    refused = sorted(
        name
        for name in fields.values
        if (name in REFUSED_FIELDS or name.startswith(REFUSED_PREFIXES)) and fields.has(name)
    )
    if refused:
        raise UnsupportedModel(
            f"{fields.where}: {', '.join(refused)} belongs to a later model than DeepSeek-V4, "
            "which is not supported"
        )
    if fields.text("expert_dtype", "bf16") not in EXPERT_DTYPES:
        raise UnsupportedModel(
            f"{fields.where}: expert_dtype {fields.get('expert_dtype')!r} is not supported; "
            f"supported: {', '.join(EXPERT_DTYPES)}"
        )


def _attention(fields: Fields) -> SharedKvSpec:
    heads, head_dim = fields.whole("num_attention_heads"), fields.whole("head_dim")
    groups = fields.whole("o_groups")
    if heads % groups:
        raise CheckpointError(
            f"{fields.where}: o_groups {groups} must divide num_attention_heads {heads}"
        )
    return SharedKvSpec(
        heads=heads,
        head_dim=head_dim,
        rope_dim=_rope_dim(fields, head_dim),
        q_lora_rank=fields.whole("q_lora_rank"),
        groups=groups,
        group_rank=fields.whole("o_lora_rank"),
        window=fields.whole("sliding_window"),
    )


def _rope_dim(fields: Fields, head_dim: int) -> int:
    """qk_rope_head_dim, or head_dim times partial_rotary_factor; both must agree."""
    named = fields.whole("qk_rope_head_dim", low=2) if fields.has("qk_rope_head_dim") else None
    if not fields.has("partial_rotary_factor"):
        dim = fields.whole("qk_rope_head_dim", low=2)
    else:
        dim = int(head_dim * fields.number("partial_rotary_factor"))
        if named is not None and named != dim:
            raise CheckpointError(
                f"{fields.where}: qk_rope_head_dim is {named}, but partial_rotary_factor makes it "
                f"{dim}"
            )
    if dim % 2 or not 2 <= dim <= head_dim:
        raise CheckpointError(
            f"{fields.where}: qk_rope_head_dim must be even and at most head_dim, got {dim}"
        )
    return dim


def _indexer(fields: Fields, rope_dim: int, max_positions: int) -> EntryIndexerSpec:
    dim = fields.whole("index_head_dim")
    if dim < rope_dim:
        raise CheckpointError(
            f"{fields.where}: index_head_dim {dim} is smaller than qk_rope_head_dim {rope_dim}"
        )
    topk = min(fields.whole("index_topk"), max_positions)  # there are no more entries to pick
    return EntryIndexerSpec(fields.whole("index_n_heads"), dim, topk)


def _moe(fields: Fields, layers: int) -> ClampedMoeSpec:
    experts, top_k = fields.whole("n_routed_experts"), fields.whole("num_experts_per_tok")
    if top_k > experts:
        raise CheckpointError(
            f"{fields.where}: num_experts_per_tok {top_k} exceeds n_routed_experts {experts}"
        )
    return ClampedMoeSpec(
        experts=experts,
        top_k=top_k,
        width=fields.whole("moe_intermediate_size"),
        shared=fields.whole("n_shared_experts", low=0),
        scale=fields.number("routed_scaling_factor"),
        limit=fields.positive("swiglu_limit"),
        hashed=hashed_layers(fields, layers),
    )


def _check_ratios(fields: Fields, spec: CompressedSpec) -> None:
    both = {LayerKind.SPARSE, LayerKind.HEAVY} <= set(spec.kinds)
    if both and spec.compression.sparse_ratio == spec.compression.heavy_ratio:
        raise UnsupportedModel(
            f"{fields.where}: compress_rates must differ between the two kinds of layers"
        )


def _ropes(fields: Fields, dim: int, max_positions: int) -> tuple[RopeSpec, RopeSpec]:
    """Rotary settings of layers without entries, and of those with them.

    Only the second are stretched by YaRN, and their tables are not scaled by its temperature,
    whatever it would be (transformers, DeepseekV4Config).
    """
    given = {**fields.mapping("rope_parameters"), **fields.mapping("rope_scaling")}
    theta, entry_theta = fields.number("rope_theta", 0.0), fields.number("compress_rope_theta", 0.0)
    nested = {
        name: cast("Mapping[str, object]", value)
        for name, value in given.items()
        if isinstance(value, Mapping)
    }
    if nested.keys() - {"main", "compress"}:
        raise UnsupportedModel(
            f"{fields.where}: rope_parameters has settings for {', '.join(sorted(nested))}; "
            "known: main, compress"
        )
    flat = {k: v for k, v in given.items() if k not in nested and k != "rope_theta"}
    main = _settings(fields, nested.get("main", {}), theta, "rope_theta", dim)
    own = _settings(fields, nested.get("compress", flat), entry_theta, "compress_rope_theta", dim)
    if _kind(main) != "default":
        raise UnsupportedModel(f"{main.where}: main must not be scaled, got {_kind(main)!r}")
    kind = _kind(own)
    refuse_unknown(own, kind)
    yarn = None
    if kind == "yarn":
        if own.number("attention_factor", 1.0) != 1.0:
            raise UnsupportedModel(f"{own.where}: attention_factor must be 1 or absent")
        unscaled = Fields({**own.values, "attention_factor": 1.0}, own.where)
        yarn, _ = read_yarn(unscaled, max_positions)
    return (
        RopeSpec(dim, main.number("rope_theta"), None),
        RopeSpec(dim, own.number("rope_theta"), yarn),
    )


def _settings(
    fields: Fields, values: Mapping[str, object], theta: float, name: str, dim: int
) -> Fields:
    """One set of rotary settings; its base may stand in it, in the field `name`, or in both."""
    where = f"{fields.where}: rotary settings"
    own = Fields(values, where)
    inner = own.number("rope_theta", 0.0)
    if theta and inner and theta != inner:
        raise CheckpointError(f"{where}: {name} is {theta} at the top, {inner} inside")
    if not (theta or inner):
        raise CheckpointError(f"{fields.where}: the field {name} is missing")
    if (theta or inner) <= 1:
        raise fields.wrong(name, "above 1", theta or inner)
    head_dim = fields.whole("head_dim")
    if int(head_dim * own.number("partial_rotary_factor", dim / head_dim)) != dim:
        raise CheckpointError(f"{where}: partial_rotary_factor contradicts a width of {dim}")
    return Fields({**own.values, "rope_theta": theta or inner}, where)


def _kind(settings: Fields) -> str:
    return settings.text("rope_type", settings.text("type", "default"))
