# SPDX-License-Identifier: Apache-2.0
"""Headers at the published dimensions, of a few layers: every scale lies on its grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from freewheel.models import ModelFolder, StoredTensor
from freewheel.models.load import take_stock
from freewheel.nn import held_tensors
from freewheel.nn.linear import BlockLinear
from freewheel.spec import read_model_spec
from tests.fixtures.closed_form import Config, shapes
from tests.fixtures.compressed import stream_shapes
from tests.fixtures.released import FP8, UE8M0, base_kind, dsa_kind, stream_kind
from tests.models.test_production_shapes import DEEPSEEK_V4_FLASH, DEEPSEEK_V32, GLM_5

FILE = Path("model-00001-of-00001.safetensors")
BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I64": 8}

V32 = DEEPSEEK_V32 | {"num_hidden_layers": 4, "quantization_config": UE8M0}
GLM = GLM_5 | {
    "first_k_dense_replace": 2,
    "index_topk_freq": None,
    "indexer_types": ["full", "full", "shared"],
    "num_hidden_layers": 3,
    "quantization_config": FP8,
}
V4 = DEEPSEEK_V4_FLASH | {
    "compress_rates": None,
    "compress_ratios": [0, 4, 128, 0],
    "layer_types": None,
    "num_hidden_layers": 3,
    "quantization_config": UE8M0,
}


def headers(config: Config, kind: Callable[[str], str], stream: bool) -> ModelFolder:
    """A folder without files."""
    tensors: dict[str, StoredTensor] = {}
    for name, shape in (stream_shapes if stream else shapes)(config).items():
        for own, (stored, dtype) in _entries(name, shape, kind(name), stream).items():
            tensors[own] = StoredTensor(FILE, stored, dtype, 0, math.prod(stored) * BYTES[dtype])
    return ModelFolder(Path("folder"), read_model_spec(config), tensors, ())


def _entries(
    name: str, shape: tuple[int, ...], kind: str, stream: bool
) -> dict[str, tuple[tuple[int, ...], str]]:
    scale = f"{name.removesuffix('.weight')}.scale" if stream else f"{name}_scale_inv"
    if kind == "fp4":
        rows, columns = shape
        return {name: ((rows, columns // 2), "I8"), scale: ((rows, columns // 32), "F8_E8M0")}
    if kind.startswith("fp8"):
        grid = tuple(-(-size // 128) for size in shape)
        powers = stream and kind == "fp8"
        return {name: (shape, "F8_E4M3"), scale: (grid, "F8_E8M0" if powers else "F32")}
    return {name: (shape, {"bf16": "BF16", "f32": "F32", "i64": "I64"}[kind])}


@pytest.mark.parametrize(
    ("config", "kind", "stream"),
    [
        (V32, dsa_kind, False),
        (GLM, dsa_kind, False),
        (V4, stream_kind, True),
        (V4, base_kind, True),
    ],
    ids=["v32", "glm", "v4", "v4-base"],
)
def test_published_dimensions_are_held_as_they_are_stored(
    config: Config, kind: Callable[[str], str], stream: bool
) -> None:
    folder = headers(config, kind, stream)
    stock = take_stock(folder, torch.bfloat16, positions=16)
    assert stock.notes == () and stock.catalogue.repeated == []
    held = sum(t.nbytes for t in held_tensors(stock.model, stock.draft_head))
    stored = sum(t.size for t in folder.tensors.values())
    assert 0.99 < held / stored < 1.04  # what no quantised op takes, and wide gates


def test_the_projections_of_an_input_are_joined_at_published_dimensions() -> None:
    """Every part but the last ends with a block, so that one grid of scales serves all."""
    for config in (V32, GLM):
        model = take_stock(headers(config, dsa_kind, False), torch.bfloat16, positions=16).model
        for layer in model.layers:  # type: ignore[attr-defined]
            for projection in (layer.attention.down.joined, layer.attention.up.joined):
                assert isinstance(projection, BlockLinear)
