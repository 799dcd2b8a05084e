# SPDX-License-Identifier: Apache-2.0
"""The formulas against transformers' modules of both families, one op at a time."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel import ops
from tests.ops.cases import draw, generator, ints

deepseek = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
glm = pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")

ROPE, LENGTH = 8, 40
INDEX_HEADS = 16  # so many that no key scores exactly 0: transformers leaves the order of ties open
CONFIG = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": 16,
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": 16,
    "index_topk": 7,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
FAMILIES = pytest.mark.parametrize(
    ("module", "name"),
    [(deepseek, "DeepseekV32"), (glm, "GlmMoeDsa")],
    ids=["deepseek_v32", "glm_moe_dsa"],
)


def config(module: ModuleType, name: str) -> Any:
    return getattr(module, f"{name}Config")(**CONFIG)


def filled(layer: torch.nn.Module) -> Any:
    """Random weights; a new layer's are zeros or uninitialised."""
    with torch.no_grad():
        for nth, (_, parameter) in enumerate(sorted(layer.state_dict().items())):
            parameter.copy_(draw(nth, *parameter.shape) * 0.3)
    return layer


def angles(module: ModuleType, name: str) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Our table [LENGTH, ROPE], and transformers' (cos, sin) [1, LENGTH, ROPE]."""
    rotary = getattr(module, f"{name}RotaryEmbedding")(config(module, name))
    cos, sin = rotary(torch.zeros(1), torch.arange(LENGTH)[None])
    return torch.cat((cos[0, :, : ROPE // 2], sin[0, :, : ROPE // 2]), dim=-1), (cos, sin)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@FAMILIES
def test_the_rotary_embedding_of_queries_and_keys_is_theirs(module: ModuleType, name: str) -> None:
    table, (cos, sin) = angles(module, name)
    query, positions = draw(1, 1, LENGTH, 4, ROPE), torch.arange(LENGTH).int()[None]
    theirs = module.apply_rotary_pos_emb_interleave(query, query, cos, sin, unsqueeze_dim=2)[0]
    assert_near(ops.rope(query, positions, table, 0, True), theirs)


def test_the_half_split_layout_is_theirs() -> None:
    table, (cos, sin) = angles(deepseek, "DeepseekV32")
    query, positions = draw(1, 1, LENGTH, 4, ROPE), torch.arange(LENGTH).int()[None]
    theirs = deepseek.apply_rotary_pos_emb(query, query, cos, sin, unsqueeze_dim=2)[0]
    assert_near(ops.rope(query, positions, table, 0, False), theirs)


@FAMILIES
def test_norms_are_theirs(module: ModuleType, name: str) -> None:
    norm = filled(getattr(module, f"{name}RMSNorm")(32, eps=1e-6))
    x = draw(3, 2, 5, 32)
    assert_near(ops.rms_norm(x, norm.weight.detach(), 1e-6), norm(x).detach())


@FAMILIES
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_routing_is_theirs(
    module: ModuleType, name: str, normalise: bool, groups: tuple[int, int]
) -> None:
    router = filled(getattr(module, f"{name}TopkRouter")(config(module, name)))
    router.norm_topk_prob = normalise
    router.num_group, router.topk_group = groups
    with torch.no_grad():
        logits, their_weights, their_ids = router(draw(1, 50, 32))
        bias = router.e_score_correction_bias
        weights, ids = ops.route(logits, bias, *groups, 3, normalise, 2.5)
    order, their_order = ids.long().argsort(-1), their_ids.argsort(-1)
    assert torch.equal(ids.long().gather(-1, order), their_ids.gather(-1, their_order))
    assert_near(weights.gather(-1, order), their_weights.gather(-1, their_order))


@FAMILIES
def test_experts_are_theirs(module: ModuleType, name: str) -> None:
    own = config(module, name)
    own._experts_implementation = "eager"
    experts = filled(getattr(module, f"{name}Experts")(own))
    x, weights = draw(1, 50, 32), draw(2, 50, 3).abs()
    ids = torch.rand((50, 8), generator=generator(0)).argsort(-1)[:, :3]
    with torch.no_grad():
        theirs = experts(x, ids, weights)
        gate_up, down = experts.gate_up_proj, experts.down_proj
        ours = ops.grouped_experts(x[None], gate_up, down, ids.int()[None], weights[None])
    assert_near(ours[0], theirs)


@FAMILIES
def test_the_indexer_picks_what_theirs_picks(module: ModuleType, name: str) -> None:
    """Keys go through a cache of pages in reverse order; every query of a causal prompt."""
    indexer = filled(getattr(module, f"{name}Indexer")(config(module, name), 0))
    table, turns = angles(module, name)
    x, q_latent = draw(90, 1, LENGTH, 32), draw(91, 1, LENGTH, 24)
    causal = torch.ones(1, LENGTH, LENGTH, dtype=torch.bool).tril()
    positions = torch.arange(LENGTH).int()[None]
    with torch.no_grad():
        theirs = indexer(x, q_latent, turns, causal, positions)
        picked = _pick(indexer, x, q_latent, positions, table, interleaved=module is glm)
    for t in range(LENGTH):
        wanted = sorted(p for p in theirs[0, t].tolist() if p <= t)
        assert [p for p in picked[t] if p >= 0] == wanted


def _pick(
    indexer: Any, x: Tensor, q_latent: Tensor, positions: Tensor, table: Tensor, interleaved: bool
) -> list[list[int]]:
    """Selected positions of each query, by our ops; -1 padded."""
    size, columns = 4, LENGTH // 4
    pages = torch.arange(columns, 0, -1).int()[None]
    place = positions.long()
    slots = pages[0].long()[place // size] * size + place % size
    keys, norm = torch.zeros(columns + 1, size, 16), indexer.k_norm
    ops.store_index_key(
        keys, indexer.wk(x), norm.weight, norm.bias, norm.eps, positions, table, interleaved, slots
    )
    query = indexer.wq_b(q_latent).unflatten(-1, (INDEX_HEADS, 16))
    query = ops.rope(query, positions, table, 0, interleaved)
    gates = indexer.weights_proj(x) * (INDEX_HEADS * 16) ** -0.5
    kv_lens, rows = positions + 1, ints(0)
    logits = ops.index_logits(query, gates, keys, pages, rows, kv_lens)
    selected = ops.topk_slots(logits, pages, rows, kv_lens, size, 7)[0]
    by_slot = {slot: t for t, slot in enumerate(slots[0].tolist())} | {-1: -1}
    return [[by_slot[slot] for slot in query_slots] for query_slots in selected.tolist()]


@FAMILIES
def test_absorbed_attention_over_all_keys_is_theirs(module: ModuleType, name: str) -> None:
    """With fewer keys than index_topk: their expanded attention equals ours over the latents."""
    length = CONFIG["index_topk"]
    own = config(module, name)
    own._attn_implementation = "eager"
    layer = filled(getattr(module, f"{name}Attention")(own, 0))
    table, (cos, sin) = angles(module, name)
    x = draw(90, 1, length, 32)
    causal = torch.full((1, 1, length, length), torch.finfo(torch.float32).min).triu(1)
    turns = (cos[:, :length], sin[:, :length])
    with torch.no_grad():
        theirs = layer(x, position_embeddings=turns, attention_mask=causal)[0]
        assert_near(_attend(layer, x, table), theirs)


def _attend(layer: Any, x: Tensor, table: Tensor) -> Tensor:
    length, rank, nope = x.shape[1], CONFIG["kv_lora_rank"], CONFIG["qk_nope_head_dim"]
    positions = torch.arange(length).int()[None]
    latent, norm = torch.zeros(2, 8, rank + ROPE), layer.kv_a_layernorm
    ops.store_latent(
        latent,
        layer.kv_a_proj_with_mqa(x),
        norm.weight,
        norm.variance_epsilon,
        positions,
        table,
        True,
        positions.long() + 8,
    )
    query = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))).unflatten(-1, (4, -1))
    key_up, value_up = layer.kv_b_proj.weight.view(4, -1, rank).split((nope, 16), dim=1)
    absorbed = torch.einsum("bwhn,hnc->bwhc", query[..., :nope], key_up)
    turned = ops.rope(query[..., nope:], positions, table, 0, True)
    slots = torch.arange(length).expand(length, length).add(8)
    slots = slots.masked_fill(torch.ones(length, length).triu(1).bool(), -1).int()[None]
    query = torch.cat((absorbed, turned), dim=-1)
    mixed = ops.sparse_mla(query, latent, slots, layer.scaling, rank)
    values = torch.einsum("bwhc,hvc->bwhv", mixed, value_up)
    return layer.o_proj(values.flatten(2))
