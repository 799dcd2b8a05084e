# SPDX-License-Identifier: Apache-2.0
"""Penalties, biases and bans: what changes logits before the choice.

The logits after position p are changed by the row's tokens 0 to p, and by nothing else. Drafts
stand in the row behind its certain tokens, so a query behind drafts sees them as if accepted; and
since nothing is counted from round to round, a rejected draft leaves nothing behind.

Bits of `uses`: 1 penalties, 2 biases, 4 allowed, 8 bad words (`spec.adjustments`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.ops.registry import nothing, op

_COLUMNS = "prompt_lens penalties bias_ids bias_values bad_words allowed".split()
_WRITTEN = (
    "prompt_lens penalties grammars grammar_states bias_ids bias_values bad_words allowed".split()
)
_WRITES = ", ".join(f"Tensor({chr(97 + n)}!) {name}" for n, name in enumerate(_WRITTEN))


@op(f"apply_adjustments(Tensor rows, Tensor words, {_WRITES}) -> ()", fake=nothing)
def apply_adjustments(
    rows: Tensor,  # int32 [B]
    words: Tensor,  # int32 [B, words]
    prompt_lens: Tensor,  # int32 [R]
    penalties: Tensor,  # float32 [R, 3]
    grammars: Tensor,  # int32 [R, 5]
    grammar_states: Tensor,  # int32 [R]
    bias_ids: Tensor,  # int32 [R, N]
    bias_values: Tensor,  # float32 [R, N]
    bad_words: Tensor,  # int32 [R, S, L]
    allowed: Tensor,  # int32 [R, V / 32]
) -> None:
    """Set the columns of rows whose first word is not 0, in the order of `state.letters`.

    A grammar begins in its start state, or, if it waits for a trigger, in state -1; -2 is that of a
    row without.
    """
    live = words[:, 0] != 0
    target = torch.where(live, rows, 0).long()
    sizes = [
        1,
        1,
        3,
        5,
        bias_ids.shape[1],
        bias_ids.shape[1],
        bad_words[0].numel(),
        allowed.shape[1],
    ]
    parts = words.split(sizes, dim=1)[1:]
    columns = (prompt_lens, penalties, grammars, bias_ids, bias_values, bad_words, allowed)
    for column, part in zip(columns, parts, strict=True):
        value = part.contiguous().view(column.dtype).view(-1, *column.shape[1:])
        keep = column[:1].expand_as(value)
        kind = live.view(-1, *[1] * (value.dim() - 1))
        column.index_put_((target,), torch.where(kind, value, keep))
    classes, start, trigger = parts[2][:, 1], parts[2][:, 2], parts[2][:, 3]
    state = torch.where(trigger >= 0, -1, torch.where(classes > 0, start, -2))
    grammar_states.index_put_((target,), torch.where(live, state, grammar_states[:1]))


def _fake_adjust(logits: Tensor, *_: object) -> Tensor:
    return torch.empty_like(logits)


@op(
    "adjust(Tensor logits, Tensor positions, Tensor rows, Tensor tokens, Tensor uses, "
    f"{', '.join(f'Tensor {name}' for name in _COLUMNS)}) -> Tensor",
    fake=_fake_adjust,
)
def adjust(
    logits: Tensor,  # float [B, C, V]
    positions: Tensor,  # int32 [B, C]  ascending by one in a row's live queries, 0 in others
    rows: Tensor,  # int32 [B]
    tokens: Tensor,  # int32 [R, T]
    uses: Tensor,  # int32 [R]
    prompt_lens: Tensor,  # int32 [R]
    penalties: Tensor,  # float32 [R, 3]  presence, frequency, repetition
    bias_ids: Tensor,  # int32 [R, N]  distinct, -1 where unused
    bias_values: Tensor,  # float32 [R, N]
    bad_words: Tensor,  # int32 [R, S, L]  sequences that end at L - 1, -1 before them
    allowed: Tensor,  # int32 [R, V / 32]  a bit for each token
) -> Tensor:
    """float [B, C, V]: `logits` as the rows' requests want them; see `spec.adjustments`."""
    at = rows.long()
    used, behind = uses[at], prompt_lens[at]
    text = tokens[at]  # int32 [B, T]
    penalised = penalise(logits, positions, text, behind, penalties[at])
    logits = torch.where(_bit(used, 1), penalised, logits)
    biased = logits + spread(bias_ids[at], bias_values[at], logits)
    logits = torch.where(_bit(used, 2), biased, logits)
    outside = ~allowed_tokens(allowed[at], logits.shape[-1])[:, None, :]
    banned = banned_tokens(bad_words[at], positions, text, behind, logits.shape[-1])
    banned = (outside & _bit(used, 4)) | (banned & _bit(used, 8))
    return torch.where(banned, -torch.inf, logits)


