# SPDX-License-Identifier: Apache-2.0
"""The round's own ops, one launch each. They move a few integers: what counts is their number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.registry import implement


@triton.jit
def _admit(
    letter, row, known_lens, computed_lens, draft_lens, limit_lens, minimum_lens, page_tables,
    temperature, top_p, min_p, top_k, seeds, uses, stop_ids, R, P,
    WORDS: tl.constexpr, STOPS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set every value of a row from the words at `letter`, and clear its page tables."""
    tl.store(known_lens + row, tl.load(letter + 1))
    tl.store(computed_lens + row, tl.load(letter + 2))
    tl.store(limit_lens + row, tl.load(letter + 3))
    tl.store(minimum_lens + row, tl.load(letter + 4))
    tl.store(draft_lens + row, 0)
    tl.store(temperature + row, tl.load(letter + 5).to(tl.float32, bitcast=True))
    tl.store(top_k + row, tl.load(letter + 6))
    tl.store(top_p + row, tl.load(letter + 7).to(tl.float32, bitcast=True))
    tl.store(min_p + row, tl.load(letter + 8).to(tl.float32, bitcast=True))
    low = tl.load(letter + 9).to(tl.uint32, bitcast=True).to(tl.int64)
    tl.store(seeds + row, (tl.load(letter + 10).to(tl.int64) << 32) | low)
    tl.store(uses + row, tl.load(letter + 11))
    stop, lane = tl.arange(0, STOPS), tl.arange(0, BLOCK)
    tl.store(stop_ids + row * STOPS + stop, tl.load(letter + WORDS - STOPS + stop))
    for group in range(GROUPS):
        own = page_tables + (group * R + row).to(tl.int64) * P
        for at in range(0, P, BLOCK):
            tl.store(own + at + lane, 0, mask=at + lane < P)


