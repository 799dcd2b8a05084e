# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections, sinks, clamps and routes: what their formulas promise."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from freewheel import ops
from tests.ops.cases import bodies, draw, ints, rope_angles

WIDE = torch.float64


def opened(streams: torch.Tensor, iterations: int = 20) -> tuple[torch.Tensor, ...]:
    count, dim = streams.shape[-2:]
    rows = (2 + count) * count
    weight = draw(1, rows, count * dim, dtype=WIDE) / (count * dim) ** 0.5
    base = draw(2, rows, dtype=WIDE)
    scale = torch.tensor([1.0, 2.0, 0.5], dtype=WIDE)
    return ops.hyper_open(streams, weight, base, scale, 1e-6, 1e-6, iterations)


def test_the_mix_of_streams_neither_grows_nor_shrinks_them() -> None:
    """Rows and columns sum to one, so the sum over streams is handed on whole."""
    streams = draw(3, 2, 5, 4, 8, dtype=WIDE)
    x, post, mix = opened(streams)
    ones = torch.ones(2, 5, 4, dtype=WIDE)
    assert torch.allclose(mix.sum(-2), ones, atol=1e-3)
    assert torch.allclose(mix.sum(-1), ones, atol=1e-2)
    assert ((post > 0) & (post < 2)).all() and x.shape == (2, 5, 8)
    closed = ops.hyper_close(torch.zeros_like(x), streams, post, mix)
    assert torch.allclose(closed.sum(-2), streams.sum(-2), atol=5e-2)


def test_streams_are_mixed_by_the_transposed_matrix() -> None:
    """Stream k takes mix[j, k] of stream j. A symmetric matrix would hide the direction."""
    streams, y = draw(1, 1, 1, 2, 3, dtype=WIDE), torch.zeros(1, 1, 3, dtype=WIDE)
    mix = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=WIDE)[None, None]
    closed = ops.hyper_close(y, streams, torch.zeros(1, 1, 2, dtype=WIDE), mix)
    assert torch.equal(closed[0, 0, 1], streams[0, 0, 0])
    assert torch.equal(closed[0, 0, 0], torch.zeros(3, dtype=WIDE))


def test_the_output_goes_to_every_stream_by_its_share() -> None:
    y, streams = draw(1, 1, 1, 3, dtype=WIDE), torch.zeros(1, 1, 2, 3, dtype=WIDE)
    post = torch.tensor([[[0.5, 2.0]]], dtype=WIDE)
    closed = ops.hyper_close(y, streams, post, torch.zeros(1, 1, 2, 2, dtype=WIDE))
    assert torch.equal(closed[0, 0], torch.stack((y[0, 0] / 2, y[0, 0] * 2)))


def test_one_iteration_scales_columns_alone() -> None:
    _, _, mix = opened(draw(4, 1, 2, 4, 8, dtype=WIDE), iterations=1)
    assert torch.allclose(mix.sum(-2), torch.ones(1, 2, 4, dtype=WIDE), atol=1e-3)
    assert not torch.allclose(mix.sum(-1), torch.ones(1, 2, 4, dtype=WIDE), atol=1e-2)


def test_turning_back_undoes_turning() -> None:
    x, table = draw(1, 2, 3, 4, 24, dtype=WIDE), rope_angles(50, 8)
    positions = ints(0, 7, 49, 3, 3, 20).view(2, 3)
    there = ops.rope_tail(x, positions, table, False)
    assert torch.allclose(ops.rope_tail(there, positions, table, True), x, atol=1e-6)
    assert torch.equal(there[..., :16], x[..., :16])
    assert not torch.allclose(there[..., 16:], x[..., 16:])


def test_pairs_that_are_turned_are_neighbours_and_stay_where_they_are() -> None:
    x = torch.zeros(1, 1, 1, 6, dtype=WIDE)
    x[..., 4] = 1.0  # the first of the last four dimensions' second pair
    table = rope_angles(50, 4)
    turned = ops.rope_tail(x, ints(1).view(1, 1), table, False)[0, 0, 0]
    cos, sin = table[1].double().chunk(2)
    assert torch.allclose(turned, torch.stack((*x[0, 0, 0, :4], cos[1], sin[1])))