def _bit(uses: Tensor, bit: int) -> Tensor:
    """bool [B, 1, 1]: whether the row's `uses`, int32 [B], has `bit`."""
    return (uses & bit != 0)[:, None, None]


def penalise(
    logits: Tensor,  # float [B, C, V]
    positions: Tensor,  # int32 [B, C]
    text: Tensor,  # int32 [B, T]
    prompt_lens: Tensor,  # int32 [B]
    penalties: Tensor,  # float32 [B, 3]
) -> Tensor:
    """Repetition first, then frequency and presence, by the tokens up to each position."""
    batch, choices, vocabulary = logits.shape
    place = torch.arange(text.shape[1], device=text.device)
    past = place <= positions[:, :, None]  # bool [B, C, T]
    output = past & (place >= prompt_lens[:, None, None])
    index = text.long().clamp(0, vocabulary - 1)[:, None].expand(-1, choices, -1)
    zeros = torch.zeros((batch, choices, vocabulary), dtype=torch.int32, device=text.device)
    count = zeros.scatter_add(2, index, output.int()).to(logits.dtype)
    there = zeros.scatter_add(2, index, past.int()) > 0
    presence, frequency, repetition = penalties.to(logits.dtype).T[:, :, None, None]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(there, scaled, logits)
    return logits - frequency * count - presence * (count > 0)


def spread(ids: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """[B, 1, V] of `like`'s dtype: values float32 [B, N] at their ids int32 [B, N], 0 elsewhere."""
    vocabulary = like.shape[-1]
    index = torch.where(ids < 0, vocabulary, ids).long()
    zeros = like.new_zeros((ids.shape[0], vocabulary + 1))
    return zeros.scatter(1, index, values.to(like.dtype))[:, None, :vocabulary]


def allowed_tokens(allowed: Tensor, vocabulary: int) -> Tensor:
    """bool [B, V] of a bit for each token, int32 [B, V / 32]."""
    bit = torch.arange(32, device=allowed.device, dtype=torch.int32)
    return ((allowed[:, :, None] >> bit) & 1).flatten(1)[:, :vocabulary] != 0


def banned_tokens(
    bad_words: Tensor,  # int32 [B, S, L]
    positions: Tensor,  # int32 [B, C]
    text: Tensor,  # int32 [B, T]
    prompt_lens: Tensor,  # int32 [B]
    vocabulary: int,
) -> Tensor:
    """bool [B, C, V]: last tokens of sequences whose other tokens the output ends in."""
    batch, _, length = bad_words.shape
    choices = positions.shape[1]
    back = torch.arange(length - 1, 0, -1, device=text.device)
    place = positions[:, :, None] + 1 - back  # int64 [B, C, L - 1]
    inside = place.clamp(0, text.shape[1] - 1)  # a draft may be asked for behind the row's end
    seen = text[:, None].expand(-1, choices, -1).gather(2, inside)
    seen = torch.where(place >= prompt_lens[:, None, None], seen, -2)
    before = bad_words[:, None, :, :-1]  # int32 [B, 1, S, L - 1]
    match = ((before < 0) | (before == seen[:, :, None, :])).all(3)  # bool [B, C, S]
    last = bad_words[:, None, :, -1].expand(-1, choices, -1).long()
    index = torch.where(match & (last >= 0), last, vocabulary)
    banned = torch.zeros((batch, choices, vocabulary + 1), dtype=torch.bool, device=text.device)
    return banned.scatter(2, index, True)[:, :, :vocabulary]
