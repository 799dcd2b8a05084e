# SPDX-License-Identifier: Apache-2.0
"""The folder that loading is measured with is a model, and the CPU loads it as a GPU does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import bench_load
from freewheel.models import load_folder, open_folder
from freewheel.models import weights as sources
from freewheel.models.staging import StagedReader
from tests.models.test_reading import PromptSlot


class WiderSlot(PromptSlot):
    def __init__(self) -> None:
        super().__init__(torch.empty(50_000, dtype=torch.uint8))


def test_the_measured_folder_loads_and_its_rates_are_told(tmp_path: Path) -> None:
    bench_load.write_folder(tmp_path, 6 << 20, 1 << 20, hidden=256, width=64)
    found = bench_load.measure(tmp_path, "cpu", [8], [1 << 20])
    assert found["files"] > 3 and found["share_of_raw"] == found["share_of_bound"] > 0
    stored = open_folder(tmp_path).tensors
    assert sum(name.endswith(".down_proj.weight") for name in stored) > 16
    for one in found["loads"]:
        read = one["bytes_per_second"] * one["seconds"]
        assert abs(read - sum(tensor.size for tensor in stored.values())) < 1
    bench_load.report(found)


def test_buffers_bring_the_same_model_as_a_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench_load.write_folder(tmp_path, 3 << 20, 1 << 20, hidden=256, width=64)
    folder = open_folder(tmp_path)
    mapped = load_folder(folder, torch.bfloat16, positions=64)

    def staged(self: sources.SafetensorsSource) -> StagedReader:
        return StagedReader(WiderSlot, 3, 2)

    monkeypatch.setattr(sources.SafetensorsSource, "_make_reader", staged)
    other = load_folder(folder, torch.bfloat16, positions=64)
    for one, two in zip(mapped.weights, other.weights, strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))
