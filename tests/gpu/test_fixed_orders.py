# SPDX-License-Identifier: Apache-2.0
"""In deterministic mode, each op of a round gives a token the same bits whatever stands beside it.

At sizes where the fast mode takes other kernels, tiles and numbers of parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel import ops
from freewheel.ops import load_kernels
from freewheel.runtime.deterministic import PIECE, FixedBlocks
from tests.ops.cases import Sizes
from tests.ops.quantised_cases import (
    block_scaled,
    draw_ids,
    expert_arguments,
    joined_blocks,
    shared_blocks,
)

COUNTS = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 192, 193, 300, 700)
TOKENS = PIECE + 100
EVERY = slice(0, TOKENS)

Found = tuple[Tensor, ...]
Call = Callable[[slice], Found]


def weights(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    values, scale = block_scaled(seed, *shape)
    return values.cuda(), scale.cuda()


def tokens(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(1, TOKENS, *shape, device="cuda").to(dtype)


def project(dtype: torch.dtype) -> Call:
    x, few, long = tokens(dtype, 1536), weights(1, 640, 1536), weights(2, 256, 1536)
    odd = weights(3, 200, 1536)
    return lambda at: tuple(ops.block_linear(x[:, at], *own) for own in (few, long, odd))


def choose(dtype: torch.dtype) -> Call:
    x, weight = tokens(dtype, 2048), torch.randn(256, 2048, device="cuda") / 45
    bias = torch.zeros(256, device="cuda")
    return lambda at: (
        ops.wide_linear(x[:, at], weight[:64]),
        *ops.wide_route(x[:, at], weight, bias, 8, 4, 8, True, 2.5),
        *ops.wide_route_best(x[:, at], weight, bias, 6, 1.5),
    )


def close(dtype: torch.dtype) -> Call:
    x, residual, own = tokens(dtype, 1024), tokens(dtype, 512), weights(4, 512, 1024)
    gain = torch.rand(512, device="cuda").to(dtype)
    return lambda at: ops.block_add_rms_norm(x[:, at], *own, residual[:, at], gain, 1e-6)


def open_latents(dtype: torch.dtype) -> Call:
    x, own = tokens(dtype, 2048), weights(5, 384 + 128 + 256 + 64, 2048)
    gates = torch.randn(32, 2048, device="cuda") / 45
    query_gain, gain = (torch.rand(n, device="cuda").to(dtype) for n in (384, 256))
    positions = torch.arange(TOKENS, device="cuda", dtype=torch.int32)[None]
    slots, table = positions.long(), torch.rand(TOKENS, 64, device="cuda")
    cache = torch.zeros(TOKENS // 64 + 1, 64, 320, device="cuda", dtype=dtype)

    def call(at: slice) -> Found:
        cache.zero_()
        place = (positions[:, at], table, False, slots[:, at])
        norms = (query_gain, gain, 1e-6)
        found = ops.block_open_latents(cache, x[:, at], *own, gates, *norms, *place)
        return *found, cache.view(1, -1, 320)[:, at].clone()

    return call


def run_experts(dtype: torch.dtype) -> Call:
    x, shared = tokens(dtype, 1024), [a[0].cuda() for a in joined_blocks(6, 1, 256, 1024)]
    last: Any = (*shared, *weights(10, 1024, 256))
    up, down = joined_blocks(7, 32, 256, 1024), weights(9, 32, 1024, 256)
    up = up[0].cuda(), up[1].cuda()
    ids, shares = draw_ids(1, (1, TOKENS), 32, 8).cuda(), tokens(torch.float32, 8)
    return lambda at: (
        ops.block_experts(x[:, at], *up, *down, ids[:, at], shares[:, at], None, *last),
        ops.block_experts(x[:, at], *up, *down, ids[:, at], shares[:, at], 0.5),
    )


def run_packed_experts(dtype: torch.dtype) -> Call:
    of = Sizes(1, TOKENS, 1, dtype)
    given = expert_arguments("mxfp4_experts", of, 32, 256, 1024, 6, 0.5)
    x, *own, ids, shares, limit = (a.cuda() if isinstance(a, Tensor) else a for a in given)
    shared = [a.cuda() for a in shared_blocks(4, 256, 1024)]
    experts: Callable[..., Tensor] = ops.mxfp4_experts
    return lambda at: (
        experts(x[:, at], *own, ids[:, at], shares[:, at], limit, *shared),
        experts(x[:, at], *own, ids[:, at], shares[:, at], limit),
    )


def cross(dtype: torch.dtype) -> Call:
    y, streams = tokens(dtype, 1024), tokens(dtype, 4, 1024)
    post, mix = (torch.rand(1, TOKENS, *n, device="cuda") for n in ((4,), (4, 4)))
    own: tuple[Any, ...] = (torch.randn(24, 4096, device="cuda") / 64, torch.zeros(24).cuda())
    own += (torch.ones(3).cuda(), 1e-6, 1e-6, 20, torch.ones(1024).cuda().to(dtype), 1e-6)
    return lambda at: (
        *ops.hyper_cross(y[:, at], streams[:, at], post[:, at], mix[:, at], *own),
        *ops.hyper_enter(streams[:, at], *own),
        ops.hyper_collapse(streams[:, at], own[0][:4], own[1][:4], own[2][:1], 1e-6, 1e-6),
    )


def share(dtype: torch.dtype) -> Call:
    """What a reader of the parts adds up."""
    x, own = tokens(dtype, 2048), weights(11, 640, 2048)
    rows, gates = torch.randn(160, 2048, device="cuda").to(dtype), torch.randn(32, 2048).cuda()

    def call(at: slice) -> Found:
        parts = ops.parts_for(len(range(TOKENS)[at]), 2048)
        first, *rest = ops.shared_products(x[:, at], *own, rows, gates, parts)
        return (sum(rest, first),)

    return call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "of",
    [project, choose, close, open_latents, run_experts, cross, share],
    ids=lambda f: f.__name__,
)
def test_a_token_s_bits_are_the_same_in_any_company(
    of: Callable[[torch.dtype], Call], dtype: torch.dtype
) -> None:
    load_kernels("cuda")
    torch.manual_seed(0)
    call = of(dtype)
    with FixedBlocks():
        whole = call(EVERY)
        for count in COUNTS:
            for first in (0, TOKENS - count):
                at = slice(first, first + count)
                for alone, together in zip(call(at), whole, strict=True):
                    assert torch.equal(alone, together[:, at]), count
    for fixed, plain in zip(whole, call(EVERY), strict=True):
        if fixed.is_floating_point():
            off = (fixed.float() - plain.float()).norm()
            assert off <= 2**-7 * plain.float().norm()
