# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as they are released, FP8 and MXFP4, shared by ranks: what one process computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from freewheel.models import open_folder
from freewheel.models.load import load_folder
from freewheel.spec.mesh import Mesh
from tests.fixtures.released import RELEASED, write_released
from tests.models.paged import Paged
from tests.parallel.threads import on_ranks

TOKENS = [(7 * n + n * n) % 250 for n in range(48)]
IN_BLOCKS = {
    "intermediate_size": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_head_dim": 128,
    "v_head_dim": 64,
}
"""Heads and widths of which two ranks can have whole blocks of 128 each."""

CASES = {
    "GLM-5.2-FP8": IN_BLOCKS,
    "DeepSeek-V3.2": {k: v for k, v in IN_BLOCKS.items() if not k.endswith("k_head_dim")},
    "DeepSeek-V4-Flash": {},
    "DeepSeek-V4-Flash-Base": {},
}
BOUND = {torch.float64: 1e-9, torch.float32: 2e-4}
"""Of the largest logit: weights are the same numbers, and sums are made in another order."""


def logits(folder: Path, dtype: torch.dtype, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Of the target over a prompt in two chunks, and of the draft head behind it."""
    loaded = load_folder(open_folder(folder), dtype, positions=128, mesh=mesh)
    paged = Paged(loaded, length=128, page_size=128)
    hidden = paged.hidden(TOKENS, [40, 8])
    assert paged.draft_head is not None
    drafted = paged.draft(TOKENS[1:9], 0, hidden[:8])
    return paged.model.logits(hidden), paged.draft_head.logits(drafted)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("GLM-5.2-FP8", torch.float32),
        ("DeepSeek-V3.2", torch.float64),
        ("DeepSeek-V4-Flash", torch.float32),
        ("DeepSeek-V4-Flash-Base", torch.float64),
    ],
)
def test_two_ranks_share_a_quantised_model_within_the_bound(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """Cut, dealt out whole, and as two copies that share their experts."""
    own = RELEASED[name]
    wide = {"moe_intermediate_size": 256, **CASES[name]}
    folder = write_released(tmp_path / "model", replace(own, config=own.config | wide))
    whole = logits(folder, dtype, Mesh())
    for mesh in (Mesh(2), Mesh(2, 0, True), Mesh(1, 0, True, 2)):
        found = on_ranks(
            2,
            lambda rank, mesh=mesh: logits(folder, dtype, replace(mesh, rank=rank)),
            dp=mesh.dp,
        )
        for ranks in found:
            for part, expected in zip(ranks, whole, strict=True):
                assert (part - expected).abs().max() <= BOUND[dtype] * expected.abs().max()
        # Copies see an expert's tokens in another order each; a copy's ranks agree to the bit.
        if mesh.dp == 1:
            for first, second in zip(*found, strict=True):
                assert torch.equal(first, second)
