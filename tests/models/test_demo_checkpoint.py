# SPDX-License-Identifier: Apache-2.0
"""The shipped checkpoints are whole: manifest, card, tensors and special tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from freewheel.config import SHIPPED_MODELS, find_model

FOLDER = find_model("demo")
RECORDS = Path(__file__).parents[2] / "train" / "record"
RECORD = {"demo": RECORDS, "demo-v4": RECORDS / "demo-v4"}
CONFIG = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
SPECIALS = {
    "<｜begin▁of▁sentence｜>": 0,
    "<｜end▁of▁sentence｜>": 1,
    "<｜▁pad▁｜>": 2,
    "<｜User｜>": 3,
    "<｜Assistant｜>": 4,
    "<think>": 5,
    "</think>": 6,
}


def _attention_shapes(prefix: str) -> dict[str, tuple[int, ...]]:
    c, p = CONFIG, f"{prefix}.self_attn"
    hidden, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
    return {
        f"{p}.q_a_proj.weight": (c["q_lora_rank"], hidden),
        f"{p}.q_a_layernorm.weight": (c["q_lora_rank"],),
        f"{p}.q_b_proj.weight": (heads * (nope + rope), c["q_lora_rank"]),
        f"{p}.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        f"{p}.kv_a_layernorm.weight": (latent,),
        f"{p}.kv_b_proj.weight": (heads * (nope + value), latent),
        f"{p}.o_proj.weight": (hidden, heads * value),
        f"{p}.indexer.wq_b.weight": (index_heads * index_dim, c["q_lora_rank"]),
        f"{p}.indexer.wk.weight": (index_dim, hidden),
        f"{p}.indexer.k_norm.weight": (index_dim,),
        f"{p}.indexer.k_norm.bias": (index_dim,),
        f"{p}.indexer.weights_proj.weight": (index_heads, hidden),
    }


def _mlp_shapes(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    hidden = CONFIG["hidden_size"]
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    c, prefix = CONFIG, f"model.layers.{layer}"
    hidden, experts = c["hidden_size"], c["n_routed_experts"]
    shapes = {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        **_attention_shapes(prefix),
    }
    if layer < c["first_k_dense_replace"]:
        return {**shapes, **_mlp_shapes(f"{prefix}.mlp", c["intermediate_size"])}
    shapes[f"{prefix}.mlp.gate.weight"] = (experts, hidden)
    shapes[f"{prefix}.mlp.gate.e_score_correction_bias"] = (experts,)
    inner = c["moe_intermediate_size"]
    for e in range(experts):
        shapes |= _mlp_shapes(f"{prefix}.mlp.experts.{e}", inner)
    return shapes | _mlp_shapes(f"{prefix}.mlp.shared_experts", inner * c["n_shared_experts"])


def expected_shapes() -> dict[str, tuple[int, ...]]:
    hidden, vocab, layers = (
        CONFIG["hidden_size"],
        CONFIG["vocab_size"],
        CONFIG["num_hidden_layers"],
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(layers + CONFIG["num_nextn_predict_layers"]):
        shapes |= _layer_shapes(layer)
    mtp = f"model.layers.{layers}"
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        shapes[f"{mtp}.{norm}.weight"] = (hidden,)
    shapes[f"{mtp}.eh_proj.weight"] = (hidden, 2 * hidden)
    return shapes


@pytest.fixture(params=SHIPPED_MODELS)
def folder(request: pytest.FixtureRequest) -> Path:
    return find_model(request.param)


def test_every_file_matches_the_sha256_manifest(folder: Path) -> None:
    lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    present = {p.name for p in folder.iterdir() if p.is_file()} - {"SHA256SUMS"}
    assert set(sums) == present
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


def test_the_card_tells_the_figures_of_the_record(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    record = json.loads((RECORD[folder.name] / "figures.json").read_text(encoding="utf-8"))
    drafts = record["acceptance_depth_3"]
    assert {"prose", "copy", "json"} <= set(drafts)
    for kind, found in drafts.items():
        numbers = (found["prompts"], found["tokens_per_round"], *found["accepted_at"])
        assert f"| {kind} | {' | '.join(map(str, numbers))} |" in card


def test_prose_is_decoded_in_half_the_rounds(folder: Path) -> None:
    """The floor of 1.9 tokens a round that the demos were trained to reach."""
    record = json.loads((RECORD[folder.name] / "figures.json").read_text(encoding="utf-8"))
    assert record["acceptance_depth_3"]["prose"]["tokens_per_round"] > 1.9


def test_tensor_names_shapes_and_dtypes_follow_the_config() -> None:
    found: dict[str, tuple[int, ...]] = {}
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            tensor = file.get_tensor(name)
            found[name] = tuple(tensor.shape)
            bias = name.endswith("e_score_correction_bias")
            assert tensor.dtype == (torch.float32 if bias else torch.bfloat16), name
            assert bool(tensor.isfinite().all()), name
    assert found == expected_shapes()


def test_the_config_is_a_deepseek_v32_one_with_one_mtp_layer() -> None:
    assert CONFIG["model_type"] == "deepseek_v32"
    assert CONFIG["architectures"] == ["DeepseekV32ForCausalLM"]
    assert CONFIG["num_nextn_predict_layers"] == 1
    assert (CONFIG["index_topk"], CONFIG["kv_lora_rank"], CONFIG["index_head_dim"]) == (
        64,
        512,
        128,
    )


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_special_tokens_come_first(folder: Path, tokenizer: Tokenizer) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert {t: tokenizer.token_to_id(t) for t in SPECIALS} == SPECIALS
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert config["bos_token_id"] == 0
    assert config["eos_token_id"] == 1


def test_text_round_trips_behind_one_bos(tokenizer: Tokenizer) -> None:
    text = 'Emma was 21; "naïve" -- 7,305 → {"a": [1, 2]}\n\n\tend 🚀'
    ids = tokenizer.encode(text).ids
    assert ids[0] == 0
    assert 0 not in ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("4821", add_special_tokens=False).tokens
    assert tokens == ["4", "8", "2", "1"]
