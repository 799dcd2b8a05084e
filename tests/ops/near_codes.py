# SPDX-License-Identifier: Apache-2.0
"""Caches of codes that two bodies wrote: the same but for what lies between two codes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.ops.packed_cases import INDEX_BYTES, KEY_BYTES, LATENT_BYTES, numbers

MOVED = 0.01
"""Of the numbers in a cache of codes, how many may have gone to the next code: those that lie
between two are rounded by their last bits."""

TILES = {LATENT_BYTES: 128, INDEX_BYTES: 128, KEY_BYTES: 64}
"""Numbers of a row that share a scale, by the row's bytes."""

LEAST_CODE = 2.0**-16
"""Of the largest number of a tile: the smallest step between codes, with a scale that is a power of
two and up to twice as large as it had to be."""


def moves(own: Tensor, same: Tensor) -> str | None:
    """What rows stand for differs by more than a code, or in more than a few places."""
    if torch.equal(own, same):
        return None
    mine, theirs = numbers(own.cpu()), numbers(same.cpu())
    if not torch.equal(mine.isnan(), theirs.isnan()):
        return "other numbers are NaN"
    known = ~theirs.isnan()
    mine, theirs = mine.nan_to_num(), theirs.nan_to_num()
    away, tile = (mine - theirs).abs(), TILES[own.shape[2]]
    tiles = F.pad(theirs, (0, -theirs.shape[1] % tile)).unflatten(1, (-1, tile))
    largest = tiles.abs().amax(-1).repeat_interleave(tile, 1)[:, : theirs.shape[1]]
    far = away > theirs.abs() / 8 + largest * LEAST_CODE
    moved = away > theirs.abs() * 2.0**-7
    if not far.any() and moved.sum() <= MOVED * known.sum():
        return None
    counts = f"{int(far.sum())} by more than a code, {int(moved.sum())} by one"
    return f"of {int(known.sum())} numbers {counts}, {float(away.max()):.3g} at most"
