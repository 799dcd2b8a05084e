# SPDX-License-Identifier: Apache-2.0
"""The round's own ops: read the inbox, open a rectangle, accept, commit, write drafts.

R rows of T tokens, B rows in the batch, W queries a row, C queries whose next token is chosen,
G page-table groups, P pages a row, V vocabulary. Row 0 is scratch: writes that must not happen go
to its first column, which always holds 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.registry import nothing, op

_STATE_WRITES = (
    "Tensor(a!) tokens, Tensor(b!) known_lens, Tensor(c!) computed_lens, Tensor(d!) draft_lens, "
    "Tensor(e!) limit_lens, Tensor(f!) minimum_lens, Tensor(g!) page_tables, "
    "Tensor(h!) temperature, Tensor(i!) top_p, Tensor(j!) min_p, Tensor(k!) top_k, "
    "Tensor(l!) seeds, Tensor(n!) uses, Tensor(m!) stop_ids"
)


@op(
    f"apply_inbox(Tensor inbox, {_STATE_WRITES}, int admission_words, int batch, int feed_width, "
    "int page_writes) -> ()",
    fake=nothing,
)
def apply_inbox(
    inbox: Tensor,  # int32 [words]
    tokens: Tensor,  # int32 [R, T]
    known_lens: Tensor,  # int32 [R]
    computed_lens: Tensor,  # int32 [R]
    draft_lens: Tensor,  # int32 [R]
    limit_lens: Tensor,  # int32 [R]
    minimum_lens: Tensor,  # int32 [R]
    page_tables: Tensor,  # int32 [G, R, P]
    temperature: Tensor,  # float32 [R]
    top_p: Tensor,  # float32 [R]
    min_p: Tensor,  # float32 [R]
    top_k: Tensor,  # int32 [R]
    seeds: Tensor,  # int64 [R]
    uses: Tensor,  # int32 [R]
    stop_ids: Tensor,  # int32 [R, S]
    admission_words: int,
    batch: int,
    feed_width: int,
    page_writes: int,
) -> None:
    """Admissions, then feeds, then page writes, in the order of `state.letters.InboxLayout`.

    An admission sets every per-row value and zeroes the row's page tables, so that nothing of an
    earlier tenant can be followed. Its stop ids are the last of its `admission_words` words.
    """
    words = admission_words
    rows, spans, feed, writes = _split_inbox(inbox, batch, words, feed_width, page_writes)
    fields = inbox[batch : batch + batch * words].view(batch, words)  # int32 [B, words]
    admit = fields[:, 0] != 0  # bool [B]
    target = torch.where(admit, rows, 0).long()  # int64 [B]

    def put(column: Tensor, value: Tensor) -> None:
        keep = column[:1].expand_as(value)
        live = admit if value.dim() == 1 else admit[:, None]
        column.index_put_((target,), torch.where(live, value.to(column.dtype), keep))

    for column, index in ((known_lens, 1), (computed_lens, 2), (limit_lens, 3), (minimum_lens, 4)):
        put(column, fields[:, index])
    put(top_k, fields[:, 6])
    bits = torch.stack((fields[:, 5], fields[:, 7], fields[:, 8]), 1).view(
        torch.float32
    )  # float32 [B, 3]
    for column, index in ((temperature, 0), (top_p, 1), (min_p, 2)):
        put(column, bits[:, index])
    put(seeds, (fields[:, 10].long() << 32) | (fields[:, 9].long() & 0xFFFFFFFF))
    put(uses, fields[:, 11])
    put(stop_ids, fields[:, words - stop_ids.shape[1] :])
    put(draft_lens, torch.zeros_like(rows))
    page_tables.index_fill_(1, target, 0)

    column = torch.arange(feed_width, device=inbox.device, dtype=torch.int32)  # int32 [F]
    live = column < spans[:, 1:]  # bool [B, F]
    place = torch.where(live, spans[:, :1] + column, 0).long()
    where = torch.where(live, rows[:, None], 0).long()
    tokens.index_put_((where, place), torch.where(live, feed, 0))
    row, group, page_column, page = writes.long().unbind(1)
    page_tables.index_put_((group, row, page_column), page.int())


def _split_inbox(
    inbox: Tensor, batch: int, words: int, feed_width: int, page_writes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rows [B], feed spans [B, 2], feed tokens [B, F], page writes [N, 4]; views of the letter."""
    at = batch + batch * words
    spans = inbox[at : at + 2 * batch].view(batch, 2)
    at += 2 * batch
    feed = inbox[at : at + batch * feed_width].view(batch, feed_width)
    at += batch * feed_width
    return inbox[:batch], spans, feed, inbox[at : at + 4 * page_writes].view(page_writes, 4)


