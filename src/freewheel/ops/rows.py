# SPDX-License-Identifier: Apache-2.0
"""Packed rows of paged caches: quantise and write, read and dequantise.

A cache of packed rows is uint8 [n_pages, page_rows, bytes]; slot s is row s % page_rows of page
s // page_rows. Where a row has parts, those of one page lie behind each other: first parts of all
rows, then second parts. Formats are named and described in `spec.rows`. Nothing is read on the
host, so any graph may hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.codecs import E8M0_NAN, FP8_MOST, decode_e8m0, encode_e8m0

LATENT_TILE, KEY_TILE = 128, 64
"""Values that a scale covers: see `spec.rows`."""

SMALLEST = 2.0**-126
"""The least scale: below it float32 loses digits."""


def parts_of(cache: Tensor, *widths: int) -> tuple[Tensor, ...]:
    """Views [..., n_pages, page_rows, width] of each part of a cache [..., n_pages, page_rows, D].

    `widths` sum to D.
    """
    rows = cache.shape[-2]
    pages = cache.view(*cache.shape[:-2], rows * cache.shape[-1])
    pieces = pages.split([rows * width for width in widths], dim=-1)
    return tuple(p.unflatten(-1, (rows, w)) for p, w in zip(pieces, widths, strict=True))


def _e4m3(scaled: Tensor) -> Tensor:
    """uint8 [...]: the nearest e4m3, ties to even; NaN stays NaN."""
    near = scaled.clamp(-FP8_MOST, FP8_MOST).to(torch.float32)
    return near.to(torch.float8_e4m3fn).view(torch.uint8)


def quantise_tiles(values: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """(uint8 [..., S], float32 [..., S / tile]) of float [..., S]: e4m3 codes and their scales.

    A tile's scale is its largest magnitude / 448 in float32; of a tile of zeros it is 1, of one
    that holds NaN it is NaN.
    """
    tiles = values.unflatten(-1, (-1, tile))
    largest = tiles.abs().amax(-1)
    scale = (largest.to(torch.float32) / FP8_MOST).clamp(min=SMALLEST)
    scale = scale.masked_fill(largest == 0, 1)
    return _e4m3(tiles / scale[..., None].to(tiles.dtype)).flatten(-2), scale


def quantise_powers(values: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """(uint8 [..., S], uint8 [..., S / tile]) of float [..., S]: e4m3 codes and E8M0 scales.

    A tile's scale is the least power of two that is at least its largest magnitude / 448; of a tile
    that holds NaN or infinity it is NaN.
    """
    tiles = values.unflatten(-1, (-1, tile))
    least = (tiles.abs().amax(-1).to(torch.float32) / FP8_MOST).clamp(min=SMALLEST)
    scale = encode_e8m0(least).masked_fill(~least.isfinite(), E8M0_NAN)
    factor = decode_e8m0(scale)[..., None].to(tiles.dtype)
    return _e4m3(tiles / factor).flatten(-2), scale


def dequantise_tiles(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """dtype [..., S]: e4m3 codes uint8 [..., S] times scale float [..., S / tile]."""
    values = codes.contiguous().view(torch.float8_e4m3fn).to(dtype)
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None].to(dtype)).flatten(-2)


def _bytes(values: Tensor) -> Tensor:
    """uint8 [..., n]: the bytes of values [..., m]."""
    return values.contiguous().view(torch.uint8)


def write_latents(cache: Tensor, rows: Tensor, slots: Tensor, rope: int) -> None:
    """Rows [B, W, C + rope] to int64 slots [B, W] of packed latents."""
    rank = rows.shape[-1] - rope
    codes, scale = quantise_tiles(rows[..., :rank], LATENT_TILE)
    packed = torch.cat((codes, _bytes(scale), _bytes(rows[..., rank:].bfloat16())), dim=-1)
    cache.view(-1, cache.shape[-1]).index_copy_(0, slots.flatten(), packed.flatten(0, -2))


def read_latents(cache: Tensor, slots: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """dtype [N, C + rope] of packed latents at int slots [N]."""
    packed = cache.view(-1, cache.shape[-1]).index_select(0, slots)
    tiles = rank // LATENT_TILE
    codes, scale, turned = packed.split([rank, 4 * tiles, packed.shape[-1] - rank - 4 * tiles], -1)
    values = dequantise_tiles(codes, scale.contiguous().view(torch.float32), dtype)
    return torch.cat((values, turned.contiguous().view(torch.bfloat16).to(dtype)), dim=-1)


def _write_parts(cache: Tensor, slots: Tensor, *parts: Tensor) -> None:
    """Bytes uint8 [B, W, width] of each part to int64 slots [B, W]."""
    where, page_rows = slots.flatten(), cache.shape[1]
    page, row = where // page_rows, where % page_rows
    views = parts_of(cache, *(part.shape[-1] for part in parts))
    for view, part in zip(views, parts, strict=True):
        view.index_put_((page, row), part.flatten(0, -2))


def write_index_keys(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Rows [B, W, Di] to int64 slots [B, W] of packed index keys."""
    codes, scale = quantise_tiles(rows, rows.shape[-1])
    _write_parts(cache, slots, codes, _bytes(scale))


def read_index_pages(cache: Tensor, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """dtype [n, page_rows, Di] of packed index keys: the pages listed, int [n]."""
    codes, scale = parts_of(cache.index_select(0, pages), cache.shape[-1] - 4, 4)
    return dequantise_tiles(codes, scale.contiguous().view(torch.float32), dtype)


def key_parts(dim: int, rope: int) -> tuple[int, int]:
    """Bytes of values and of scales of a packed key."""
    return dim + rope, -(-(dim - rope) // (8 * KEY_TILE)) * 8


def write_keys(cache: Tensor, rows: Tensor, slots: Tensor, rope: int) -> None:
    """Rows [B, W, D], the last `rope` values rotated, to int64 slots [B, W] of packed keys."""
    scaled = rows.shape[-1] - rope
    codes, scale = quantise_powers(rows[..., :scaled], KEY_TILE)
    room = key_parts(rows.shape[-1], rope)[1] - scale.shape[-1]
    values = torch.cat((codes, _bytes(rows[..., scaled:].bfloat16())), dim=-1)
    _write_parts(cache, slots, values, torch.nn.functional.pad(scale, (0, room)))


def read_keys(cache: Tensor, slots: Tensor, dim: int, rope: int, dtype: torch.dtype) -> Tensor:
    """dtype [N, D] of packed keys at int slots [N]."""
    where, page_rows, scaled = slots.long(), cache.shape[1], dim - rope
    page, row = where // page_rows, where % page_rows
    values, scale = (part[page, row] for part in parts_of(cache, *key_parts(dim, rope)))
    factors = decode_e8m0(scale[:, : scaled // KEY_TILE].contiguous())
    plain = values[:, scaled:].contiguous().view(torch.bfloat16).to(dtype)
    return torch.cat((dequantise_tiles(values[:, :scaled], factors, dtype), plain), dim=-1)
