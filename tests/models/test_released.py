# SPDX-License-Identifier: Apache-2.0
"""Checkpoints load as they are released, and compute what their dequantised twins compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from freewheel.models import Catalogue, LoadedModel, load_folder, load_model, open_folder
from tests.fixtures.released import RELEASED, Released, write_released, write_twin
from tests.models.paged import Paged

TOKENS = list(range(40, 64))
CHUNKS = (13, 1, 1, 9)


@dataclass
class Pair:
    own: Released
    folder: Path
    released: LoadedModel
    twin: LoadedModel


@pytest.fixture(scope="module", params=RELEASED)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    own = RELEASED[request.param]
    base = tmp_path_factory.mktemp("pair")
    folder, twin = write_released(base / "released", own), write_twin(base / "twin", own)
    loaded = [load_folder(open_folder(path), torch.float32) for path in (folder, twin)]
    return Pair(own, folder, *loaded)


def paged(model: LoadedModel) -> Paged:
    return Paged(model, page_size=128 if "V4" in type(model.model).__name__ else 4)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Alike, but for the order in which experts add up."""
    assert (ours - theirs).abs().max() < 2e-5


def draft(model: LoadedModel) -> Tensor:
    row = paged(model)
    return row.draft(TOKENS[1:], 0, row.forward(TOKENS)[:-1])


def test_logits_equal_those_of_the_dequantised_twin(pair: Pair) -> None:
    ours, theirs = (paged(m).logits(TOKENS, CHUNKS) for m in (pair.released, pair.twin))
    assert ours.isfinite().all() and ours.std() > 0.1
    assert_close(ours, theirs)


def test_drafts_equal_those_of_the_dequantised_twin(pair: Pair) -> None:
    assert_close(draft(pair.released), draft(pair.twin))


def test_nothing_is_worth_a_note(pair: Pair) -> None:
    """But what config.json says, and tables that are stored twice."""
    notes = [n for n in pair.released.report.notes if "holds the same values as" not in n]
    assert all("index_share_for_mtp_iteration" in n for n in notes)
    assert len(pair.released.report.notes) - len(notes) == 2


def test_weights_stay_in_the_precision_in_which_they_are_stored(pair: Pair) -> None:
    """What is held takes no more than the files, but for what no quantised op takes."""
    held = {w.dtype: 0 for w in pair.released.weights}
    for weight in pair.released.weights:
        held[weight.dtype] += weight.numel() * weight.element_size()
    numbers = held[torch.float8_e4m3fn] + 2 * held.get(torch.uint8, 0)
    assert numbers > sum(w.numel() for w in pair.twin.weights) * 0.7
    assert all(w.dtype != torch.bfloat16 for w in pair.released.weights)


def test_every_stored_tensor_is_asked_for_once(pair: Pair) -> None:
    folder = open_folder(pair.folder)
    catalogue = Catalogue(folder.tensors, torch.bfloat16)
    load_model(folder.spec, catalogue)
    assert catalogue.repeated == []
    assert catalogue.wanted.keys() == folder.tensors.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_of_computation_are_close(pair: Pair, dtype: torch.dtype) -> None:
    other = load_folder(open_folder(pair.folder), dtype)
    wide = paged(pair.released).logits(TOKENS, CHUNKS)
    found = paged(other).logits(TOKENS, CHUNKS)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    difference = (found - wide).abs().mean() / wide.std()
    assert difference < (0.5 if dtype == torch.bfloat16 else 1e-4)
