# SPDX-License-Identifier: Apache-2.0
"""Sums that tell whether pages and tokens are what they were: exact, and in any order the same.

A sum takes every 32-bit word, as a signed number, times an odd number that belongs to its place,
modulo 2**64. A change of a single word changes it: the difference of two words is less than 2**32
in size, and no odd number takes that to a multiple of 2**64. Other changes go unseen once in some
2**32 times. Sums of parts add up to the sum of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.registry import nothing, op

MIX = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 over the golden ratio, as int64: multiples of it are spread evenly."""

LABEL_BITS = 40
"""A page of one field has fewer words than 2**LABEL_BITS."""


def place_weights(count: int, first: int, device: torch.device) -> Tensor:
    """int64 [count]: the odd numbers of places from `first` on."""
    place = torch.arange(first, first + count, dtype=torch.int64, device=device)
    return (place * MIX) | 1


def words_of(stored: Tensor) -> Tensor:
    """int32 [layers, pages, words] of dtype [layers, pages, page_rows, width]: the same memory."""
    return stored.flatten(2).view(torch.int32)


def row_words(stored: Tensor, parts: list[int]) -> list[int]:
    """Words of each part of a stored row, of `parts` elements each."""
    return [part * stored.element_size() // 4 for part in parts]


@op(
    "sum_pages(Tensor stored, Tensor pages, Tensor begins, Tensor ends, Tensor(a!) sums, "
    "int[] parts, int label) -> ()",
    fake=nothing,
)
def sum_pages(
    stored: Tensor,  # dtype [layers, N, page_rows, width]
    pages: Tensor,  # int32 [B, C]  0 to N - 1
    begins: Tensor,  # int32 [B, C]
    ends: Tensor,  # int32 [B, C]
    sums: Tensor,  # int64 [B, C]
    parts: list[int],
    label: int,
) -> None:
    """Add to `sums` those of rows `begins` to `ends` of each page, over all layers of a field.

    `parts`: elements of a row's parts; each part of all rows of a page lies together. `label`: the
    field's number, so that fields of one group have places of their own.
    """
    words, rows = words_of(stored), stored.shape[2]
    owner = torch.cat(
        [
            torch.arange(rows * size, dtype=torch.int32, device=stored.device) // size
            for size in row_words(stored, parts)
        ]
    )  # int32 [words]  the row that a word is of
    layers, _, count = words.shape
    for column in range(pages.shape[1]):
        page = pages[:, column].long()
        inside = (owner >= begins[:, column, None]) & (owner < ends[:, column, None])  # bool [B, n]
        for layer in range(layers):
            first = (label << LABEL_BITS) + layer * count
            value = words[layer].index_select(0, page).long()  # int64 [B, words]
            value = value * place_weights(count, first, stored.device)
            sums[:, column] += torch.where(inside, value, 0).sum(1)


@op(
    "sum_tokens(Tensor tokens, Tensor rows, Tensor begins, Tensor ends) -> Tensor",
    fake=lambda tokens, rows, *_: torch.empty_like(rows, dtype=torch.int64),
)
def sum_tokens(
    tokens: Tensor,  # int32 [R, T]
    rows: Tensor,  # int32 [B]
    begins: Tensor,  # int32 [B]
    ends: Tensor,  # int32 [B]
) -> Tensor:  # int64 [B]
    """Sums of the rows' tokens at positions `begins` to `ends`."""
    width = tokens.shape[1]
    place = torch.arange(width, dtype=torch.int32, device=tokens.device)
    inside = (place >= begins[:, None]) & (place < ends[:, None])  # bool [B, T]
    # A token of 0 is to count too.
    value = (tokens.index_select(0, rows.long()).long() + 1) * place_weights(
        width, 0, tokens.device
    )
    return torch.where(inside, value, 0).sum(1)
