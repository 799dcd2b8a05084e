# SPDX-License-Identifier: Apache-2.0
"""The round's own ops against plain Python, row by row."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from freewheel import ops

ROWS, LENGTH, STOPS = 6, 40, 8


@dataclass
class Row:
    """One row of state, as Python sees it."""

    tokens: list[int]
    known: int
    computed: int
    drafts: int
    limit: int
    stops: list[int]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_row(rng: random.Random, width: int) -> Row:
    known = rng.randint(1, LENGTH - 10)
    computed = max(0, known - rng.choice([0, 1, 1, 1, 2, width, width + 3]))
    limit = min(LENGTH, known + rng.choice([0, 1, 2, 3, 8]))
    stops = rng.sample(range(6), rng.randint(0, 2))
    tokens = [rng.randrange(6) for _ in range(LENGTH)]
    return Row(tokens, known, computed, rng.randint(0, 7), limit, stops)


def opened(row: Row, width: int, guesses: int) -> tuple[int, int]:
    """(given, query_len) by the rules, one at a time."""
    if row.known >= row.limit:
        return 0, 0
    given = min(row.known - row.computed, width)
    if given == 0 or row.computed + given < row.known:
        return given, given
    drafts = min(row.drafts, width - given, guesses, row.limit - row.known - 1)
    return given, given + max(0, drafts)


def committed(row: Row, width: int, choice: dict[int, int]) -> tuple[list[int], int, int, int]:
    """(tokens appended, finish code, accepted queries, drafts among the tokens), one at a time.

    choice: absolute position of a query -> the target's token after it.
    """
    given, query_len = opened(row, width, min(width, 8) - 1 if width <= 8 else 0)
    if given == 0 or row.computed + given < row.known:
        return [], 0, given, 0
    out: list[int] = []
    agreed = 0
    while True:
        at = row.known - 1 + len(out)
        token = choice[at]
        if token < 0:
            return out, 3, given - 1 + len(out), agreed
        out.append(token)
        drafted = at + 1 < row.computed + query_len
        right = drafted and row.tokens[at + 1] == token
        agreed += right
        if token in row.stops:
            return out, 1, given - 1 + len(out), agreed
        if row.known + len(out) == row.limit:
            return out, 2, given - 1 + len(out), agreed
        if not right:
            return out, 0, given - 1 + len(out), agreed


def state_of(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Row 0 is scratch."""
    scratch = Row([0] * LENGTH, 0, 0, 0, 0, [])
    every = [scratch, *rows]
    return {
        "tokens": torch.tensor([r.tokens for r in every], dtype=torch.int32),
        "known": ints(*(r.known for r in every)),
        "computed": ints(*(r.computed for r in every)),
        "drafts": ints(*(r.drafts for r in every)),
        "limit": ints(*(r.limit for r in every)),
        "stops": torch.tensor([r.stops + [-1] * (STOPS - len(r.stops)) for r in every]).int(),
    }


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("seed", range(25))
def test_a_round_commits_what_a_row_by_row_walk_commits(width: int, seed: int) -> None:
    rng = random.Random(seed * 100 + width)
    rows = [random_row(rng, width) for _ in range(ROWS)]
    state = state_of(rows)
    batch = [*rng.sample(range(1, ROWS + 1), 4), 0, 0]
    batch_rows = ints(*batch)
    choices = width if width <= 8 else 1
    start, given, query_lens = ops.open_round(
        state["known"],
        state["computed"],
        state["drafts"],
        state["limit"],
        batch_rows,
        width,
        choices - 1,
    )
    table = torch.zeros(1, ROWS + 1, LENGTH, dtype=torch.int32)
    seen, positions, kv_lens, _ = ops.open_step(
        state["tokens"], table, batch_rows, start, query_lens, width, 0, (1,)
    )
    choice_of = [{p: rng.randrange(6) for p in range(LENGTH)} for _ in batch]
    for b, index in enumerate(batch):  # make long runs of agreement likely
        for p in rng.sample(range(LENGTH), 2):
            choice_of[b][p] = -1  # nothing could be chosen there
        for p in range(LENGTH - 1):
            if index and rng.random() < 0.7:
                choice_of[b][p] = rows[index - 1].tokens[p + 1]
    columns = range(width) if width <= 8 else [0]
    if width > 8:
        last = (given - 1).clamp(min=0)[:, None].long()
        seen, positions = seen.gather(1, last), positions.gather(1, last)
    choice = torch.tensor(
        [[choice_of[b][int(positions[b, c])] for c in columns] for b in range(len(batch))]
    ).int()
    outbox = torch.full((len(batch), 5 + choices), -7, dtype=torch.int32)
    before = {name: tensor.clone() for name, tensor in state.items()}
    accept_lens, live = ops.commit(
        state["tokens"],
        state["known"],
        state["computed"],
        state["drafts"],
        state["limit"],
        outbox,
        state["stops"],
        batch_rows,
        start,
        given,
        query_lens,
        seen,
        choice,
    )
    for b, index in enumerate(batch):
        if index == 0:
            assert outbox[b].tolist() == [0, 0, 0, 0, 0, *[-1] * choices]
            assert (int(accept_lens[b]), int(live[b]), kv_lens[b].tolist()) == (0, 0, [0] * width)
            continue
        row = rows[index - 1]
        want_given, want_query = opened(row, width, choices - 1)
        assert (int(given[b]), int(query_lens[b])) == (want_given, want_query)
        tokens, finish, accepted, agreed = committed(row, width, choice_of[b])
        caught_up = want_given > 0 and row.computed + want_given == row.known
        assert outbox[b].tolist() == [
            len(tokens),
            finish,
            row.computed + accepted,
            want_query - want_given,
            agreed,
            *tokens,
            *[-1] * (choices - len(tokens)),
        ]
        assert int(accept_lens[b]) == accepted
        assert int(live[b]) == int(caught_up and not finish)
        assert int(state["known"][index]) == row.known + len(tokens)
        assert int(state["computed"][index]) == row.computed + accepted
        assert int(state["limit"][index]) == (row.known + len(tokens) if finish else row.limit)
        assert state["tokens"][index, row.known : row.known + len(tokens)].tolist() == tokens
    untouched = [r for r in range(1, ROWS + 1) if r not in batch]
    for name, tensor in state.items():
        assert torch.equal(tensor[untouched], before[name][untouched])
        assert not tensor[0].any() or name == "stops"


