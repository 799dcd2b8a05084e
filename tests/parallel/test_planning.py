# SPDX-License-Identifier: Apache-2.0
"""`freewheel plan`: what cards would hold, by the very code that would load it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freewheel.cli.plan import plan_lines
from freewheel.errors import ConfigError
from freewheel.models import open_folder
from freewheel.models.load import load_folder
from freewheel.runtime import plan_gpus
from freewheel.runtime.planning import GpuPlan
from freewheel.spec.mesh import Mesh

ROOT = Path(__file__).parents[2]
CHECKPOINTS = ROOT / "src" / "freewheel" / "checkpoints"


def planned(name: str, gpus: int, ep: bool = False, dp: int = 1) -> GpuPlan:
    model = str(ROOT / "benchmarks" / "configs" / f"{name}.json")
    return plan_gpus(model, gpus, batches=(1, 8, 32), context=8192, speculate=3, dp=dp, ep=ep)


@pytest.mark.parametrize("name", ["demo", "demo-v4"])
@pytest.mark.parametrize(("ranks", "dp"), [(1, 1), (2, 1), (2, 2)])
def test_planned_weights_are_those_that_a_rank_loads(name: str, ranks: int, dp: int) -> None:
    found = plan_gpus(name, ranks, batches=(1,), context=256, speculate=3, dp=dp)
    folder = open_folder(CHECKPOINTS / name)
    loaded = load_folder(folder, torch.bfloat16, positions=256, mesh=Mesh(ranks // dp, dp=dp))
    held = sum(t.nbytes for t in loaded.weights)
    tables = {"demo": 1, "demo-v4": 2}[name] * 256 * 64 * 4  # of angles, which no file holds
    assert found.weight_bytes == held - tables


@pytest.mark.parametrize(
    ("name", "billions"), [("v32", 687), ("glm52", 757), ("v4flash", 161), ("v4pro", 869)]
)
def test_the_large_models_are_too_large_for_one_card(name: str, billions: int) -> None:
    """In 10^9 bytes, by calculation from their dimensions and the precisions of their weights."""
    found = planned(name, 1)
    assert found.weight_bytes / 1e9 == pytest.approx(billions, rel=0.01)
    assert not found.fits
    assert plan_lines(found, 1, 141.0)[-1].startswith("does not fit")


@pytest.mark.parametrize(("name", "has"), [("v32", False), ("glm52", False), ("v4flash", True)])
def test_what_a_request_takes_besides_its_tokens_is_said_where_it_takes_any(
    name: str, has: bool
) -> None:
    lines = plan_lines(planned(name, 8), 8, 141.0)
    assert any(line.startswith("cache per request") for line in lines) is has
    assert not any(" 0.0 MB" in line for line in lines)


def test_more_cards_hold_more_tokens_and_read_less_each() -> None:
    eight, sixteen = planned("v32", 8), planned("v32", 16)
    assert eight.fits and sixteen.kv_tokens > 2 * eight.kv_tokens
    for few, many in zip(eight.rounds, sixteen.rounds, strict=True):
        assert few.floor_ms / 2 < many.floor_ms < few.floor_ms  # what is replicated does not shrink
    assert planned("v32", 8, ep=True).weight_bytes == pytest.approx(eight.weight_bytes, rel=1e-3)


def test_copies_hold_more_tokens_and_more_weights_each() -> None:
    shared, copies = planned("v32", 8), planned("v32", 8, ep=True, dp=8)
    assert copies.weight_bytes > shared.weight_bytes and copies.kv_tokens > 4 * shared.kv_tokens
    assert plan_lines(copies, 8, 141.0)[0].endswith("tp 1, dp 8, experts dealt out whole")
    assert all(one.exchange_ms > 0 for one in copies.rounds)
    with pytest.raises(ConfigError, match="dp: 3 copies cannot share 8 cards"):
        planned("v32", 8, dp=3)


@pytest.mark.parametrize(("gpus", "dp"), [(3, 1), (6, 2), (600, 1)])
def test_cards_that_cannot_share_a_model_are_told_by_the_option_that_was_given(
    gpus: int, dp: int
) -> None:
    with pytest.raises(ConfigError, match=rf"^gpus: {gpus} make tp {gpus // dp}, but .*"):
        planned("v32", gpus, dp=dp)


def test_cards_that_cannot_share_a_model_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"16 ranks cannot share the 8 groups of layers.0.attn"):
        planned("v4flash", 16)
    with pytest.raises(ConfigError, match="12 ranks cannot share"):
        planned("v32", 12)
