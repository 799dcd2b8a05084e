# SPDX-License-Identifier: Apache-2.0
"""The shipped DeepSeek-V4 demo has the tensors of its config, in DeepSeek's names and dtypes."""

from __future__ import annotations

import json

import torch
from safetensors import safe_open

from freewheel.config import find_model

FOLDER = find_model("demo-v4")
CONFIG = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
HIDDEN, STREAMS = CONFIG["hidden_size"], CONFIG["hc_mult"]
WIDE = ("attn_sink", "ape", "gate.bias", "_fn", "_base", "_scale")
"""Endings of tensors in float32."""

Shapes = dict[str, tuple[int, ...]]


def _compressor(prefix: str, ratio: int, dim: int) -> Shapes:
    channels = 2 * dim if ratio == 4 else dim
    return {
        f"{prefix}.ape": (ratio, channels),
        f"{prefix}.wkv.weight": (channels, HIDDEN),
        f"{prefix}.wgate.weight": (channels, HIDDEN),
        f"{prefix}.norm.weight": (dim,),
    }


def _attention(prefix: str, ratio: int) -> Shapes:
    c, dim, latent = CONFIG, CONFIG["head_dim"], CONFIG["q_lora_rank"]
    heads, groups, rank = c["num_attention_heads"], c["o_groups"], c["o_lora_rank"]
    shapes: Shapes = {
        f"{prefix}.wq_a.weight": (latent, HIDDEN),
        f"{prefix}.q_norm.weight": (latent,),
        f"{prefix}.wq_b.weight": (heads * dim, latent),
        f"{prefix}.wkv.weight": (dim, HIDDEN),
        f"{prefix}.kv_norm.weight": (dim,),
        f"{prefix}.attn_sink": (heads,),
        f"{prefix}.wo_a.weight": (groups * rank, heads * dim // groups),
        f"{prefix}.wo_b.weight": (HIDDEN, groups * rank),
    }
    if ratio:
        shapes |= _compressor(f"{prefix}.compressor", ratio, dim)
    if ratio == 4:
        index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
        shapes |= {
            f"{prefix}.indexer.wq_b.weight": (index_heads * index_dim, latent),
            f"{prefix}.indexer.weights_proj.weight": (index_heads, HIDDEN),
            **_compressor(f"{prefix}.indexer.compressor", ratio, index_dim),
        }
    return shapes


def _mlp(prefix: str) -> Shapes:
    inner = CONFIG["moe_intermediate_size"]
    return {
        f"{prefix}.w1.weight": (inner, HIDDEN),
        f"{prefix}.w2.weight": (HIDDEN, inner),
        f"{prefix}.w3.weight": (inner, HIDDEN),
    }


def _hyper(prefix: str, count: int, scales: int) -> Shapes:
    return {
        f"{prefix}_fn": (count, STREAMS * HIDDEN),
        f"{prefix}_base": (count,),
        f"{prefix}_scale": (scales,),
    }


def _layer(prefix: str, ratio: int, *, hashed: bool) -> Shapes:
    experts, picked = CONFIG["n_routed_experts"], CONFIG["num_experts_per_tok"]
    shapes: Shapes = {
        f"{prefix}.attn_norm.weight": (HIDDEN,),
        f"{prefix}.ffn_norm.weight": (HIDDEN,),
        **_attention(f"{prefix}.attn", ratio),
        f"{prefix}.ffn.gate.weight": (experts, HIDDEN),
        **_mlp(f"{prefix}.ffn.shared_experts"),
    }
    for place in ("attn", "ffn"):
        shapes |= _hyper(f"{prefix}.hc_{place}", (2 + STREAMS) * STREAMS, 3)
    for e in range(experts):
        shapes |= _mlp(f"{prefix}.ffn.experts.{e}")
    if hashed:
        return shapes | {f"{prefix}.ffn.gate.tid2eid": (CONFIG["vocab_size"], picked)}
    return shapes | {f"{prefix}.ffn.gate.bias": (experts,)}


def expected_shapes() -> Shapes:
    vocab, count = CONFIG["vocab_size"], CONFIG["num_hidden_layers"]
    shapes: Shapes = {
        "embed.weight": (vocab, HIDDEN),
        "norm.weight": (HIDDEN,),
        "head.weight": (vocab, HIDDEN),
        **_hyper("hc_head", STREAMS, 1),
    }
    for i, ratio in enumerate(CONFIG["compress_ratios"][:count]):
        shapes |= _layer(f"layers.{i}", ratio, hashed=i < CONFIG["num_hash_layers"])
    shapes |= _layer("mtp.0", CONFIG["compress_ratios"][count], hashed=False)
    shapes |= _hyper("mtp.0.hc_head", STREAMS, 1)
    for name in ("enorm", "hnorm", "norm"):
        shapes[f"mtp.0.{name}.weight"] = (HIDDEN,)
    for name in ("e_proj", "h_proj"):
        shapes[f"mtp.0.{name}.weight"] = (HIDDEN, HIDDEN)
    return shapes


def test_tensor_names_shapes_and_dtypes_follow_the_config() -> None:
    found: Shapes = {}
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            tensor = file.get_tensor(name)
            found[name] = tuple(tensor.shape)
            if name.endswith("tid2eid"):
                assert tensor.dtype == torch.int64
                continue
            wide = name.endswith(WIDE)
            assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name
            assert bool(tensor.isfinite().all()), name
    assert found == expected_shapes()


def test_every_token_of_the_hashed_layer_has_two_different_experts() -> None:
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        picked = file.get_tensor("layers.0.ffn.gate.tid2eid")  # int64 [V, 2]
    assert bool((picked[:, 0] != picked[:, 1]).all())
    assert picked.unique().tolist() == list(range(CONFIG["n_routed_experts"]))


def test_the_config_is_a_deepseek_v4_one_with_every_kind_of_layer() -> None:
    assert CONFIG["architectures"] == ["DeepseekV4ForCausalLM"]
    assert CONFIG["num_nextn_predict_layers"] == CONFIG["num_hash_layers"] == 1
    assert CONFIG["compress_ratios"] == [128, 4, 128, 4, 0]
    assert (CONFIG["head_dim"], CONFIG["index_head_dim"], CONFIG["sliding_window"]) == (
        512,
        128,
        128,
    )
