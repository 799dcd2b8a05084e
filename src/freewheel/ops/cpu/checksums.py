# SPDX-License-Identifier: Apache-2.0
"""Checksums of the pages that hold something: whole ones together, others one by one."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from freewheel.ops.checksums import LABEL_BITS, place_weights, row_words, words_of
from freewheel.ops.registry import implement

TOGETHER = 1 << 20
"""Words that are multiplied at one time."""


@implement("sum_pages", "cpu")
def sum_pages(
    stored: Tensor,
    pages: Tensor,
    begins: Tensor,
    ends: Tensor,
    sums: Tensor,
    parts: list[int],
    label: int,
) -> None:
    words, rows = words_of(stored), stored.shape[2]  # int32 [layers, N, words]
    layers, _, count = words.shape
    weights = _weights(layers * count, label << LABEL_BITS).view(layers, 1, count)
    whole = (begins == 0) & (ends == rows)
    places = whole.flatten().nonzero()[:, 0]
    flat, found = sums.view(-1), pages.flatten()
    step = max(1, TOGETHER // (layers * count))
    for first in range(0, len(places), step):
        some = places[first : first + step]
        values = words.index_select(1, found.index_select(0, some)).long()
        flat[some] += (values * weights).sum((0, 2))
    partial = ((ends > begins) & ~whole).nonzero().tolist()
    for b, c in partial:
        page, begin, end = (int(one[b, c]) for one in (pages, begins, ends))
        at = 0
        for size in row_words(stored, parts):
            piece = slice(at + begin * size, at + end * size)
            sums[b, c] += (words[:, page, piece].long() * weights[:, 0, piece]).sum()
            at += rows * size


@lru_cache(maxsize=64)
def _weights(count: int, first: int) -> Tensor:
    return place_weights(count, first, torch.device("cpu"))
