# SPDX-License-Identifier: Apache-2.0
"""Choices of nobody: where experts are dealt out to ranks, others hold some that a token chose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freewheel.ops import SPECIFICATIONS
from tests.ops.cases import draw, generator
from tests.ops.quantised_cases import Sizes, expert_arguments, repacked, shared_blocks

EXPERTS, TOP_K = 6, 3
IDS = {"grouped_experts": 3, "clamped_experts": 3, "repacked_experts": 3}
WEIGHTS = ("grouped_experts", "clamped_experts")


def arguments(name: str, tokens: int, dtype: torch.dtype, shared: bool = False) -> list[Any]:
    """Of an op that runs experts. Expert 0 is nobody's choice, and the last token has none."""
    if name in WEIGHTS:
        x, shares = draw(2, 1, tokens, 48).to(dtype), draw(3, 1, tokens, TOP_K)
        own = [(draw(4, EXPERTS, 40, 48) / 7).to(dtype), (draw(5, EXPERTS, 48, 20) / 4).to(dtype)]
        ids = torch.rand((1, tokens, EXPERTS), generator=generator(1)).argsort(-1)[..., :TOP_K]
        rest = [2.5] if name == "clamped_experts" else []
        args = [x, *own, ids.int(), shares, *rest]
        if shared and name == "grouped_experts":
            args += [(draw(6, 40, 48) / 7).to(dtype), (draw(7, 48, 20) / 4).to(dtype)]
    else:
        of, plain = Sizes(1, tokens, 2, dtype), name.replace("repacked", "mxfp4")
        args = [*expert_arguments(plain, of, EXPERTS, 128, 256, TOP_K, 0.4)]
        args += shared_blocks(4, 128, 256) if shared else ()
        args = args if name == plain else [*repacked(tuple(args))]
    at = IDS.get(name, 5)
    ids, shares = args[at], args[at + 1]
    nobody = (torch.rand(ids.shape, generator=generator(9)) < 0.4) | (ids == 0)  # bool [1, T, k]
    nobody[:, -1] = True
    args[at], args[at + 1] = ids.masked_fill(nobody, -1), shares.masked_fill(nobody, float("nan"))
    return args


def expected(name: str, args: list[Any]) -> Tensor:
    """By the specification, of expert 0 as it is."""
    if name in WEIGHTS:
        wide = [one.double() if isinstance(one, Tensor) and one.dim() > 1 else one for one in args]
        return SPECIFICATIONS[name](*wide[:3], args[3], *wide[4:])
    return SPECIFICATIONS[name](args[0].double(), *args[1:])


def with_broken_first(name: str, args: list[Any]) -> list[Any]:
    """The same, but whoever multiplies by expert 0, were it by a weight of 0, gets no number."""
    at = 1 if name in (*WEIGHTS, "repacked_experts") else 2
    broken = args[at].clone()
    broken[0] = 255 if broken.dtype == torch.uint8 else float("nan")
    return [*args[:at], broken, *args[at + 1 :]]
