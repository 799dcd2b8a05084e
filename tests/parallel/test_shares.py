# SPDX-License-Identifier: Apache-2.0
"""A model cut into shares computes what the whole one does, and each rank reads its share alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from freewheel.errors import ConfigError
from freewheel.models import open_folder
from freewheel.models.header import StoredTensor
from freewheel.models.load import load_folder, take_stock
from freewheel.models.storage import BlockStorage, PackedStorage, check_cut
from freewheel.models.weights import SafetensorsSource
from freewheel.nn.cut import INPUTS, OUTPUTS, Cut
from freewheel.nn.matrix import BlockMatrix, PackedMatrix
from freewheel.spec.mesh import Mesh, Share
from tests.models.paged import Paged
from tests.parallel.threads import on_ranks

CHECKPOINTS = Path(__file__).parents[2] / "src" / "freewheel" / "checkpoints"
TOKENS = [(7 * n + n * n) % 1000 for n in range(140)]


def logits(name: str, mesh: Mesh) -> tuple[Tensor, Tensor, int]:
    """Of the target, and of the draft head behind it: [T, V] each; and bytes read."""
    folder = open_folder(CHECKPOINTS / name)
    loaded = load_folder(folder, torch.float64, positions=256, mesh=mesh)
    paged = Paged(loaded, length=256, page_size=128)
    hidden = paged.hidden(TOKENS, [100, 40])
    drafted = paged.draft(TOKENS[1:9], 0, hidden[:8])
    assert paged.draft_head is not None
    return paged.model.logits(hidden), paged.draft_head.logits(drafted), loaded.report.read_bytes


@pytest.mark.parametrize("name", ["demo", "demo-v4"])
@pytest.mark.parametrize("whole", [False, True])
def test_two_ranks_compute_what_one_does(name: str, whole: bool) -> None:
    target, draft, size = logits(name, Mesh())
    ranks = on_ranks(2, lambda rank: logits(name, Mesh(2, rank, whole)))
    for own in ranks:
        torch.testing.assert_close(own[0], target, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(own[1], draft, rtol=1e-9, atol=1e-9)
        assert own[2] < 0.7 * size
    assert torch.equal(ranks[0][0], ranks[1][0]) and torch.equal(ranks[0][1], ranks[1][1])


@pytest.mark.parametrize(
    ("name", "whole", "ranks"),
    [
        ("demo", False, 2),
        ("demo-v4", False, 4),
        ("demo", True, 4),
        ("demo-v4", True, 2),
    ],
)
def test_copies_that_share_their_experts_compute_what_one_model_does(
    name: str, whole: bool, ranks: int
) -> None:
    """Prompts of 100 tokens go by all-to-all where experts are whole; 8 tokens are gathered."""
    target, draft, _ = logits(name, Mesh())
    found = on_ranks(ranks, lambda rank: logits(name, Mesh(ranks // 2, rank, whole, dp=2)), dp=2)
    for own in found:
        torch.testing.assert_close(own[0], target, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(own[1], draft, rtol=1e-9, atol=1e-9)
    assert torch.equal(found[0][0], found[ranks // 2 - 1][0])  # the ranks of one copy


def test_what_does_not_divide_is_refused_by_name() -> None:
    folder = open_folder(CHECKPOINTS / "demo")
    with pytest.raises(ConfigError, match=r"tp: 3 ranks cannot share the 1024 rows of model.embed"):
        take_stock(folder, torch.float32, mesh=Mesh(3))
    with pytest.raises(ConfigError, match=r"8 ranks cannot share the 4 heads of model.layers.0"):
        take_stock(folder, torch.float32, mesh=Mesh(8))
    with pytest.raises(ConfigError, match="tp: there is no rank 2 among 2"):
        Mesh(2, 2)


def test_blocks_and_groups_that_share_a_scale_are_never_cut() -> None:
    fp8, mxfp4 = BlockStorage("a", (512, 256), "s"), PackedStorage("b", (64, 128), "s", True)
    check_cut(fp8, Cut(Share(0, 4), OUTPUTS))
    check_cut(mxfp4, Cut(Share(0, 4), INPUTS))
    check_cut(mxfp4, Cut(Share(0, 64), OUTPUTS))
    with pytest.raises(ConfigError, match="256 columns of a in whole blocks of 128"):
        check_cut(fp8, Cut(Share(0, 4), INPUTS))
    with pytest.raises(ConfigError, match="128 columns of b in whole blocks of 32"):
        check_cut(mxfp4, Cut(Share(0, 8), INPUTS))


@pytest.mark.parametrize("dim", [OUTPUTS, INPUTS])
def test_a_rank_reads_its_part_of_numbers_and_of_scales(tmp_path: Path, dim: int) -> None:
    file, stored, whole = _file(tmp_path)
    cut = Cut(Share(1, 2), dim)
    with SafetensorsSource(stored, torch.bfloat16, mesh=Mesh(2, 1)) as source:
        fp8, packed = source.matrix("a.weight", (512, 256)), source.matrix("b.weight", (64, 128))
        own, bits = (
            source.matrix("a.weight", (512, 256), cut),
            source.matrix("b.weight", (64, 128), cut),
        )
    assert isinstance(own, BlockMatrix) and isinstance(bits, PackedMatrix)
    assert isinstance(fp8, BlockMatrix) and file.stat().st_size == whole
    for part, all_ in ((own, fp8), (bits, packed)):
        expected = cut.of(all_.dense(torch.float32))
        assert torch.equal(part.dense(torch.float32), expected)


def _file(folder: Path) -> tuple[Path, dict[str, StoredTensor], int]:
    """An FP8 weight and an MXFP4 one, one behind the other."""
    shapes = {
        "a.weight": ((512, 256), "F8_E4M3", 1),
        "a.weight_scale_inv": ((4, 2), "F32", 4),
        "b.weight": ((64, 64), "U8", 1),
        "b.scale": ((64, 4), "F8_E8M0", 1),
    }
    file, at, stored = folder / "weights", 0, {}
    generator = torch.Generator().manual_seed(0)
    pieces: list[bytes] = []
    for name, (shape, dtype, width) in shapes.items():
        count = shape[0] * shape[1]
        if dtype == "F32":
            raw = torch.rand(count, generator=generator).view(torch.uint8)
        elif dtype == "F8_E8M0":
            raw = torch.randint(120, 134, (count,), generator=generator, dtype=torch.uint8)
        else:
            raw = torch.randint(0, 120, (count,), generator=generator, dtype=torch.uint8)
        pieces.append(bytes(raw.tolist()))
        stored[name] = StoredTensor(file, shape, dtype, at, count * width)
        at += count * width
    file.write_bytes(b"".join(pieces))
    return file, stored, at


def test_the_halves_of_joined_experts_are_cut_each_by_itself() -> None:
    whole = torch.arange(2 * 8 * 3).view(2, 8, 3)  # gates are rows 0 to 3, ups rows 4 to 7
    cut = Cut(Share(1, 2), OUTPUTS, 2)
    assert torch.equal(cut.of(whole), whole[:, [2, 3, 6, 7]])
    assert cut.shape((2, 8, 3)) == (2, 4, 3)