@triton.jit
def _apply_inbox(
    inbox, tokens, known_lens, computed_lens, draft_lens, limit_lens, minimum_lens, page_tables,
    temperature, top_p, min_p, top_k, seeds, uses, stop_ids,
    batch, feed_width, page_writes, T, R, P,
    WORDS: tl.constexpr, STOPS: tl.constexpr, GROUPS: tl.constexpr, BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b serves batch row b; the last one writes pages of rows that are not in the batch."""
    b = tl.program_id(0)
    lane, member = tl.arange(0, BLOCK), tl.arange(0, BATCH)
    spans = inbox + batch + batch * WORDS
    feeds = spans + 2 * batch
    writes = feeds + batch * feed_width
    row = tl.load(inbox + b, mask=b < batch, other=0)
    letter = inbox + batch + b * WORDS
    if tl.load(letter, mask=b < batch, other=0) != 0:
        _admit(
            letter, row, known_lens, computed_lens, draft_lens, limit_lens, minimum_lens,
            page_tables, temperature, top_p, min_p, top_k, seeds, uses, stop_ids, R, P,
            WORDS, STOPS, GROUPS, BLOCK,
        )  # fmt: skip
    start = tl.load(spans + 2 * b, mask=b < batch, other=0)
    count = tl.load(spans + 2 * b + 1, mask=b < batch, other=0)
    line = tokens + row.to(tl.int64) * T + start
    for at in range(0, count, BLOCK):
        live = at + lane < count
        fed = tl.load(feeds + b * feed_width + at + lane, mask=live)
        tl.store(line + at + lane, fed, mask=live)
    tl.debug_barrier()  # the tables were cleared by other threads of this program
    members = tl.load(inbox + member, mask=member < batch, other=-1)
    for at in range(0, page_writes, BLOCK):
        live = at + lane < page_writes
        entry = writes + 4 * (at + lane)
        owner = tl.load(entry, mask=live, other=0)
        strange = tl.sum((owner[:, None] == members[None, :]).to(tl.int32), 1) == 0
        mine = live & (owner != 0) & tl.where(b < batch, owner == row, strange)
        group = tl.load(entry + 1, mask=mine, other=0)
        column = tl.load(entry + 2, mask=mine, other=0)
        page = tl.load(entry + 3, mask=mine, other=0)
        tl.store(page_tables + (group * R + owner).to(tl.int64) * P + column, page, mask=mine)


@implement("apply_inbox", "cuda")
def apply_inbox(
    inbox: Tensor,
    tokens: Tensor,
    known_lens: Tensor,
    computed_lens: Tensor,
    draft_lens: Tensor,
    limit_lens: Tensor,
    minimum_lens: Tensor,
    page_tables: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    seeds: Tensor,
    uses: Tensor,
    stop_ids: Tensor,
    admission_words: int,
    batch: int,
    feed_width: int,
    page_writes: int,
) -> None:
    columns = (known_lens, computed_lens, draft_lens, limit_lens, minimum_lens)
    params = (temperature, top_p, min_p, top_k, seeds, uses, stop_ids)
    groups, rows, pages = page_tables.shape
    _apply_inbox[(batch + 1,)](
        inbox,
        tokens,
        *columns,
        page_tables,
        *params,
        batch,
        feed_width,
        page_writes,
        tokens.shape[1],
        rows,
        pages,
        WORDS=admission_words,
        STOPS=stop_ids.shape[1],
        GROUPS=groups,
        BATCH=triton.next_power_of_2(batch),
        BLOCK=128,
    )


@triton.jit
def _open_round(
    known_lens, computed_lens, draft_lens, limit_lens, rows, start_out, given_out, query_out,
    batch, width, guesses, BATCH: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BATCH)
    live = lane < batch
    row = tl.load(rows + lane, mask=live, other=0)
    start = tl.load(computed_lens + row, mask=live, other=0)
    known = tl.load(known_lens + row, mask=live, other=0)
    limit = tl.load(limit_lens + row, mask=live, other=0)
    drafts = tl.load(draft_lens + row, mask=live, other=0)
    idle = (known >= limit) | (row == 0)
    given = tl.where(idle, 0, tl.minimum(known - start, width))
    caught_up = (given > 0) & (start + given == known)
    drafts = tl.minimum(drafts, tl.minimum(width - given, limit - known - 1))
    guessed = tl.where(caught_up, tl.minimum(tl.maximum(drafts, 0), guesses), 0)
    tl.store(start_out + lane, start, mask=live)
    tl.store(given_out + lane, given, mask=live)
    tl.store(query_out + lane, given + guessed, mask=live)


@implement("open_round", "cuda")
def open_round(
    known_lens: Tensor,
    computed_lens: Tensor,
    draft_lens: Tensor,
    limit_lens: Tensor,
    rows: Tensor,
    width: int,
    guesses: int,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (3, rows.shape[0])
    start, given, query_lens = torch.empty(shape, dtype=torch.int32, device=rows.device)
    _open_round[(1,)](
        known_lens, computed_lens, draft_lens, limit_lens, rows, start, given, query_lens,
        rows.shape[0], width, guesses, BATCH=triton.next_power_of_2(rows.shape[0]),
    )  # fmt: skip
    return start, given, query_lens


@triton.jit
def _open_step(
    tokens, page_tables, rows, start_in, query_lens,
    seen_out, positions_out, kv_lens_out, slots_out, width, shift, T, R, P, batch,
    SIZES: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(rows + b).to(tl.int64)
    start = tl.load(start_in + b)
    live = column < tl.load(query_lens + b)
    position = tl.where(live, start + column, 0)
    place = tl.minimum(position + shift, T - 1)
    seen = tl.load(tokens + row * T + place, mask=live & inside, other=0)
    out = b * width + column
    tl.store(seen_out + out, seen, mask=inside)
    tl.store(positions_out + out, position, mask=inside)
    tl.store(kv_lens_out + out, tl.where(live, position + 1, 0), mask=inside)
    for group in tl.static_range(GROUPS):
        size = SIZES[group]
        table = page_tables + (group * R + row) * P
        page = tl.load(table + position // size, mask=live & inside, other=0).to(tl.int64)
        slot = tl.where(live, page * size + position % size, 0)
        tl.store(slots_out + group * batch * width + out, slot, mask=inside)


@implement("open_step", "cuda")
def open_step(
    tokens: Tensor,
    page_tables: Tensor,
    rows: Tensor,
    start: Tensor,
    query_lens: Tensor,
    width: int,
    shift: int,
    page_sizes: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, (groups, count, pages) = rows.shape[0], page_tables.shape
    ints = torch.empty((3, batch, width), dtype=torch.int32, device=rows.device)
    seen, positions, kv_lens = ints
    slots = torch.empty((groups, batch, width), dtype=torch.int64, device=rows.device)
    block = min(1024, triton.next_power_of_2(width))
    _open_step[(batch, triton.cdiv(width, block))](
        tokens, page_tables, rows, start, query_lens, seen, positions, kv_lens, slots,
        width, shift, tokens.shape[1], count, pages, batch,
        SIZES=tuple(page_sizes), GROUPS=groups, BLOCK=block,
    )  # fmt: skip
    return seen, positions, kv_lens, slots


@triton.jit
def _commit(
    tokens, known_lens, computed_lens, draft_lens, limit_lens, outbox, stop_ids,
    rows, starts, givens, query_lens, seen_in, choice_in, accept_out, live_out,
    T, seen_stride, choice_stride, out_stride,
    CHOICES: tl.constexpr, STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row = tl.load(rows + b)
    start, given = tl.load(starts + b), tl.load(givens + b)
    query_len = tl.load(query_lens + b)
    known, limit = tl.load(known_lens + row), tl.load(limit_lens + row)
    index = tl.arange(0, BLOCK)
    inside = index < CHOICES
    first = tl.maximum(given - 1, 0) if CHOICES == 1 else 0
    column, caught_up = first + index, (given > 0) & (start + given == known)
    own_seen, own_choice = seen_in + b * seen_stride, choice_in + b * choice_stride
    seen = tl.load(own_seen + index, mask=inside, other=0)
    choice = tl.load(own_choice + index, mask=inside, other=0)
    before = tl.load(own_choice + index - 1, mask=inside & (index > 0), other=0)
    before = tl.where(index == 0, tl.load(own_seen), before)
    after = tl.load(own_seen + index + 1, mask=index + 1 < CHOICES, other=-1)

    agrees = (column >= given) & (column < query_len) & (seen == before)
    broken = 1 - ((column < given) | agrees).to(tl.int32)
    run = inside & (tl.cumsum(broken, 0) == 0)
    fresh = run & caught_up & (column >= given - 1)
    rank = tl.cumsum(fresh.to(tl.int32), 0) - 1
    stops = index < 0
    for nth in tl.static_range(STOPS):
        stops = stops | (choice == tl.load(stop_ids + row * STOPS + nth))
    void = fresh & (choice < 0)
    stops = stops & fresh & (void == 0)
    full = fresh & (rank >= limit - known - 1)
    ends = (stops | full | void).to(tl.int32)
    fresh = fresh & (tl.cumsum(ends, 0) - ends == 0)
    failed = tl.sum((fresh & (choice == -1)).to(tl.int32), 0) > 0
    fresh = fresh & (void == 0)
    stopped = tl.sum((fresh & stops).to(tl.int32), 0) > 0
    finished = failed | (tl.sum((fresh & (stops | full)).to(tl.int32), 0) > 0)
    count = tl.sum(fresh.to(tl.int32), 0)
    drafted = fresh & (column + 1 < query_len) & (after == choice)

    tl.store(tokens + row.to(tl.int64) * T + start + column + 1, choice, mask=fresh)
    accept = tl.where(caught_up, given - 1 + count, given)
    tl.store(known_lens + row, known + count)
    tl.store(computed_lens + row, start + accept)
    tl.store(draft_lens + row, 0)
    tl.store(limit_lens + row, tl.where(finished, known + count, limit))
    tl.store(accept_out + b, accept)
    tl.store(live_out + b, (caught_up & (finished == 0)).to(tl.int32))

    letter = outbox + b * out_stride
    tl.store(letter, count)
    tl.store(letter + 1, tl.where(stopped, 1, tl.where(failed, 3, tl.where(finished, 2, 0))))
    tl.store(letter + 2, start + accept)
    tl.store(letter + 3, query_len - given)
    tl.store(letter + 4, tl.sum(drafted.to(tl.int32), 0))
    place = tl.minimum(tl.maximum(given - 1 - first + index, 0), CHOICES - 1)
    packed = tl.load(own_choice + place, mask=index < count, other=-1)
    tl.store(letter + 5 + index, packed, mask=inside)


@implement("commit", "cuda")
def commit(
    tokens: Tensor,
    known_lens: Tensor,
    computed_lens: Tensor,
    draft_lens: Tensor,
    limit_lens: Tensor,
    outbox: Tensor,
    stop_ids: Tensor,
    rows: Tensor,
    start: Tensor,
    given: Tensor,
    query_lens: Tensor,
    seen: Tensor,
    choice: Tensor,
) -> tuple[Tensor, Tensor]:
    assert seen.stride(1) == choice.stride(1) == 1 or choice.shape[1] == 1
    accept_lens, live = torch.empty((2, rows.shape[0]), dtype=torch.int32, device=rows.device)
    _commit[(rows.shape[0],)](
        tokens, known_lens, computed_lens, draft_lens, limit_lens, outbox, stop_ids,
        rows, start, given, query_lens, seen, choice, accept_lens, live,
        tokens.shape[1], seen.stride(0), choice.stride(0), outbox.stride(0),
        CHOICES=choice.shape[1], STOPS=stop_ids.shape[1],
        BLOCK=triton.next_power_of_2(choice.shape[1]), num_warps=1,
    )  # fmt: skip
    return accept_lens, live


@triton.jit
def _write_draft(
    tokens, draft_lens, limit_lens, rows, place_in, live_in, guess_in, kept_out,
    batch, T, guess_stride, BATCH: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BATCH)
    inside = lane < batch
    row = tl.load(rows + lane, mask=inside, other=0)
    place = tl.load(place_in + lane, mask=inside, other=0)
    live = tl.load(live_in + lane, mask=inside, other=0) > 0
    kept = inside & live & (place < tl.load(limit_lens + row, mask=inside, other=0))
    guess = tl.load(guess_in + lane * guess_stride, mask=kept, other=0)
    kept = kept & (guess >= 0)
    tl.store(tokens + row.to(tl.int64) * T + place, guess, mask=kept)
    drafts = tl.load(draft_lens + row, mask=kept, other=0)
    tl.store(draft_lens + row, drafts + 1, mask=kept)
    tl.store(kept_out + lane, kept.to(tl.int32), mask=inside)


@implement("write_draft", "cuda")
def write_draft(
    tokens: Tensor,
    draft_lens: Tensor,
    limit_lens: Tensor,
    rows: Tensor,
    place: Tensor,
    live: Tensor,
    guess: Tensor,
) -> Tensor:
    kept = torch.empty_like(rows)
    _write_draft[(1,)](
        tokens, draft_lens, limit_lens, rows, place, live, guess, kept,
        rows.shape[0], tokens.shape[1], guess.stride(0),
        BATCH=triton.next_power_of_2(rows.shape[0]), num_warps=1,
    )  # fmt: skip
    return kept
