# SPDX-License-Identifier: Apache-2.0
"""Grammars as finite automata in device tables: follow tokens, and ban what may not come next.

A row's `grammars` are base, classes, start, trigger, budget: its table begins at cell `base` of
`tables`, with the class of each token, and goes on with `classes + 1` cells for each state (see
`spec.adjustments.Grammar`). States: 0 and above, the automaton's; -1, waiting for the trigger; -2,
free; -3, dead, behind a token that the grammar does not allow, which is a draft to be rejected; -4,
held to masks of the host (`ops.guiding`). A budget of -2 is none, and lets the output end before
the trigger.
Bit 16 of `uses` says that the row has any of this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.registry import nothing, op

WAITING, FREE, DEAD, GUIDED = -1, -2, -3, -4
OPTIONAL = -2


@op("store_table(Tensor words, Tensor(a!) tables) -> ()", fake=nothing)
def store_table(
    words: Tensor,  # int32 [2 + N]  first cell, count, then two cells a word
    tables: Tensor,  # int16 [cells]
) -> None:
    """`tables[first : first + count]` = the cells. The last cell of `tables` is scratch."""
    cells = words[2:].contiguous().view(torch.int16)
    index = torch.arange(cells.shape[0], device=words.device)
    live = index < words[1]
    last = tables.shape[0] - 1
    target = torch.where(live, words[0] + index, last)
    tables.index_put_((target,), torch.where(live, cells, 0))


def _fake_constrain(logits: Tensor, *_: object) -> Tensor:
    return torch.empty_like(logits)


@op(
    "constrain(Tensor logits, Tensor positions, Tensor rows, Tensor tokens, Tensor computed_lens, "
    "Tensor uses, Tensor stop_ids, Tensor prompt_lens, Tensor grammars, Tensor grammar_states, "
    "Tensor tables, int steps) -> Tensor",
    fake=_fake_constrain,
)
def constrain(
    logits: Tensor,  # float [B, C, V]
    positions: Tensor,  # int32 [B, C]
    rows: Tensor,  # int32 [B]
    tokens: Tensor,  # int32 [R, T]
    computed_lens: Tensor,  # int32 [R]
    uses: Tensor,  # int32 [R]
    stop_ids: Tensor,  # int32 [R, S]
    prompt_lens: Tensor,  # int32 [R]
    grammars: Tensor,  # int32 [R, 5]
    grammar_states: Tensor,  # int32 [R]  after the row's first `computed_lens` tokens
    tables: Tensor,  # int16 [cells]
    steps: int,
) -> Tensor:
    """`logits` with -inf at tokens that the row's grammar does not allow behind each query.

    A stop id is allowed where the grammar may end, and besides where the grammar itself allows that
    token. Waiting for a trigger, nothing is banned but stop ids, if a grammar follows; from
    `budget` tokens on, all but the trigger. `steps`: the most tokens from `computed_lens` to a
    query's own.
    """
    at = rows.long()
    vocabulary = logits.shape[-1]
    grammar = grammars[at]  # int32 [B, 5]
    state = walk(
        grammar_states[at][:, None].expand(positions.shape),
        tokens[at],
        torch.maximum(computed_lens[at], prompt_lens[at])[:, None].expand(positions.shape),
        positions,
        grammar[:, None],
        tables,
        vocabulary,
        steps,
    )  # int32 [B, C]
    may, ends = allowed_next(state, grammar[:, None], tables, vocabulary)
    stops = spread_ids(stop_ids[at], vocabulary)[:, None]  # bool [B, 1, V]
    token = torch.arange(vocabulary, device=logits.device)
    trigger, budget = grammar[:, 3, None], grammar[:, 4, None]  # int32 [B, 1]
    forced = (budget >= 0) & (positions + 1 >= budget)  # bool [B, C]
    endless = (grammar[:, 1] == 0) | (grammar[:, 4] == OPTIONAL)  # bool [B]
    free = ~stops | endless[:, None, None]
    thinking = torch.where(forced[:, :, None], token == trigger[:, :, None], free)
    banned = torch.where(
        (state >= 0)[:, :, None],
        ~(may | (stops & ends[:, :, None])),
        (state == WAITING)[:, :, None] & ~thinking,
    )
    used = (uses[at] & 16 != 0)[:, None, None]
    return torch.where(used & banned, -torch.inf, logits)


@op(
    "follow(Tensor tokens, Tensor rows, Tensor start, Tensor accept_lens, Tensor uses, "
    "Tensor prompt_lens, Tensor grammars, Tensor(a!) grammar_states, Tensor tables, "
    "int vocabulary, int steps) -> ()",
    fake=nothing,
)
def follow(
    tokens: Tensor,  # int32 [R, T]
    rows: Tensor,  # int32 [B]
    start: Tensor,  # int32 [B]
    accept_lens: Tensor,  # int32 [B]
    uses: Tensor,  # int32 [R]
    prompt_lens: Tensor,  # int32 [R]
    grammars: Tensor,  # int32 [R, 5]
    grammar_states: Tensor,  # int32 [R]
    tables: Tensor,  # int16 [cells]
    vocabulary: int,
    steps: int,
) -> None:
    """Advance each row's state over its tokens `start` to `start + accept_lens`, now computed.

    `accept_lens` is at most `steps`. Tokens of the prompt are passed over.
    """
    at = rows.long()
    state = walk(
        grammar_states[at][:, None],
        tokens[at],
        torch.maximum(start, prompt_lens[at])[:, None],
        (start + accept_lens - 1)[:, None],
        grammars[at][:, None],
        tables,
        vocabulary,
        steps,
    )[:, 0]
    live = (uses[at] & 16 != 0) & (accept_lens > 0)
    target = torch.where(live, rows, 0).long()
    grammar_states.index_put_((target,), torch.where(live, state, grammar_states[:1]))


def walk(
    state: Tensor,  # int32 [B, C]
    text: Tensor,  # int32 [B, T]
    first: Tensor,  # int32 [B, C]
    last: Tensor,  # int32 [B, C]
    grammar: Tensor,  # int32 [B, 1, 5]
    tables: Tensor,  # int16 [cells]
    vocabulary: int,
    steps: int,
) -> Tensor:
    """int32 [B, C]: the states after the row's tokens at positions `first` to `last`.

    At most the last `steps` tokens before `last` are looked at.
    """
    base, classes, start, trigger, _ = grammar.unbind(2)  # int32 [B, 1] each
    scratch = tables.shape[0] - 1
    for ahead in range(steps):
        place = last - (steps - 1) + ahead
        live = place >= first
        token = text.gather(1, place.clamp(0, text.shape[1] - 1).long())
        within = live & (state >= 0)
        kind = tables[torch.where(within, base + token, scratch).long()]
        cell = base + vocabulary + state * (classes + 1) + kind
        following = tables[torch.where(within, cell, scratch).long()].int()
        following = torch.where(following < 0, DEAD, following)
        begun = torch.where(classes > 0, start, FREE)
        waited = torch.where(token == trigger, begun, WAITING)
        state = torch.where(
            within, following, torch.where(live & (state == WAITING), waited, state)
        )
    return state.int()


def allowed_next(
    state: Tensor,  # int32 [B, C]
    grammar: Tensor,  # int32 [B, 1, 5]
    tables: Tensor,  # int16 [cells]
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    """(bool [B, C, V]: the automaton allows the token; bool [B, C]: the text may end here).

    Without meaning where the state is below 0.
    """
    scratch = tables.shape[0] - 1
    base, classes = grammar[..., 0], grammar[..., 1]  # int32 [B, 1]
    within = state >= 0
    line = torch.where(within, base + vocabulary + state * (classes + 1), scratch)  # int32 [B, C]
    token = torch.arange(vocabulary, device=tables.device)
    known = (classes > 0)[..., None]
    kind = tables[torch.where(known, base[..., None] + token, scratch).long()].long()  # [B, 1, V]
    cell = torch.where(within[..., None], line[..., None] + kind, scratch)
    ends = tables[torch.where(within, line + classes, scratch).long()] > 0
    return tables[cell.long()] >= 0, ends


def spread_ids(ids: Tensor, vocabulary: int) -> Tensor:
    """bool [B, V] of ids int32 [B, S], -1 where unused."""
    index = torch.where(ids < 0, vocabulary, ids).long()
    listed = torch.zeros((ids.shape[0], vocabulary + 1), dtype=torch.bool, device=ids.device)
    return listed.scatter(1, index, True)[:, :vocabulary]
