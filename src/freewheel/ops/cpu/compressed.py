# SPDX-License-Identifier: Apache-2.0
"""Keys and entries with few passes; no work for windows that do not close."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.cache import write_rows
from freewheel.ops.compressed import mix_entries
from freewheel.ops.cpu.dense import normalised
from freewheel.ops.dense import angles_at, wide
from freewheel.ops.registry import implement


def _turned(x: Tensor, angles: Tensor, inverse: bool = False) -> Tensor:
    """x [..., D], which is overwritten, with its last dimensions turned as in `rotate_tail`."""
    cos, sin = angles.to(x.dtype).chunk(2, dim=-1)
    tail = x[..., -angles.shape[-1] :]
    first, second = tail[..., 0::2], tail[..., 1::2]
    sign = -1 if inverse else 1
    low = (first * cos).addcmul_(second, sin, value=-sign)
    second.mul_(cos).addcmul_(first, sin, value=sign)
    first.copy_(low)
    return x


@implement("rope_tail", "cpu")
def rope_tail(x: Tensor, positions: Tensor, rope_table: Tensor, inverse: bool) -> Tensor:
    own = wide(x).clone(memory_format=torch.contiguous_format)
    return _turned(own, angles_at(rope_table, positions)[:, :, None], inverse).to(x.dtype)


@implement("open_query", "cpu")
def open_query(x: Tensor, eps: float, positions: Tensor, rope_table: Tensor) -> Tensor:
    source = wide(x)
    length = torch.linalg.vector_norm(source, dim=-1, keepdim=True)
    inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    own = (source * inverse).contiguous()
    return _turned(own, angles_at(rope_table, positions)[:, :, None]).to(x.dtype)


@implement("store_key", "cpu")
def store_key(
    cache: Tensor,
    key: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    slots: Tensor,
) -> None:
    normed = normalised(wide(key), norm_weight, eps)
    write_rows(cache, _turned(normed, angles_at(rope_table, positions)), slots)


@implement("compress", "cpu")
def compress(
    cache: Tensor,
    raw: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    rope_table: Tensor,
    windows: Tensor,
    write_slots: Tensor,
    raw_slots: Tensor,
) -> None:
    live = (windows.flatten() >= 0).nonzero()[:, 0]
    if not live.shape[0]:
        return
    own = windows.flatten()[live][None]
    entry = mix_entries(
        raw, bias, norm_weight, eps, rope_table, own, raw_slots.flatten(0, 1)[live][None]
    )
    write_rows(cache, entry, write_slots.flatten()[live][None])
