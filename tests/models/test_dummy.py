# SPDX-License-Identifier: Apache-2.0
"""Random weights from a config.json alone: complete, reproducible, and evenly routed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from freewheel import ops
from freewheel.errors import CheckpointError
from freewheel.models import has_mtp_weights, load_dummy, open_dummy
from freewheel.models.dummy import EXPERT_LAYERS, DummySource
from tests.fixtures.closed_form import T32

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(T32), encoding="utf-8")
    return file


def test_a_config_alone_makes_a_whole_model_twice_the_same(config: Path) -> None:
    for path in (config, config.parent):
        folder = open_dummy(path)
        assert has_mtp_weights(folder)
        one, two = (
            load_dummy(folder, torch.float32, device="cpu", positions=64, mtp=True)
            for _ in range(2)
        )
        assert one.draft_head is not None and len(one.weights) == len(two.weights) > 20
        assert all(torch.equal(a, b) for a, b in zip(one.weights, two.weights, strict=True))
        assert all(bool(w.isfinite().all()) for w in one.weights)


@pytest.mark.parametrize("name", ["v32_tp8shard", "glm52_tp8shard"])
def test_the_shard_configs_are_whole_models(name: str) -> None:
    folder = open_dummy(CONFIGS / f"{name}.json")
    assert folder.spec.layers in (61, 78)
    assert any("alone was read" in note for note in folder.notes)


def test_experts_of_distant_layers_share_their_memory() -> None:
    source = DummySource(torch.float32, "cpu")
    layers = [
        source.tensor(f"model.layers.{n}.mlp.experts.down_proj", (4, 8, 2))
        for n in range(EXPERT_LAYERS + 1)
    ]
    assert layers[0] is layers[EXPERT_LAYERS]
    assert not torch.equal(layers[0], layers[1])
    assert len(source.wanted) == EXPERT_LAYERS + 1


def test_a_random_router_spreads_tokens_over_its_experts() -> None:
    """256 experts in 8 groups, as DeepSeek-V3.2's; 8 of them for each of 4096 tokens."""
    source = DummySource(torch.float32, "cpu")
    router = source.tensor("model.layers.5.mlp.gate.weight", (256, 512))
    bias = source.tensor("model.layers.5.mlp.gate.e_score_correction_bias", (256,))
    hidden = torch.randn(4096, 512, generator=torch.Generator().manual_seed(0))
    _, ids = ops.route(hidden @ router.T, bias, 8, 4, 8, True, 2.5)
    share = torch.bincount(ids.flatten().long(), minlength=256) / (4096 * 8 / 256)
    assert float(share.min()) > 0.5 and float(share.max()) < 1.6


def test_no_config_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_dummy(tmp_path)
