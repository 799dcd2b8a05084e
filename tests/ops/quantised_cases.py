# SPDX-License-Identifier: Apache-2.0
"""Small inputs for the ops whose weights are quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from freewheel.ops import repack_mxfp4
from freewheel.ops.codecs import quantise_blocks, quantise_mxfp4
from tests.ops.cases import Sizes, draw, generator


def block_scaled(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    """A weight in FP8 blocks whose scales differ widely."""
    rows = torch.arange(shape[-2])[:, None] // 128
    columns = torch.arange(shape[-1]) // 128
    factors = torch.exp2((rows * 5 + columns * 3) % 7 - 3.0)
    return quantise_blocks(draw(seed, *shape) * factors / shape[-1] ** 0.5)


def joined_blocks(seed: int, experts: int, inner: int, hidden: int) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, H] and its scale: gate's blocks above up's."""
    gate, gate_scale = block_scaled(seed, experts, inner, hidden)
    up, up_scale = block_scaled(seed + 1, experts, inner, hidden)
    return torch.cat((gate, up), 1), torch.cat((gate_scale, up_scale), 1)


def draw_ids(seed: int, lead: tuple[int, ...], experts: int, top_k: int) -> Tensor:
    """int32 [..., top_k]: distinct experts of each token."""
    chance = generator(seed)
    return torch.rand((*lead, experts), generator=chance).argsort(-1)[..., :top_k].int()


def expert_arguments(
    name: str, of: Sizes, experts: int, inner: int, hidden: int, top_k: int, limit: float | None
) -> tuple[Any, ...]:
    """Of `block_experts` or `mxfp4_experts`."""
    seed = 100 * of.seed
    if name == "block_experts":
        gate_up = joined_blocks(seed + 1, experts, inner, hidden)
        down = block_scaled(seed + 3, experts, hidden, inner)
    else:
        gate_up = quantise_mxfp4(draw(seed + 1, experts, 2 * inner, hidden) / hidden**0.5)
        down = quantise_mxfp4(draw(seed + 3, experts, hidden, inner) / inner**0.5)
    ids = draw_ids(of.seed, of.lead, experts, top_k)
    shares = of.draw(7, *of.lead, top_k, dtype=of.wide)
    return of.draw(5, *of.lead, hidden), *gate_up, *down, ids, shares, limit


def shared_blocks(seed: int, inner: int, hidden: int) -> tuple[Tensor, ...]:
    """The last four arguments of both."""
    gate_up = joined_blocks(seed, 1, inner, hidden)
    return *(part[0] for part in gate_up), *block_scaled(seed + 2, hidden, inner)


def _linear(name: str, of: Sizes) -> tuple[Any, ...]:
    del name
    return of.draw(1, *of.lead, 144), *block_scaled(of.seed, 136, 144)


def _experts(name: str, of: Sizes) -> tuple[Any, ...]:
    limit = 0.5 if of.seed % 2 else None
    args = expert_arguments(name, of, experts=6, inner=32, hidden=64, top_k=2, limit=limit)
    if of.seed % 4 < 2:
        return *args, *shared_blocks(of.seed, 32 * (1 + of.seed % 4), 64)
    return args


def repacked(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `repacked_experts` that stand for those of `mxfp4_experts`."""
    x, up, up_scale, low, low_scale, *rest = args
    return x, repack_mxfp4(up, up_scale, True), repack_mxfp4(low, low_scale, False), *rest


def _repacked(name: str, of: Sizes) -> tuple[Any, ...]:
    del name
    limit = 0.5 if of.seed % 2 else None
    args = expert_arguments("mxfp4_experts", of, 6, 128, 256, 2, limit)
    return repacked((*args, *shared_blocks(of.seed, 128, 256)) if of.seed % 4 < 2 else args)


QUANTISED_CASES: dict[str, Callable[[str, Sizes], tuple[Any, ...]]] = {
    "block_linear": _linear,
    "block_experts": _experts,
    "mxfp4_experts": _experts,
    "repacked_experts": _repacked,
}
"""Arguments of one valid call of each op."""
