# SPDX-License-Identifier: Apache-2.0
"""The choice of tokens in two launches, or in three.

Queries that do not filter: the best token of each block of the vocabulary, then the best of these;
at temperature 0 without noise. Others are passed over by the first launch, and are one cluster's
business in the second (`cluster_choice`).

Devices without that kernel have a launch in front, for queries that filter. What they keep is a
prefix of their tokens by descending score: a threshold, and the highest kept id among those that
equal it, say it all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freewheel.ops.cuda.chain import CHAINED, follow
from freewheel.ops.cuda.cluster_choice import choose_by_cluster, serves
from freewheel.ops.cuda.selection import ordered_key
from freewheel.ops.registry import SPECIFICATIONS, implement

BLOCK = 2048
"""Tokens of one program."""


@triton.jit
def _avalanche(x):
    """See `ops.choosing`. uint32 in and out."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(seed, position, token):
    """float32 noise of int64 seed, int32 position and int32 tokens: `ops.choosing.gumbel`."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    key = _avalanche(_avalanche(low + 0x9E3779B9) ^ high)
    key = _avalanche(key ^ (position.to(tl.uint32) * 0x9E3779B1))
    mixed = _avalanche(_avalanche(key ^ (token.to(tl.uint32) * 0x85EBCA6B)) + key)
    tail = tl.minimum((mixed.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    rest = 1 - tail
    # log(1 - tail), exact to the last bits where tail is tiny
    log = tl.where(rest == 1, -tail, tl.log(rest) * (-tail / (rest - 1)))
    return -tl.log(-log)


@triton.jit
def _scores(line, lane, live, stop_ids, row, early, warm, STOPS: tl.constexpr):
    """Logits over the temperature (1 where greedy), the row's stop ids at -inf where early."""
    score = tl.load(line + lane, mask=live, other=float("-inf"))
    if early:
        for nth in tl.static_range(STOPS):
            stop = tl.load(stop_ids + row * STOPS + nth)
            score = tl.where(lane == stop, float("-inf"), score)
    return score / tl.where(warm > 0, warm, 1.0)


