# SPDX-License-Identifier: Apache-2.0
"""What a model asks for next is on its way while it waits, within a bound, and is read once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import bench_load
from freewheel.models import load_folder, open_folder
from freewheel.models import weights as sources
from freewheel.models.folder import ModelFolder
from freewheel.models.header import StoredTensor
from freewheel.models.load import take_stock
from freewheel.models.reading import Begun, MappedReader
from freewheel.models.storage import PlainStorage, Request
from freewheel.models.weights import SafetensorsSource
from freewheel.nn.cut import Cut
from freewheel.spec.mesh import Mesh


class Watched(MappedReader):
    """Notes what has been begun and is not settled, and the most of it."""

    waiting: list[Begun]
    names: list[str]

    def begin(self, stored: StoredTensor, target: Tensor, cut: Cut | None = None) -> Begun:
        begun = super().begin(stored, target, cut)
        self.waiting.append(begun)
        self.names.append(f"{stored.file}:{stored.start}")
        return begun

    def settle(self, begun: Begun) -> None:
        self.waiting.remove(begun)
        super().settle(begun)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made: list[Watched] = []

    def watched(self: SafetensorsSource) -> Watched:
        del self
        return made[0]

    own = Watched(sources.FileMapping())
    own.waiting, own.names = [], []
    made.append(own)
    monkeypatch.setattr(SafetensorsSource, "_make_reader", watched)
    yield own


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    bench_load.write_folder(tmp_path, 3 << 20, 1 << 20, hidden=256, width=64)
    return open_folder(tmp_path)


@pytest.mark.parametrize("ahead", [0, 1 << 14, 1 << 30])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2, 1)], ids=["whole", "shared"])
def test_a_model_is_the_same_however_far_its_source_looks_ahead(
    ahead: int, mesh: Mesh, folder: ModelFolder, reader: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_folder(folder, torch.bfloat16, positions=64, mesh=mesh)
    before, reader.names = reader.names, []
    monkeypatch.setattr(sources, "AHEAD_BYTES", ahead)
    found = load_folder(folder, torch.bfloat16, positions=64, mesh=mesh)
    assert len(set(reader.names)) == len(reader.names) and set(reader.names) == set(before)
    for one, two in zip(found.weights, expected.weights, strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def test_what_comes_next_is_begun_before_anything_is_awaited(
    folder: ModelFolder, reader: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = take_stock(folder, torch.bfloat16).catalogue.requests
    sizes = [sum(request.sizes(folder.tensors)) for request in requests]
    bound = sum(sizes[:9])
    monkeypatch.setattr(sources, "AHEAD_BYTES", bound)
    with SafetensorsSource(folder.tensors, torch.bfloat16, requests=requests) as source:
        first = requests[0].found
        source.tensor(first.name, first.shape)
        assert len(reader.waiting) >= 8
        assert sum(sizes[1 : 1 + len(reader.waiting)]) <= bound
        source.settle()
        assert len(reader.waiting) >= 8


def test_a_request_that_differs_from_the_foreseen_one_is_read_for_itself(
    folder: ModelFolder, reader: Watched
) -> None:
    name = "model.norm.weight"
    shape = folder.tensors[name].shape
    foreseen = [Request(PlainStorage(name, shape), torch.bfloat16)]
    with SafetensorsSource(folder.tensors, torch.bfloat16, requests=foreseen) as source:
        source.settle()
        found = source.tensor(name, shape, torch.float64)
        assert found.dtype == torch.float64
        again = source.tensor(name, shape)
        assert torch.equal(found.bfloat16().nan_to_num(), again.nan_to_num())