def test_padding_queries_have_no_keys_and_write_to_the_scratch_slot() -> None:
    tokens = torch.arange(20, dtype=torch.int32).view(2, 10)
    tables = torch.tensor([[[0, 0, 0], [5, 7, 9]], [[0, 0, 0], [2, 4, 6]]], dtype=torch.int32)
    seen, positions, kv_lens, slots = ops.open_step(
        tokens, tables, ints(1, 0), ints(3, 0), ints(3, 0), 4, 1, (4, 8)
    )
    assert kv_lens.tolist() == [[4, 5, 6, 0], [0, 0, 0, 0]]
    assert positions[0, :3].tolist() == [3, 4, 5]
    assert seen[0, :3].tolist() == [14, 15, 16]
    assert slots[0].tolist() == [[5 * 4 + 3, 7 * 4, 7 * 4 + 1, 0], [0, 0, 0, 0]]
    assert slots[1].tolist() == [[2 * 8 + 3, 2 * 8 + 4, 2 * 8 + 5, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("seed", range(20))
def test_lookup_copies_what_followed_the_latest_longest_match(seed: int) -> None:
    rng = random.Random(seed)
    depth, longest, shortest = 3, 4, 2
    texts = [[rng.randrange(3) for _ in range(LENGTH)] for _ in range(3)]
    lens = [rng.randint(1, LENGTH) for _ in texts]
    tokens = torch.tensor([[0] * LENGTH, *texts], dtype=torch.int32)
    guesses, counts = ops.lookup(tokens, ints(0, *lens), ints(1, 2, 3, 0), depth, longest, shortest)
    for b, (text, known) in enumerate(zip(texts, lens, strict=True)):
        best = -1
        for length in range(longest, shortest - 1, -1):
            ends = [
                e
                for e in range(length - 1, known - 1)
                if text[e - length + 1 : e + 1] == text[known - length : known]
            ]
            if ends and length <= known:
                best = ends[-1]
                break
        want = text[best + 1 : known][:depth] if best >= 0 else []
        assert guesses[b, : int(counts[b])].tolist() == want
    assert int(counts[3]) == 0


def test_a_draft_past_the_limit_is_not_written() -> None:
    tokens = torch.zeros(3, 10, dtype=torch.int32)
    drafts, limit = ints(0, 1, 0), ints(0, 8, 6)
    kept = ops.write_draft(tokens, drafts, limit, ints(1, 2), ints(7, 6), ints(1, 1), ints(4, 5))
    assert kept.tolist() == [1, 0]
    assert tokens[1].tolist() == [0] * 7 + [4, 0, 0]
    assert not tokens[2].any() and not tokens[0].any()
    assert drafts.tolist() == [0, 2, 0]