@triton.jit
def _from_up(line, key, floor, high, V, stop_ids, row, early, warm,
             STOPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """(count, mass) of the tokens whose key is at least `key`, and at least `floor`."""
    count = 0
    mass = 0.0
    for at in range(0, V, BLOCK):
        lane = at + tl.arange(0, BLOCK)
        live = lane < V
        score = _scores(line, lane, live, stop_ids, row, early, warm, STOPS)
        own = ordered_key(score)
        kept = live & (own >= key) & (own >= floor)
        count += tl.sum(kept.to(tl.int32), 0)
        mass += tl.sum(tl.where(kept, tl.exp(score - high), 0.0), 0)
    return count, mass


@triton.jit
def _by_count(line, top_k, high, V, stop_ids, row, early, warm,
              STOPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """(key, ties): the `top_k` best are the keys above `key`, and the first `ties` equal to it."""
    zero = tl.full((), 0, tl.uint32)
    best = zero
    for bit in range(32):
        tried = best | (tl.full((), 0x80000000, tl.uint32) >> bit)
        count, _ = _from_up(line, tried, zero, high, V, stop_ids, row, early, warm, STOPS, BLOCK)
        best = tl.where(count >= top_k, tried, best)
    above, _ = _from_up(line, best + 1, zero, high, V, stop_ids, row, early, warm, STOPS, BLOCK)
    return best, top_k - above


@triton.jit
def _equals(line, key, floor, high, V, stop_ids, row, early, warm,
            STOPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """(mass above `key`, how many equal it, at least 1, the mass of each of these)."""
    above_count, above = _from_up(
        line, key + 1, floor, high, V, stop_ids, row, early, warm, STOPS, BLOCK
    )
    count, mass = _from_up(line, key, floor, high, V, stop_ids, row, early, warm, STOPS, BLOCK)
    equals = tl.maximum(count - above_count, 1)
    return above, equals, (mass - above) / equals


@triton.jit
def _by_mass(line, best, ties, top_p, high, V, stop_ids, row, early, warm,
             STOPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Of what (best, ties) keeps, the fewest whose share reaches `top_p`, as another such pair."""
    above, equals, each = _equals(
        line, best, best, high, V, stop_ids, row, early, warm, STOPS, BLOCK
    )
    wanted = top_p * (above + each * tl.minimum(ties, equals))
    found = tl.full((), 0, tl.uint32)
    for bit in range(32):
        tried = found | (tl.full((), 0x80000000, tl.uint32) >> bit)
        _, mass = _from_up(line, tried, best, high, V, stop_ids, row, early, warm, STOPS, BLOCK)
        found = tl.where(mass >= wanted, tried, found)
    found = tl.maximum(found, best)
    above, equals, each = _equals(
        line, found, best, high, V, stop_ids, row, early, warm, STOPS, BLOCK
    )
    some = tl.maximum(tl.ceil((wanted - above) / each), 1.0)
    some = tl.minimum(some, 1073741824.0).to(tl.int32)
    return found, tl.where(found == best, tl.minimum(ties, some), some)


@triton.jit
def _last_equal(line, key, ties, V, stop_ids, row, early, warm,
                STOPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The id of the last of the first `ties` tokens whose key is `key`, or -1."""
    last = -1
    before = 0
    for at in range(0, V, BLOCK):
        lane = at + tl.arange(0, BLOCK)
        live = lane < V
        score = _scores(line, lane, live, stop_ids, row, early, warm, STOPS)
        equal = live & (ordered_key(score) == key)
        rank = before + tl.cumsum(equal.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(equal & (rank <= ties), lane, -1), 0))
        before += tl.sum(equal.to(tl.int32), 0)
    return last


@triton.jit
def _filter(
    logits, positions, rows, temperature, top_k_in, top_p_in, min_p_in, stop_ids, minimum_lens,
    key_out, id_out, C, V, STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Threshold key, and the highest id kept among its equals: (0, V) keeps all."""
    query = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + query // C)
    warm, top_k = tl.load(temperature + row), tl.load(top_k_in + row)
    top_p, min_p = tl.load(top_p_in + row), tl.load(min_p_in + row)
    tl.store(key_out + query, 0)
    tl.store(id_out + query, V)
    limited = (top_k > 0) & (top_k < V)
    if (warm > 0) & (limited | (top_p < 1) | (min_p > 0)):
        line = logits + query * V
        early = tl.load(positions + query) + 1 < tl.load(minimum_lens + row)
        high = float("-inf")
        for at in range(0, V, BLOCK):
            lane = at + tl.arange(0, BLOCK)
            score = _scores(line, lane, lane < V, stop_ids, row, early, warm, STOPS)
            high = tl.maximum(high, tl.max(score, 0))
        best, ties = tl.full((), 0, tl.uint32), V
        if limited:
            best, ties = _by_count(line, top_k, high, V, stop_ids, row, early, warm, STOPS, BLOCK)
        if top_p < 1:
            best, ties = _by_mass(
                line, best, ties, top_p, high, V, stop_ids, row, early, warm, STOPS, BLOCK
            )
        if min_p > 0:
            floor = ordered_key(high + tl.log(min_p))
            ties = tl.where(floor > best, V, ties)
            best = tl.maximum(best, floor)
        last = _last_equal(line, best, ties, V, stop_ids, row, early, warm, STOPS, BLOCK)
        tl.store(key_out + query, best.to(tl.int32, bitcast=True))
        tl.store(id_out + query, last)


@triton.jit
def _best_of_block(
    logits, positions, rows, temperature, top_k_in, top_p_in, min_p_in, seeds, stop_ids,
    minimum_lens, keys, ids, value_out, token_out, C, V,
    STOPS: tl.constexpr, BLOCK: tl.constexpr, PLAIN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """PLAIN: queries that filter are passed over. Else `keys` and `ids` say what they keep."""
    follow(CHAINED)
    query, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + query // C)
    warm, position = tl.load(temperature + row), tl.load(positions + query)
    asked = warm >= 0
    if PLAIN:
        top_k = tl.load(top_k_in + row)
        filters = (top_k > 0) & (top_k < V) | (tl.load(top_p_in + row) < 1)
        asked = (warm <= 0) | ((filters | (tl.load(min_p_in + row) > 0)) == 0)
    if asked:
        _best_part(
            logits, seeds, stop_ids, minimum_lens, keys, ids, value_out, token_out, V,
            query, part, row, warm, position, STOPS, BLOCK, PLAIN,
        )  # fmt: skip


@triton.jit
def _best_part(
    logits, seeds, stop_ids, minimum_lens, keys, ids, value_out, token_out, V,
    query, part, row, warm, position,
    STOPS: tl.constexpr, BLOCK: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    early = position + 1 < tl.load(minimum_lens + row)
    lane = part * BLOCK + tl.arange(0, BLOCK)
    live = lane < V
    score = _scores(logits + query * V, lane, live, stop_ids, row, early, warm, STOPS)
    broken = tl.max((live & (score != score)).to(tl.int32), 0) > 0
    if warm > 0:
        if PLAIN == 0:
            threshold = tl.load(keys + query).to(tl.uint32, bitcast=True)
            key = ordered_key(score)
            kept = (key > threshold) | ((key == threshold) & (lane <= tl.load(ids + query)))
            score = tl.where(kept, score, float("-inf"))
        score += _gumbel(tl.load(seeds + row), position, lane)
    best = tl.max(score, 0)
    token = tl.min(tl.where(live & (score == best), lane, V), 0)
    place = query * tl.num_programs(1) + part
    tl.store(value_out + place, tl.where(broken, float("nan"), best))
    tl.store(token_out + place, tl.minimum(token, V - 1))


@triton.jit
def _best_of_all(values, tokens, out, parts, BLOCK: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    live = lane < parts
    value = tl.load(values + query * parts + lane, mask=live, other=float("-inf"))
    token = tl.load(tokens + query * parts + lane, mask=live, other=2147483647)
    best = tl.max(value, 0)
    first = tl.min(tl.where(live & (value == best), token, 2147483647), 0)
    broken = tl.max((live & (value != value)).to(tl.int32), 0) > 0
    none = broken | (best == float("-inf"))
    tl.store(out + query, tl.where(none, -1, tl.where(first == 2147483647, 0, first)))


@implement("choose", "cuda")
def choose(
    logits: Tensor,
    positions: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    stop_ids: Tensor,
    minimum_lens: Tensor,
) -> Tensor:
    if logits.dtype != torch.float32:
        return SPECIFICATIONS["choose"](
            logits, positions, rows, temperature, top_k, top_p, min_p, seeds, stop_ids, minimum_lens
        )
    logits, positions = logits.contiguous(), positions.contiguous()
    own = (temperature, top_k, top_p, min_p, seeds, stop_ids, minimum_lens)
    if not logits.numel():
        return torch.empty(logits.shape[:2], dtype=torch.int32, device=logits.device)
    if serves(logits):
        values, tokens = best_of_blocks(None, logits, positions, rows, *own)
        return choose_by_cluster(logits, positions, rows, *own, values, tokens)
    return choose_by_blocks(logits, positions, rows, *own)


def choose_by_blocks(logits: Tensor, positions: Tensor, rows: Tensor, *own: Tensor) -> Tensor:
    """`choose` in three launches of Triton's, of contiguous logits and positions, not empty."""
    temperature, top_k, top_p, min_p, _, stop_ids, minimum_lens = own
    (batch, choices, vocabulary), stops = logits.shape, stop_ids.shape[1]
    kept = torch.empty((2, batch * choices), dtype=torch.int32, device=logits.device)
    _filter[(batch * choices,)](
        logits, positions, rows, temperature, top_k, top_p, min_p, stop_ids, minimum_lens,
        *kept, choices, vocabulary, STOPS=stops, BLOCK=2 * BLOCK, num_warps=16,
    )  # fmt: skip
    values, tokens = best_of_blocks(kept, logits, positions, rows, *own)
    out = torch.empty((batch, choices), dtype=torch.int32, device=logits.device)
    parts = values.shape[1]
    _best_of_all[(batch * choices,)](
        values, tokens, out, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1
    )
    return out


def best_of_blocks(
    kept: Tensor | None, logits: Tensor, positions: Tensor, rows: Tensor, *own: Tensor
) -> tuple[Tensor, Tensor]:
    """(values float32, tokens int32 [queries, parts]): the best of each block of the vocabulary.

    kept int32 [2, queries]: what `_filter` keeps; None: what would filter is left undefined.
    """
    (batch, choices, vocabulary), stops = logits.shape, own[5].shape[1]
    queries, parts = batch * choices, triton.cdiv(vocabulary, BLOCK)
    values = logits.new_empty((queries, parts))
    tokens = torch.empty((queries, parts), dtype=torch.int32, device=logits.device)
    keys, ids = (tokens, tokens) if kept is None else kept
    _best_of_block[(queries, parts)](
        logits, positions, rows, *own, keys, ids, values, tokens, choices, vocabulary,
        STOPS=stops, BLOCK=BLOCK, PLAIN=kept is None, CHAINED=CHAINED, num_warps=4,
        launch_pdl=CHAINED,
    )  # fmt: skip
    return values, tokens