@bodies("sink_attention")
def test_a_sink_takes_weight_and_gives_nothing(body) -> None:
    keys = draw(1, 1, 4, 8, dtype=WIDE)
    query, slots = draw(2, 1, 1, 2, 8, dtype=WIDE), ints(1, 3).view(1, 1, 2)
    none = slots[..., :0]
    sinks = torch.tensor([0.3, 1e9], dtype=WIDE)
    found = body(query, keys, slots, keys, none, sinks, 0.5)[0, 0]
    own = keys[0, [1, 3]]
    scores = torch.cat((query[0, 0, 0] @ own.T * 0.5, sinks[:1]))
    assert torch.allclose(found[0], scores.softmax(0)[:2] @ own)
    assert torch.equal(found[1], torch.zeros(8, dtype=WIDE))


@bodies("sink_attention")
def test_entries_count_as_keys_do_and_dead_lanes_are_never_read(body) -> None:
    keys, entries = draw(1, 1, 5, 8, dtype=WIDE), draw(2, 1, 3, 8, dtype=WIDE)
    keys[0, 0], entries[0, 0] = torch.nan, torch.nan
    query, sinks = draw(3, 1, 2, 2, 8, dtype=WIDE), draw(4, 2, dtype=WIDE)
    slots = ints(-1, 2, 4, -1, -1, -1).view(1, 2, 3)
    picks = ints(1, -1, 2, -1, -1, -1).view(1, 2, 3)
    found = body(query, keys, slots, entries, picks, sinks, 0.5)[0]
    own = torch.stack((keys[0, 2], keys[0, 4], entries[0, 1], entries[0, 2]))
    joined = body(
        query[:, :1],
        own[None],
        ints(0, 1, 2, 3).view(1, 1, 4),
        own[None],
        picks[:, :1, :0],
        sinks,
        0.5,
    )[0]
    assert torch.allclose(found[0], joined[0])
    assert torch.equal(found[1], torch.zeros(2, 8, dtype=WIDE))


def test_the_clamp_bounds_the_gate_from_above_and_the_rest_on_both_sides() -> None:
    gate, up = torch.tensor([9.0, 0.5, -9.0]), torch.tensor([-9.0, 9.0, 0.5])
    found = ops.clamped_silu_mul(torch.cat((gate, up)), 2.0)
    want = F.silu(torch.tensor([2.0, 0.5, -9.0])) * torch.tensor([-2.0, 2.0, 0.5])
    assert torch.allclose(found, want)


@bodies("clamped_experts")
@pytest.mark.parametrize("tokens", [3, 100])
def test_experts_equal_a_loop_over_tokens(body, tokens: int) -> None:
    x = draw(1, 1, tokens, 16, dtype=WIDE)
    gate_up, down = draw(2, 5, 12, 16, dtype=WIDE), draw(3, 5, 16, 6, dtype=WIDE)
    ids = torch.rand(1, tokens, 5, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :2]
    weights = draw(4, 1, tokens, 2, dtype=WIDE)
    found = body(x, gate_up, down, ids.int(), weights, 1.5)
    for t in range(tokens):
        want = torch.zeros(16, dtype=WIDE)
        for lane in range(2):
            e = int(ids[0, t, lane])
            inner = ops.clamped_silu_mul(gate_up[e] @ x[0, t], 1.5)
            want += weights[0, t, lane] * (down[e] @ inner)
        assert torch.allclose(found[0, t], want)


def test_experts_by_token_are_the_tables_and_weigh_by_their_scores() -> None:
    table = ints(0, 3, 1, 2, 2, 0).view(3, 2)
    logits = draw(1, 1, 3, 4, dtype=WIDE)
    weights, ids = ops.route_by_token(logits, table, ints(2, 0, 2).view(1, 3), 1.5)
    assert ids[0].tolist() == [[2, 0], [0, 3], [2, 0]]
    scores = F.softplus(logits).sqrt()[0]
    assert torch.allclose(weights.sum(-1), torch.full((1, 3), 1.5, dtype=WIDE))
    assert torch.allclose(weights[0, 1], scores[1, [0, 3]] / scores[1, [0, 3]].sum() * 1.5)


def test_the_bias_chooses_experts_and_does_not_weigh_them() -> None:
    logits, bias = torch.tensor([[1.0, 0.9, 0.0, 0.0]]), torch.tensor([0.0, 0.0, 5.0, 5.0])
    weights, ids = ops.route_best(logits, bias, 2, 1.0)
    assert ids.tolist() == [[2, 3]]  # equal: the lowest index first
    assert torch.allclose(weights, torch.tensor([[0.5, 0.5]]))
