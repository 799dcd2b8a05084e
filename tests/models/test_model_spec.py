# SPDX-License-Identifier: Apache-2.0
"""config.json as data: every spelling means the same, and what is not implemented is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from freewheel.errors import CheckpointError, UnsupportedModel
from freewheel.nn import rope_table
from freewheel.spec import DsaSpec
from freewheel.spec.model_config import read_dsa
from tests.fixtures.closed_form import T32, TG, YARN

Config = dict[str, Any]

V32_YARN: Config = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}


def without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def table(spec: DsaSpec) -> torch.Tensor:
    return rope_table(spec.rope, 100, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "mscale_squared"),
    [
        ({"factor": 40}, 1.8739),
        ({"factor": 16}, 1.6314),
        ({"factor": 4}, 1.2965),
        ({"factor": 40, "mscale_all_dim": 0}, 1.0),
        ({"factor": 1}, 1.0),
    ],
)
def test_yarn_scales_the_attention(changes: Config, mscale_squared: float) -> None:
    spec = read_dsa(T32 | {"rope_scaling": V32_YARN | changes})
    assert spec.attention.scale * 24**0.5 == pytest.approx(mscale_squared, abs=5e-5)


SPELLINGS: dict[str, Config] = {
    "rope_type": {"rope_scaling": without(YARN, "type") | {"rope_type": "yarn"}},
    "floats": {"rope_scaling": YARN | {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}},
    "strings": {"rope_scaling": YARN | {"factor": "4", "beta_fast": "32", "mscale": "1.0"}},
    "nested": {"rope_parameters": YARN | {"rope_theta": 10000.0}, "rope_theta": None},
    "both": {"rope_parameters": {"rope_theta": 10000}, "rope_scaling": YARN},
    "keyed": {"rope_parameters": {"main": YARN, "rope_theta": 10000.0}, "rope_theta": None},
    "keyed-by-kind": {"rope_parameters": {"full_attention": YARN | {"rope_theta": 10000.0}}},
    "defaults": {"rope_scaling": without(YARN, "beta_fast", "beta_slow")},
    "derived-factor": {"rope_scaling": without(YARN, "factor")},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_yarn_gives_the_same_tables(spelling: str) -> None:
    plain = read_dsa(T32 | {"rope_scaling": YARN})
    spelled = read_dsa(T32 | SPELLINGS[spelling])
    assert spelled.rope == plain.rope
    assert spelled.attention.scale == plain.attention.scale
    assert torch.equal(table(spelled), table(plain))
    assert not torch.equal(table(plain), table(read_dsa(T32)))


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_no_scaling_may_be_null_empty_or_default(name: str) -> None:
    plain = table(read_dsa(T32))
    for value in (None, {}, {"type": "default"}, {"rope_type": "default", "rope_theta": 10000}):
        assert torch.equal(table(read_dsa(T32 | {name: value})), plain)


def test_cos_and_sin_are_scaled_where_the_two_mscales_differ() -> None:
    even = read_dsa(T32 | {"rope_scaling": YARN})
    uneven = read_dsa(T32 | {"rope_scaling": YARN | {"mscale": 2.0}})
    assert even.rope.yarn is not None and uneven.rope.yarn is not None
    assert even.rope.yarn.cos_sin_factor == 1.0
    assert uneven.rope.yarn.cos_sin_factor > 1.0
    assert table(uneven)[0, 0] == pytest.approx(uneven.rope.yarn.cos_sin_factor)


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({"indexer_types": None}, "FFFFFF"),
        ({"indexer_types": None, "index_topk_freq": 2}, "FFSFSF"),
        ({"indexer_types": None, "index_topk_freq": 4}, "FFSSSF"),
        ({"indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 1}, "FSSFSS"),
        ({"indexer_types": None, "index_topk_freq": 4, "index_topk_pattern": "FSFSFS"}, "FSFSFS"),
        ({"indexer_types": None, "index_topk_pattern": ["full"] * 5 + ["shared"]}, "FFFFFS"),
        ({"index_topk_pattern": "FFFFFF", "index_topk_freq": 2}, "FFSSFS"),
        ({"indexer_types": [*TG["indexer_types"], "shared"]}, "FFSSFS"),
    ],
)
def test_the_list_of_indexers_wins_over_the_pattern_and_that_over_the_schedule(
    changes: Config, full: str
) -> None:
    spec = read_dsa(TG | changes)
    assert spec.indexer.full_layers == tuple(letter == "F" for letter in full)


def test_the_indexers_rotary_layout_has_a_default_for_each_family() -> None:
    assert not read_dsa(T32).indexer.interleaved
    assert read_dsa(without(TG, "indexer_rope_interleave")).indexer.interleaved
    assert read_dsa(T32 | {"indexer_rope_interleave": True}).indexer.interleaved
    assert not read_dsa(TG | {"indexer_rope_interleave": False}).indexer.interleaved


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (1, None, (1,)),
        ([1, 2], None, (1, 2)),
        (1, [5, 9], (1, 5, 9)),
        ([9, 1], 9, (9, 1)),
        (None, 3, (3,)),
        (None, None, ()),
    ],
)
def test_end_of_sequence_ids_are_the_union_of_both_files(config, generation, expected) -> None:
    generated = None if generation is None else {"eos_token_id": generation}
    assert read_dsa(T32 | {"eos_token_id": config}, generated).eos_ids == expected


def test_the_list_of_mlp_kinds_wins_over_the_count_and_may_name_the_mtp_layers() -> None:
    kinds = ["dense", "sparse", "dense"]
    spec = read_dsa(T32 | {"mlp_layer_types": kinds})
    assert spec.sparse_layers == (False, True, False)
    assert spec.mtp is not None and spec.mtp.sparse
    spec = read_dsa(T32 | {"mlp_layer_types": [*kinds, "dense"]})
    assert spec.mtp is not None and not spec.mtp.sparse
    assert read_dsa(T32).sparse_layers == (False, True, True)


def test_a_model_without_experts_needs_no_field_about_them() -> None:
    names = ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob")
    spec = read_dsa(without(T32, *names) | {"first_k_dense_replace": 3})
    assert spec.moe is None
    assert spec.mtp is not None and not spec.mtp.sparse


def test_a_misleading_head_dim_changes_nothing() -> None:
    assert read_dsa(TG | {"head_dim": 192, "qk_head_dim": 1}) == read_dsa(TG)


def test_unknown_fields_are_listed_and_numbers_may_be_strings() -> None:
    spec = read_dsa(T32 | {"hidden_size": "64", "wibble": 3, "auto_map": {"a": "b"}})
    assert spec.hidden_size == 64
    assert spec.ignored == ("wibble",)
    assert any("wibble" in note for note in spec.notes)
    assert any("auto_map" in note for note in spec.notes)
    assert read_dsa(T32).ignored == ()


@pytest.mark.parametrize("config", [T32, TG])
def test_every_field_that_matters_is_missed_by_name(config: Config) -> None:
    optional = {"architectures", "attention_bias", "bos_token_id", "eos_token_id", "hidden_act"}
    optional |= {"moe_layer_freq", "num_key_value_heads", "num_nextn_predict_layers"}
    optional |= {"rope_scaling", "scoring_func", "tie_word_embeddings", "topk_method"}
    optional |= {"torch_dtype", "indexer_rope_interleave", "indexer_types"}
    for name in config.keys() - optional:
        with pytest.raises(CheckpointError, match=rf"\b{name}\b"):
            read_dsa(without(config, name))
        with pytest.raises(CheckpointError, match=rf"\b{name}\b"):
            read_dsa(config | {name: None})


FP8: Config = {"quant_method": "fp8", "weight_block_size": [128, 128]}

UNSUPPORTED: dict[str, Config] = {
    "model_type": {"model_type": "glm_moe_xyz"},
    "quantization_config": {"quantization_config": {"quant_method": "modelopt"}},
    "gptq": {"quantization_config": {"quant_method": "gptq"}},
    "weight_block_size is missing": {"quantization_config": {"quant_method": "fp8"}},
    r"weight_block_size \[64, 64\]": {"quantization_config": FP8 | {"weight_block_size": [64, 64]}},
    "activation_scheme 'static'": {"quantization_config": FP8 | {"activation_scheme": "static"}},
    "fmt 'e5m2'": {"quantization_config": FP8 | {"fmt": "e5m2"}},
    "scale_fmt 'e4m3'": {"quantization_config": FP8 | {"scale_fmt": "e4m3"}},
    "expert_dtype 'int4'": {"quantization_config": FP8 | {"expert_dtype": "int4"}},
    "hidden_act": {"hidden_act": "gelu"},
    "scoring_func": {"scoring_func": "softmax"},
    "topk_method": {"topk_method": "greedy"},
    "moe_layer_freq": {"moe_layer_freq": 2},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "moe_router_dtype": {"moe_router_dtype": "bfloat16"},
    "index_kpool": {"index_kpool": 4},
    "sliding_window": {"sliding_window": 128},
    "compress_ratios": {"compress_ratios": [0, 4, 128]},
    "swiglu_limit": {"swiglu_limit": 10},
    "num_key_value_heads": {"num_key_value_heads": 1},
    "num_nextn_predict_layers": {"num_nextn_predict_layers": 2},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "llama3": {"rope_scaling": {"type": "llama3"}},
    "short_factor": {"rope_scaling": YARN | {"short_factor": [1.0]}},
    "compress": {"rope_parameters": {"main": YARN, "compress": YARN}},
    "layer_types": {"layer_types": ["sliding_attention"] * 3},
    "mlp_layer_types": {"mlp_layer_types": ["hash_moe"] * 3},
    "shared": {"indexer_types": ["full", "shared", "full"]},
}


def test_what_config_says_of_quantised_weights_is_read() -> None:
    assert read_dsa(T32).quantization is None
    plain = read_dsa(T32 | {"quantization_config": FP8}).quantization
    assert plain is not None
    assert (plain.scale_fmt, plain.expert_dtype, plain.excluded) == ("float", None, ())
    given = FP8 | {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
        "modules_to_not_convert": ["lm_head", "model.layers.6", "mlp.gate"],
    }
    spec = read_dsa(T32 | {"quantization_config": given}).quantization
    assert spec is not None and (spec.scale_fmt, spec.expert_dtype) == ("ue8m0", "fp4")
    assert spec.excludes("lm_head") and spec.excludes("model.layers.6.mlp.up_proj")
    assert spec.excludes("model.layers.1.mlp.gate")
    assert not spec.excludes("model.layers.61.mlp.up_proj")
    assert not spec.excludes("model.layers.1.mlp.gate_proj")


@pytest.mark.parametrize(
    "changes", [{"bits": 8}, {"modules_to_not_convert": [3]}, {"modules_to_not_convert": "lm_head"}]
)
def test_what_is_not_known_of_quantised_weights_is_refused(changes: Config) -> None:
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        read_dsa(T32 | {"quantization_config": FP8 | changes})


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_maths_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        read_dsa(T32 | UNSUPPORTED[name])


def test_an_unknown_family_is_told_which_ones_there_are() -> None:
    with pytest.raises(UnsupportedModel, match=r"glm_moe_xyz.*deepseek_v32.*glm_moe_dsa"):
        read_dsa(T32 | {"model_type": "glm_moe_xyz"})


CONTRADICTIONS: dict[str, Config] = {
    "rope_theta": {"rope_parameters": {"rope_theta": 8e6}},
    "factor": {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 8}},
    "index_head_dim": {"index_head_dim": 4},
    "qk_rope_head_dim": {"qk_rope_head_dim": 7},
    "n_group": {"n_group": 3},
    "topk_group": {"topk_group": 3},
    "num_experts_per_tok": {"num_experts_per_tok": 3},
    "hidden_size": {"hidden_size": 64.5},
    "vocab_size": {"vocab_size": "many"},
    "num_hidden_layers": {"num_hidden_layers": 0},
    "norm_topk_prob": {"norm_topk_prob": 1},
    "rms_norm_eps": {"rms_norm_eps": float("nan")},
    "mlp_layer_types": {"mlp_layer_types": ["dense"]},
    "eos_token_id": {"eos_token_id": [1, -1]},
    "eos_token_id must be below": {"eos_token_id": [1, 264]},
    "eos_token_id lists 9": {"eos_token_id": list(range(9))},
    "bos_token_id": {"bos_token_id": 264},
    "rope_theta must": {"rope_theta": 0},
    "rms_norm_eps must": {"rms_norm_eps": -1e-6},
    "factor must": {"rope_scaling": YARN | {"factor": 0}},
    "beta_fast": {"rope_scaling": YARN | {"beta_fast": 0}},
    "beta_slow": {"rope_scaling": YARN | {"beta_slow": -1}},
    "mscale_all_dim": {"rope_scaling": YARN | {"mscale_all_dim": -10}},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_and_wrong_kinds_are_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        read_dsa(T32 | CONTRADICTIONS[name])


WHOLE_NUMBERS = [name for name, value in T32.items() if type(value) is int]


@pytest.mark.parametrize("name", [*WHOLE_NUMBERS, "rope_theta", "rms_norm_eps"])
@pytest.mark.parametrize(
    "value", [10**400, -(10**400), float("inf"), "1e999", [[1]], {"a": 1}, True], ids=range(7)
)
def test_no_value_of_a_number_is_taken_that_could_not_be_meant(name: str, value: object) -> None:
    if name == "moe_layer_freq" and value is True:
        pytest.skip("True equals the one value that is supported")
    with pytest.raises(CheckpointError, match=name):
        read_dsa(T32 | {name: value})


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_sizes_far_above_any_models_are_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        read_dsa(T32 | {name: 10**12})


def test_no_more_keys_are_picked_than_there_are_positions() -> None:
    spec = read_dsa(T32 | {"index_topk": 1 << 20})
    assert spec.topk == spec.max_positions == 128


def test_ids_of_generation_config_are_checked_too() -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id.*264"):
        read_dsa(T32, {"eos_token_id": 9999})


def test_the_first_layer_must_pick_and_every_layer_must_be_described() -> None:
    with pytest.raises(CheckpointError, match="layer 0"):
        read_dsa(TG | {"indexer_types": ["shared"] + ["full"] * 5})
    with pytest.raises(CheckpointError, match="indexer_types: 3 entries, 6 layers"):
        read_dsa(TG | {"indexer_types": ["full"] * 3})
    with pytest.raises(UnsupportedModel, match="sometimes"):
        read_dsa(TG | {"indexer_types": ["full", "sometimes"] * 3})


def test_a_spec_is_hashable_data_that_survives_json() -> None:
    assert read_dsa(json.loads(json.dumps(TG))) == read_dsa(TG)
    assert len({read_dsa(TG), read_dsa(TG), read_dsa(T32)}) == 2
