# SPDX-License-Identifier: Apache-2.0
"""The published models at their real dimensions, traced on a device that has no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from freewheel import ops
from freewheel.models import RandomSource, load_model
from freewheel.nn import entry_groups, held_tensors
from freewheel.spec import CompressedSpec, read_model_spec
from freewheel.spec.storage import PlainStorage
from freewheel.state import Arena, CachePool, SequenceState, StepView, open_step
from tests.fixtures.closed_form import T32, TG
from tests.fixtures.compressed import T4

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
DEEPSEEK_V4_FLASH: dict[str, Any] = T4 | {
    "compress_rates": None,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "head_dim": 512,
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "layer_types": None,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "rope_scaling": T4["rope_scaling"] | {"original_max_position_embeddings": 65536},
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "vocab_size": 129280,
}
BATCH, WIDTH, PAGE, COLUMNS = 2, 4, 64, 512
CONTEXT = PAGE * COLUMNS
DEVICE = "meta"


@pytest.mark.parametrize("width", [1, 4, 300])
def test_deepseek_v4_flash_traces_without_memory(width: int) -> None:
    """43 layers on four streams: a decoding, a verifying and a prompt's rectangle."""
    spec = read_model_spec(DEEPSEEK_V4_FLASH)
    assert isinstance(spec, CompressedSpec)
    names = [*(f"layers.{i}" for i in range(spec.layers)), "mtp.0"]
    fused = frozenset(f"{name}.ffn.experts.gate_up_proj" for name in names)
    with FakeTensorMode(), torch.inference_mode():
        source = RandomSource(0, torch.bfloat16, DEVICE, fused)
        model, head = load_model(spec, source, positions=CONTEXT)
        weights = held_tensors(model, head)
        arena = Arena(DEVICE)
        groups = model.cache_groups(256, "bfloat16")
        cache = CachePool(arena, groups, (3,) * len(groups))
        state = SequenceState.build(arena, 5, CONTEXT, groups)
        rows = torch.zeros(BATCH, dtype=torch.int32, device=DEVICE)
        view = open_step(state, rows, rows, rows, width)
        hidden = model.forward(view, cache)
        assert head is not None
        drafted = head.forward(view, cache, hidden)
        for streams in (hidden, drafted):
            assert streams.shape == (BATCH, width, 4 * 4096)
            assert streams.dtype == torch.bfloat16 and streams.device.type == DEVICE
        logits = model.logits(hidden[:, -1:])
        assert logits.shape == (BATCH, 1, spec.vocab_size) and logits.dtype == torch.float32
    count = sum(weight.numel() for weight in weights) / 1e9
    assert 280 < count < 300


def test_deepseek_v4_flash_stores_what_its_format_says() -> None:
    """64 and 2 entries on a page of 256 tokens; bytes of a token, by group."""
    spec = read_model_spec(DEEPSEEK_V4_FLASH)
    assert isinstance(spec, CompressedSpec)
    groups = {
        group.name: group
        for group in entry_groups(spec, 256, "float32", PlainStorage("bfloat16"), mtp=True)
    }
    assert groups["compressed4"].page_rows == 64 and groups["compressed128"].page_rows == 2
    assert {n: g.retention for n, g in groups.items()} == {
        "window": 128,
        "compressed4": None,
        "tail4": 8,
        "compressed128": None,
        "tail128": 128,
    }
    per_token = {name: group.page_bytes / group.page_size for name, group in groups.items()}
    assert per_token == {
        "window": 44 * 512 * 2,
        "compressed4": 21 * (512 + 128) * 2 / 4,
        "tail4": 21 * 4 * (512 + 128) * 4,
        "compressed128": 20 * 512 * 2 / 128,
        "tail128": 20 * 2 * 512 * 4,
    }


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