def _fake_open_round(known_lens: Tensor, *args: object) -> tuple[Tensor, Tensor, Tensor]:
    rows = args[3]
    assert isinstance(rows, Tensor)
    return torch.empty_like(rows), torch.empty_like(rows), torch.empty_like(rows)


@op(
    "open_round(Tensor known_lens, Tensor computed_lens, Tensor draft_lens, Tensor limit_lens, "
    "Tensor rows, int width, int guesses) -> (Tensor, Tensor, Tensor)",
    fake=_fake_open_round,
)
def open_round(
    known_lens: Tensor,  # int32 [R]
    computed_lens: Tensor,  # int32 [R]
    draft_lens: Tensor,  # int32 [R]
    limit_lens: Tensor,  # int32 [R]
    rows: Tensor,  # int32 [B]
    width: int,
    guesses: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(start, given, query_lens), int32 [B] each: what the rectangle covers of every row.

    `given` certain tokens from `start` on, then drafts, if the certain ones reach `known`. At most
    `guesses` drafts, and none whose successor would pass the row's limit. An idle row has 0 of
    both.
    """
    at = rows.long()
    start, known, limit = computed_lens[at], known_lens[at], limit_lens[at]
    idle = (known >= limit) | (rows == 0)
    given = torch.where(idle, 0, (known - start).clamp(max=width))
    caught_up = (given > 0) & (start + given == known)
    drafts = torch.minimum(draft_lens[at], torch.minimum(width - given, limit - known - 1))
    guessed = torch.where(caught_up, drafts.clamp(min=0, max=guesses), 0)
    return start, given, given + guessed


def _fake_open_step(
    tokens: Tensor,
    page_tables: Tensor,
    rows: Tensor,
    start: Tensor,
    query_lens: Tensor,
    width: int,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = (rows.shape[0], width)
    ints = [tokens.new_empty(shape) for _ in range(3)]
    slots = tokens.new_empty((page_tables.shape[0], *shape), dtype=torch.int64)
    return ints[0], ints[1], ints[2], slots


@op(
    "open_step(Tensor tokens, Tensor page_tables, Tensor rows, Tensor start, Tensor query_lens, "
    "int width, int shift, int[] page_sizes) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_open_step,
)
def open_step(
    tokens: Tensor,  # int32 [R, T]
    page_tables: Tensor,  # int32 [G, R, P]
    rows: Tensor,  # int32 [B]
    start: Tensor,  # int32 [B]
    query_lens: Tensor,  # int32 [B]
    width: int,
    shift: int,
    page_sizes: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, positions, kv_lens: int32 [B, W]; write_slots: int64 [G, B, W]) of a rectangle.

    Column j of a row stands for position start + j and reads token start + j + shift. Columns past
    `query_lens` are padding: kv_len 0, write slot 0, any legal token and position.
    """
    at = rows.long()[:, None]  # int64 [B, 1]
    last = tokens.shape[1] - 1
    column = torch.arange(width, device=tokens.device, dtype=torch.int32)
    live = column < query_lens[:, None]  # bool [B, W]
    positions = torch.where(live, start[:, None] + column, 0)
    seen = tokens[at, (positions + shift).clamp(max=last).long()]
    slots = []
    for group, size in enumerate(page_sizes):
        page = page_tables[group][at, (positions // size).long()].long()
        slots.append(torch.where(live, page * size + positions % size, 0))
    kv_lens = torch.where(live, positions + 1, 0)
    return torch.where(live, seen, 0), positions, kv_lens, torch.stack(slots)


def _fake_commit(
    tokens: Tensor,
    known: Tensor,
    computed: Tensor,
    drafts: Tensor,
    limit: Tensor,
    outbox: Tensor,
    stop_ids: Tensor,
    rows: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(rows)


@op(
    "commit(Tensor(a!) tokens, Tensor(b!) known_lens, Tensor(c!) computed_lens, "
    "Tensor(d!) draft_lens, Tensor(e!) limit_lens, Tensor(f!) outbox, Tensor stop_ids, "
    "Tensor rows, Tensor start, Tensor given, Tensor query_lens, Tensor seen, Tensor choice) "
    "-> (Tensor, Tensor)",
    fake=_fake_commit,
)
def commit(
    tokens: Tensor,  # int32 [R, T]
    known_lens: Tensor,  # int32 [R]
    computed_lens: Tensor,  # int32 [R]
    draft_lens: Tensor,  # int32 [R]
    limit_lens: Tensor,  # int32 [R]
    outbox: Tensor,  # int32 [B, 5 + C or more]
    stop_ids: Tensor,  # int32 [R, S]
    rows: Tensor,  # int32 [B]
    start: Tensor,  # int32 [B]
    given: Tensor,  # int32 [B]
    query_lens: Tensor,  # int32 [B]
    seen: Tensor,  # int32 [B, C]  tokens at the C queries
    choice: Tensor,  # int32 [B, C]  the target's own token after each of them
) -> tuple[Tensor, Tensor]:
    """Accept the drafts that the target would have chosen, and append what was decided.

    The C queries are all columns where drafts are verified (C = W); in a prompt's rectangle
    (C = 1) the last certain one. A draft is accepted if it equals the choice at the query before
    it and everything before it was accepted; the run of fresh tokens ends at a stop id or at the
    row's limit. A choice of -1 is none: it ends the row with an error, and is not appended. One of
    -2 is put off: it ends the run alone. Returns
    (accept_lens, live), int32 [B]: how far `computed` advanced, and whether the row may be drafted
    for. Writes the first words of the outbox as `state.letters.OutboxLayout` says.
    """
    at = rows.long()
    known, limit = known_lens[at], limit_lens[at]
    choices = choice.shape[1]
    index = torch.arange(choices, device=rows.device, dtype=torch.int32)
    first = (given - 1).clamp(min=0) if choices == 1 else torch.zeros_like(given)
    column = first[:, None] + index  # int32 [B, C]
    caught_up = (given > 0) & (start + given == known)  # bool [B]
    fresh = _accepted_run(given, query_lens, column, seen, choice) & caught_up[:, None]
    fresh, stopped, full, failed = _cut_at_end(fresh, choice, stop_ids[at], limit - known)
    count = fresh.sum(1, dtype=torch.int32)
    accept_lens = torch.where(caught_up, given - 1 + count, given)
    finished = stopped | full | failed

    place = torch.where(fresh, start[:, None] + column + 1, 0).long()
    where = torch.where(fresh, rows[:, None], 0).long()
    tokens.index_put_((where, place), torch.where(fresh, choice, 0))
    known_lens.index_put_((at,), known + count)
    computed_lens.index_put_((at,), start + accept_lens)
    draft_lens.index_put_((at,), torch.zeros_like(rows))
    limit_lens.index_put_((at,), torch.where(finished, known + count, limit))

    after = torch.cat([seen[:, 1:], torch.full_like(seen[:, :1], -1)], 1)
    drafted = fresh & (column + 1 < query_lens[:, None]) & (after == choice)
    finish = torch.where(stopped, 1, torch.where(full, 2, torch.where(failed, 3, 0))).int()
    agreed = drafted.sum(1, dtype=torch.int32)
    words = (count, finish, start + accept_lens, query_lens - given, agreed)
    packed = choice.gather(1, ((given - 1 - first)[:, None] + index).clamp(0, choices - 1).long())
    packed = torch.where(index < count[:, None], packed, -1)
    outbox[:, : 5 + choices].copy_(torch.cat([torch.stack(words, 1), packed], 1))
    return accept_lens, (caught_up & ~finished).int()


def _accepted_run(
    given: Tensor, query_lens: Tensor, column: Tensor, seen: Tensor, choice: Tensor
) -> Tensor:
    """bool [B, C]: queries behind which a token is decided, were there no end.

    That is the last certain query, and each draft that equals the choice before it while all
    before it did.
    """
    before = torch.cat([seen[:, :1], choice[:, :-1]], 1)
    draft = (column >= given[:, None]) & (column < query_lens[:, None])
    run = ((column < given[:, None]) | (draft & (seen == before))).int().cumprod(1).bool()
    return run & (column >= given[:, None] - 1)


def _cut_at_end(
    fresh: Tensor, choice: Tensor, stop_ids: Tensor, room: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fresh bool [B, C] without what follows a row's first end; how it ended, each bool [B].

    By a stop id, by its limit, or by a choice below 0, which is cut off too; -2 is no end.
    room int32 [B]: tokens
    that the row may still take. A stop id in the last place is a stop.
    """
    rank = fresh.int().cumsum(1) - 1
    void = fresh & (choice < 0)
    stops = fresh & (choice[:, :, None] == stop_ids[:, None, :]).any(2) & ~void
    full = fresh & (rank >= room[:, None] - 1)
    ends = (stops | full | void).int()
    fresh = fresh & (ends.cumsum(1) - ends == 0)
    failed = (fresh & (choice == -1)).any(1)
    fresh = fresh & ~void
    stopped = (fresh & stops).any(1)
    return fresh, stopped, (fresh & full).any(1) & ~stopped, failed


def _fake_write_draft(
    tokens: Tensor, draft_lens: Tensor, limit_lens: Tensor, rows: Tensor, *_: object
) -> Tensor:
    return torch.empty_like(rows)


@op(
    "write_draft(Tensor(a!) tokens, Tensor(b!) draft_lens, Tensor limit_lens, Tensor rows, "
    "Tensor place, Tensor live, Tensor guess) -> Tensor",
    fake=_fake_write_draft,
)
def write_draft(
    tokens: Tensor,  # int32 [R, T]
    draft_lens: Tensor,  # int32 [R]
    limit_lens: Tensor,  # int32 [R]
    rows: Tensor,  # int32 [B]
    place: Tensor,  # int32 [B]  absolute position of the guess
    live: Tensor,  # int32 [B]  1 where the row is drafted for
    guess: Tensor,  # int32 [B]
) -> Tensor:
    """Write one draft a row behind the drafts already there; returns int32 [B], 1 where written.

    A draft at or past the row's limit could never be used and is not written; nor is a guess of -1.
    """
    at = rows.long()
    kept = (live > 0) & (place < limit_lens[at]) & (guess >= 0)
    where = torch.where(kept, rows, 0).long()
    tokens.index_put_((where, torch.where(kept, place, 0).long()), torch.where(kept, guess, 0))
    draft_lens.index_put_((where,), torch.where(kept, draft_lens[at] + 1, 0))
    return kept.int()


def _fake_lookup(
    tokens: Tensor, known_lens: Tensor, rows: Tensor, depth: int, *_: object
) -> tuple[Tensor, Tensor]:
    return rows.new_empty((rows.shape[0], depth)), torch.empty_like(rows)


@op(
    "lookup(Tensor tokens, Tensor known_lens, Tensor rows, int depth, int longest, int shortest) "
    "-> (Tensor, Tensor)",
    fake=_fake_lookup,
)
def lookup(
    tokens: Tensor,  # int32 [R, T]
    known_lens: Tensor,  # int32 [R]
    rows: Tensor,  # int32 [B]
    depth: int,
    longest: int,
    shortest: int,
) -> tuple[Tensor, Tensor]:
    """(guesses int32 [B, depth], lens int32 [B]): what followed the row's ending the last time.

    Searches the row for its last `longest` tokens, then for fewer, down to `shortest`; the latest
    occurrence of the longest match wins. `lens` counts the certain tokens that followed it, at
    most `depth`; 0 where nothing matched.
    """
    at = rows.long()
    text, known = tokens[at], known_lens[at][:, None]  # int32 [B, T], [B, 1]
    ends = torch.arange(
        text.shape[1], device=tokens.device, dtype=torch.int32
    )  # a match's last token
    best = torch.full_like(rows, -1)
    matched = torch.ones_like(text, dtype=torch.bool)
    for length in range(1, longest + 1):
        want = text.gather(1, (known - length).clamp(min=0).long())  # int32 [B, 1]
        have = text.roll(length - 1, 1)  # have[e] = text[e - length + 1]
        matched = matched & (have == want) & (ends >= length - 1) & (ends < known - 1)
        if length >= shortest:
            latest = torch.where(matched, ends, -1).amax(1)
            best = torch.where(latest >= 0, latest, best)
    follow = best[:, None] + 1 + torch.arange(depth, device=tokens.device, dtype=torch.int32)
    guesses = text.gather(1, follow.clamp(0, text.shape[1] - 1).long())
    lens = torch.where(best >= 0, (known[:, 0] - 1 - best).clamp(max=depth), 0)
    return guesses, lens.int()
