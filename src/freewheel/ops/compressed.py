# SPDX-License-Identifier: Apache-2.0
"""Compressed attention over paged caches (DeepSeek-V4 report, section 2.3): keys, and which ones.

A window of `ratio` tokens has one entry: window w holds tokens w * ratio to (w + 1) * ratio - 1 and
closes with the last of them. A query sees the entries of the windows that have closed up to itself.
Entries are paged as tokens are, with 1/ratio of the rows a page: entry e of row r lies in slot
page_table[r, e // page_rows] * page_rows + e % page_rows. So ops that score and pick tokens score
and pick entries, given page_rows for the page size and entries for tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops.attention import slots_at
from freewheel.ops.cache import write_rows
from freewheel.ops.dense import angles_at, normalise_rms, wide
from freewheel.ops.registry import nothing, op


def rotate_tail(x: Tensor, angles: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last Dr dimensions of x [..., D] by angles [..., Dr] = (cos | sin), in x's dtype.

    Pair i is (x[2i], x[2i+1]) of those dimensions, and stays where it is. `inverse`: back again.
    """
    span = angles.shape[-1]
    cos, sin = angles.to(x.dtype).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    first, second = x[..., -span:].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((x[..., :-span], turned.flatten(-2)), dim=-1)


def _like_first(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@op(
    "rope_tail(Tensor x, Tensor positions, Tensor rope_table, bool inverse) -> Tensor",
    fake=_like_first,
)
def rope_tail(
    x: Tensor,  # [B, W, H, D]
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    inverse: bool,
) -> Tensor:  # [B, W, H, D]
    """Rotary embedding of the last Dr dimensions, as `rotate_tail`; `inverse` undoes it."""
    angles = angles_at(rope_table, positions)[:, :, None]  # [B, W, 1, Dr]
    return rotate_tail(wide(x), angles, inverse).to(x.dtype)


@op(
    "open_query(Tensor x, float eps, Tensor positions, Tensor rope_table) -> Tensor",
    fake=_like_first,
)
def open_query(
    x: Tensor,  # [B, W, H, D]
    eps: float,
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
) -> Tensor:  # [B, W, H, D]
    """Each head's query over its root mean square, its last Dr dimensions rotated."""
    source = wide(x)
    normed = source * torch.rsqrt(source.square().mean(-1, keepdim=True) + eps)
    return rotate_tail(normed, angles_at(rope_table, positions)[:, :, None]).to(x.dtype)


@op(
    "store_key(Tensor(a!) cache, Tensor key, Tensor norm_weight, float eps, Tensor positions, "
    "Tensor rope_table, Tensor slots) -> ()",
    fake=nothing,
)
def store_key(
    cache: Tensor,  # [n_pages, page_size, D]
    key: Tensor,  # [B, W, D]
    norm_weight: Tensor,  # [D]
    eps: float,
    positions: Tensor,  # int32 [B, W]  each below T
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    slots: Tensor,  # int64 [B, W]
) -> None:
    """Store the key that is also the value: rms_norm(key), its last Dr dimensions rotated."""
    write_rows(cache, key_rows(key, norm_weight, eps, positions, rope_table), slots)


def key_rows(
    key: Tensor, norm_weight: Tensor, eps: float, positions: Tensor, rope_table: Tensor
) -> Tensor:
    """float [B, W, D]: what `store_key` stores."""
    normed = normalise_rms(wide(key), norm_weight, eps)
    return rotate_tail(normed, angles_at(rope_table, positions))


def _fake_window_slots(
    page_table: Tensor, rows: Tensor, kv_lens: Tensor, page_size: int, window: int
) -> Tensor:
    return kv_lens.new_empty((*kv_lens.shape, window))


@op(
    "window_slots(Tensor page_table, Tensor rows, Tensor kv_lens, int page_size, int window) "
    "-> Tensor",
    fake=_fake_window_slots,
)
def window_slots(
    page_table: Tensor,  # int32 [R, P]
    rows: Tensor,  # int32 [B]
    kv_lens: Tensor,  # int32 [B, W]
    page_size: int,
    window: int,
) -> Tensor:  # int32 [B, W, window]
    """Slots of the last `window` positions below kv_len, ascending; -1 before position 0."""
    back = torch.arange(window, device=rows.device, dtype=torch.int32) - window
    positions = kv_lens[..., None] + back  # int32 [B, W, window]
    pages = page_table.index_select(0, rows)
    slots = slots_at(positions.clamp(min=0).long(), pages, page_size)
    return slots.masked_fill(positions < 0, -1)


def _fake_entry_slots(
    page_table: Tensor, rows: Tensor, entry_lens: Tensor, page_rows: int
) -> Tensor:
    return entry_lens.new_empty((*entry_lens.shape, page_table.shape[1] * page_rows))


@op(
    "entry_slots(Tensor page_table, Tensor rows, Tensor entry_lens, int page_rows) -> Tensor",
    fake=_fake_entry_slots,
)
def entry_slots(
    page_table: Tensor,  # int32 [R, P]
    rows: Tensor,  # int32 [B]
    entry_lens: Tensor,  # int32 [B, W]
    page_rows: int,
) -> Tensor:  # int32 [B, W, P * page_rows]
    """Slots of all entries below entry_len, ascending, then -1."""
    length = page_table.shape[1] * page_rows
    entries = torch.arange(length, device=rows.device)  # int64 [S]
    pages = page_table.index_select(0, rows)
    own = slots_at(entries.expand(rows.shape[0], 1, -1), pages, page_rows)  # int32 [B, 1, S]
    return torch.where(entries < entry_lens[..., None], own, -1)


def closings(width: int, ratio: int) -> int:
    """The most windows of `ratio` tokens that close within `width` tokens."""
    return -(-width // ratio)


def _fake_plan_closings(
    positions: Tensor, kv_lens: Tensor, rows: Tensor, raw: Tensor, entries: Tensor, *args: int
) -> tuple[Tensor, Tensor, Tensor]:
    ratio, span = args[2:]
    shape = (rows.shape[0], closings(positions.shape[1], ratio))
    ints = rows.new_empty(shape), rows.new_empty((*shape, span))
    return ints[0], rows.new_empty(shape, dtype=torch.int64), ints[1]


@op(
    "plan_closings(Tensor positions, Tensor kv_lens, Tensor rows, Tensor raw_table, "
    "Tensor entry_table, int raw_page_size, int page_rows, int ratio, int span) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_fake_plan_closings,
)
def plan_closings(
    positions: Tensor,  # int32 [B, W]
    kv_lens: Tensor,  # int32 [B, W]
    rows: Tensor,  # int32 [B]
    raw_table: Tensor,  # int32 [R, P]
    entry_table: Tensor,  # int32 [R, Q]
    raw_page_size: int,
    page_rows: int,
    ratio: int,
    span: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(windows int32 [B, K], write_slots int64 [B, K], raw_slots int32 [B, K, span]).

    The windows that close within the rectangle: those w for which end // ratio > w >= start //
    ratio, at most K = ceil(W / ratio) of them, ascending, then -1. write_slots: of their entries,
    0 where there is none. raw_slots: of the last `span` positions of each window, -1 before
    position 0 and where there is no window.
    """
    start, end = positions[:, :1], kv_lens.amax(1, keepdim=True)  # int32 [B, 1]; end 0: no queries
    count = closings(positions.shape[1], ratio)
    windows = start // ratio + torch.arange(count, device=rows.device, dtype=torch.int32)
    live = windows < end // ratio  # bool [B, K]
    entry_pages = entry_table.index_select(0, rows)
    entries = slots_at(windows[:, :, None].long(), entry_pages, page_rows)[..., 0].long()
    back = torch.arange(span, device=rows.device, dtype=torch.int32) - span
    sources = (windows[:, :, None] + 1) * ratio + back  # int32 [B, K, span]
    raw_pages = raw_table.index_select(0, rows)
    raw = slots_at(sources.clamp(min=0).long(), raw_pages, raw_page_size)
    raw = torch.where(live[:, :, None] & (sources >= 0), raw, -1)
    return torch.where(live, windows, -1), torch.where(live, entries, 0), raw


@op(
    "project_raw(Tensor x, Tensor weight) -> Tensor",
    fake=lambda x, weight: wide(x.new_empty((*x.shape[:-1], weight.shape[0]))),
)
def project_raw(
    x: Tensor,  # [B, W, H]
    weight: Tensor,  # [2C, H]
) -> Tensor:  # float [B, W, 2C]
    """What entries will be mixed from: kv beside gate, C channels each, as x @ weight^T.

    Never rounded: bfloat16 x and weights have exact products, whose sum is in float32.
    """
    return F.linear(wide(x), wide(weight))


@op("store_raw(Tensor(a!) raw, Tensor values, Tensor slots) -> ()", fake=nothing)
def store_raw(
    raw: Tensor,  # float [n_pages, page_size, 2C]
    values: Tensor,  # float [B, W, 2C]
    slots: Tensor,  # int64 [B, W]
) -> None:
    """Store what entries will be mixed from, by position: kv beside gate, C channels each."""
    write_rows(raw, values, slots)


@op(
    "compress(Tensor(a!) cache, Tensor raw, Tensor bias, Tensor norm_weight, float eps, "
    "Tensor rope_table, Tensor windows, Tensor write_slots, Tensor raw_slots) -> ()",
    fake=nothing,
)
def compress(
    cache: Tensor,  # [n_pages, page_rows, D]
    raw: Tensor,  # float [m_pages, page_size, 2C]
    bias: Tensor,  # float [ratio, C]
    norm_weight: Tensor,  # [D]
    eps: float,
    rope_table: Tensor,  # float32 [T, Dr]  (cos | sin)
    windows: Tensor,  # int32 [B, K]
    write_slots: Tensor,  # int64 [B, K]
    raw_slots: Tensor,  # int32 [B, K, span]
) -> None:
    """Store the entries of the windows that close (DeepSeek-V4 report, equations 9-12 and 20-23).

    An entry is the sum over its positions of softmax(gate + bias) * kv, channel by channel, normed,
    and rotated by the angle of its window's first position. `bias` depends on the position within
    the window. With C = D an entry mixes its window's tokens (span = ratio). With C = 2D it also
    mixes those of the window before (span = 2 * ratio): of the earlier window the first D channels
    count, of its own the last D.
    """
    entry = mix_entries(raw, bias, norm_weight, eps, rope_table, windows, raw_slots)
    write_rows(cache, entry, write_slots)


def mix_entries(
    raw: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    rope_table: Tensor,
    windows: Tensor,
    raw_slots: Tensor,
) -> Tensor:
    """float [B, K, D]: what `compress` stores."""
    ratio, span, dim = bias.shape[0], raw_slots.shape[2], norm_weight.shape[0]
    none = (raw_slots < 0)[..., None]  # bool [B, K, span, 1]
    flat = raw.view(-1, raw.shape[2])
    gathered = flat.index_select(0, raw_slots.clamp(min=0).flatten())
    gathered = gathered.view(*raw_slots.shape, flat.shape[1])
    kv, gate = wide(gathered).masked_fill(none, 0).chunk(2, dim=-1)  # float [B, K, span, C]
    gate = gate + bias.to(gate.dtype).repeat(span // ratio, 1)
    if span > ratio:
        kv = torch.cat((kv[:, :, :ratio, :dim], kv[:, :, ratio:, dim:]), dim=2)
        gate = torch.cat((gate[:, :, :ratio, :dim], gate[:, :, ratio:, dim:]), dim=2)
    # Where there is no window nothing is masked: the row goes to scratch, and stays finite.
    gate = gate.masked_fill(none & (windows >= 0)[:, :, None, None], float("-inf"))
    mixed = (kv * gate.softmax(dim=2)).sum(dim=2)  # float [B, K, D]
    angles = angles_at(rope_table, (windows * ratio).clamp(min=0))
    return rotate_tail(normalise_rms(mixed, norm_weight, eps), angles)
