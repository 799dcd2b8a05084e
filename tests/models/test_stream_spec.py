# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's config.json as data: both layouts mean the same; what is not V4 is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freewheel.errors import CheckpointError, ConfigError, UnsupportedModel
from freewheel.nn import entry_groups, rope_table
from freewheel.spec import LayerKind, read_model_spec
from freewheel.spec.compressed import CompressedSpec
from freewheel.spec.storage import PlainStorage
from tests.fixtures.compressed import KINDS, RATES, T4

Config = dict[str, Any]
YARN = T4["rope_scaling"]


def read(changes: Config) -> CompressedSpec:
    spec = read_model_spec(T4 | changes)
    assert isinstance(spec, CompressedSpec)
    return spec


def tables(spec: CompressedSpec) -> tuple[torch.Tensor, torch.Tensor]:
    device = torch.device("cpu")
    return rope_table(spec.rope, 100, device), rope_table(spec.entry_rope, 100, device)


NESTED: Config = {
    "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "compress": YARN
    | {
        "rope_type": "yarn",
        "rope_theta": 160000.0,
        "partial_rotary_factor": 0.25,
        "attention_factor": 1.0,
    },
}
SPELLINGS: dict[str, Config] = {
    "nested": {"rope_scaling": None, "rope_parameters": NESTED},
    "nested-alone": {
        "rope_scaling": None,
        "rope_parameters": NESTED,
        "rope_theta": None,
        "compress_rope_theta": None,
    },
    "flat-parameters": {"rope_scaling": None, "rope_parameters": YARN},
    "rope-type": {"rope_scaling": {**YARN, "type": None, "rope_type": "yarn"}},
    "strings": {"rope_scaling": YARN | {"factor": "16", "beta_fast": "32.0"}},
    "share": {"qk_rope_head_dim": None, "partial_rotary_factor": 0.25},
    "types-alone": {"compress_ratios": None},
    "ratios-alone": {"layer_types": None},
    "scalar-rates": {
        "compress_rates": None,
        "compress_rate_csa": 4,
        "compress_rate_hca": 8,
    },
    "hash-list": {"num_hash_layers": None, "mlp_layer_types": ["hash_moe", *["moe"] * 4]},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_means_the_same(name: str) -> None:
    one, two = read({}), read(SPELLINGS[name])
    assert one == two
    assert all(torch.equal(a, b) for a, b in zip(tables(one), tables(two), strict=True))


def test_only_layers_with_entries_are_stretched_and_no_table_is_scaled() -> None:
    spec = read({})
    assert spec.rope.yarn is None and spec.rope.theta == 10000
    assert spec.entry_rope.yarn is not None and spec.entry_rope.theta == 160000
    assert spec.entry_rope.yarn.cos_sin_factor == 1.0
    plain, stretched = tables(spec)
    for table in (plain, stretched):
        cos, sin = table.chunk(2, dim=-1)
        assert torch.allclose(cos**2 + sin**2, torch.ones_like(cos))
    assert not torch.allclose(plain, stretched)


def test_kinds_follow_the_list_and_a_bare_list_means_the_published_ratios() -> None:
    spec = read({})
    assert [KINDS[r] for r in (0, 4, 8, 4, 0)] == list(spec.kinds)
    published = read(
        {"compress_rates": None, "layer_types": None, "compress_ratios": [0, 128, 4, 4, 0, 0]}
    )
    assert published.compression.sparse_ratio == 4 and published.compression.heavy_ratio == 128
    assert published.layers_of(LayerKind.HEAVY) == (1,)
    assert published.page_multiple == 128 and spec.page_multiple == 8


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"compress_ratios": [0, 1, 8, 4, 0, 0], "layer_types": None}, "compress_ratios holds 1"),
        ({"compress_ratios": [0, 2, 8, 4, 0, 0], "layer_types": None}, "compress_ratios holds 2"),
        ({"compress_ratios": [0, 4, 8, 4, 0, 4]}, "multi-token-prediction layer a ratio of 4"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types holds 'full_attention'"),
        ({"mlp_layer_types": ["dense"] * 5}, "mlp_layer_types holds 'dense'"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"n_group": 2}, "n_group"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"expert_dtype": "int4"}, "expert_dtype"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
        ({"rope_scaling": YARN | {"attention_factor": 1.277}}, "attention_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type 'linear'"),
        ({"rope_scaling": YARN | {"llama": 1}}, "llama"),
        ({"compress_rates": RATES | {"linear_attention": 2}}, "linear_attention"),
        ({"kv_source_layer_ids": [0]}, "kv_source_layer_ids"),
        ({"index_source_layer_ids": [0]}, "index_source_layer_ids"),
        ({"candidate_num": 4}, "candidate_num"),
        ({"engram_dim": 4}, "engram_dim"),
        ({"vision_config": {"a": 1}}, "vision_config"),
        ({"hc_pre_from_prev_sublayer": True}, "hc_pre_from_prev_sublayer"),
        ({"q_head_norm": True}, "q_head_norm"),
        ({"dspark_block_size": 8}, "dspark_block_size"),
    ],
)
def test_what_is_not_this_model_is_refused_by_name(changes: Config, field: str) -> None:
    with pytest.raises(UnsupportedModel, match=field):
        read(changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"compress_ratios": None, "layer_types": None}, "compress_ratios"),
        ({"compress_ratios": [4, 4, 8, 4, 0, 0]}, "disagree"),
        ({"compress_ratios": [0, 4], "layer_types": None}, "compress_ratios: 2 entries"),
        ({"num_hash_layers": None}, "num_hash_layers"),
        ({"rope_theta": None}, "rope_theta"),
        ({"compress_rope_theta": None}, "compress_rope_theta"),
        ({"rope_parameters": NESTED, "rope_theta": 5}, "rope_theta is 5.0"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"index_head_dim": 4}, "index_head_dim"),
        ({"o_groups": 3}, "o_groups"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"swiglu_limit": None}, "swiglu_limit"),
        ({"hc_mult": 0}, "hc_mult"),
        ({"sliding_window": "wide"}, "sliding_window"),
    ],
)
def test_what_is_missing_or_contradictory_is_named(changes: Config, field: str) -> None:
    with pytest.raises(CheckpointError, match=field):
        read(changes)


def test_groups_are_ordinary_pages_that_keep_what_a_round_may_read() -> None:
    groups = {
        group.name: group
        for group in entry_groups(read({}), 64, "float32", PlainStorage("bfloat16"), mtp=True)
    }
    kept = {name: group.retention for name, group in groups.items()}
    assert kept == {
        "window": 8,
        "compressed4": None,
        "tail4": 8,
        "compressed8": None,
        "tail8": 8,
    }
    assert groups["window"].fields[0].layers == (0, 1, 2, 3, 4, 5)
    assert [f.name for f in groups["compressed4"].fields] == ["entry", "index_entry"]
    assert {f.dtype for name in ("tail4", "tail8") for f in groups[name].fields} == {"float32"}
    assert groups["compressed8"].page_rows == 8 and groups["compressed4"].page_rows == 16
    with pytest.raises(ConfigError, match="multiple of 8"):
        entry_groups(read({}), 20, "float32", PlainStorage("bfloat16"), mtp=False)


def test_a_model_without_entries_has_its_window_alone() -> None:
    spec = read({"compress_ratios": [0] * 6, "layer_types": None})
    assert [
        group.name
        for group in entry_groups(spec, 20, "float32", PlainStorage("float32"), mtp=False)
    ] == ["window"]
