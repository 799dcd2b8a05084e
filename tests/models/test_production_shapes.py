# SPDX-License-Identifier: Apache-2.0
"""The published models at their real dimensions, traced on a device that has no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from freewheel import ops
from freewheel.models import RandomSource, load_model
from freewheel.nn import held_tensors
from freewheel.spec import read_model_spec
from freewheel.state import Arena, CachePool, StepView
from tests.fixtures.closed_form import T32, TG

DEEPSEEK_V32: dict[str, Any] = T32 | {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GLM_5: dict[str, Any] = DEEPSEEK_V32 | {
    "model_type": TG["model_type"],
    "hidden_size": 6144,
    "index_n_heads": 32,
    "index_topk_freq": 4,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "n_group": 1,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
BATCH, WIDTH, PAGE, COLUMNS = 2, 4, 64, 512
CONTEXT = PAGE * COLUMNS
DEVICE = "meta"


def fused_experts(layers: int) -> frozenset[str]:
    return frozenset(f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(layers + 1))


def view_of(device: str) -> StepView:
    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    tables, rows, lens = ints(1, 5, COLUMNS), ints(BATCH), ints(BATCH)
    tokens = ints(5, CONTEXT)
    opened = ops.open_step(tokens, tables, rows, lens, lens, WIDTH, 0, (PAGE,))
    return StepView(rows, *opened, tables)


@pytest.mark.parametrize(("config", "billions"), [(DEEPSEEK_V32, (671, 690)), (GLM_5, (740, 765))])
def test_published_dimensions_trace_without_memory(config, billions: tuple[int, int]) -> None:
    spec = read_model_spec(config)
    with FakeTensorMode(), torch.inference_mode():
        source = RandomSource(0, torch.bfloat16, DEVICE, fused_experts(spec.layers))
        model, head = load_model(spec, source, positions=CONTEXT)
        weights = held_tensors(model, head)
        groups = model.cache_groups(PAGE, "bfloat16")
        cache = CachePool(Arena(DEVICE), groups, (3,))
        view = view_of(DEVICE)
        hidden = model.forward(view, cache)
        assert head is not None
        drafted = head.forward(view, cache, hidden)
        for states in (hidden, drafted):
            assert states.shape == (BATCH, WIDTH, spec.hidden_size)
            assert states.dtype == torch.bfloat16 and states.device.type == DEVICE
        logits = head.logits(drafted)
        assert logits.shape == (BATCH, WIDTH, spec.vocab_size)
        assert logits.dtype == torch.float32
    count = sum(weight.numel() for weight in weights) / 1e9
    assert billions[0] < count < billions[1]
    assert groups[0].fields[0].row_bytes == 2 * (512 + 64)
