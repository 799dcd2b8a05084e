# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections in few passes. Balancing is many steps on tiny matrices: calls are its cost."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import freewheel.ops.hyper  # noqa: F401 - declares what this file implements
from freewheel.ops.dense import wide
from freewheel.ops.registry import implement

FEW_TOKENS = 32
"""Up to this many matrices are balanced as arrays, whose calls cost a third of a tensor's."""


def _logits(flat: Tensor, weight: Tensor, norm_eps: float) -> Tensor:
    """float [n, M] of flat [n, N * D]: normed behind the product, which has fewer columns."""
    length = torch.linalg.vector_norm(flat, dim=-1, keepdim=True)
    inverse = length.square_().div_(flat.shape[-1]).add_(norm_eps).rsqrt_()
    return F.linear(flat, weight.to(flat.dtype)).mul_(inverse)


def _balanced(mix: Tensor, eps: float, iterations: int) -> Tensor:
    """mix [n, N, N] balanced as in `ops.hyper.balance`, in place where it is few."""
    if mix.shape[0] <= FEW_TOKENS:
        array = mix.contiguous().numpy()
        for turn in range(2 * iterations - 1):
            total = array.sum(2 if turn % 2 else 1, keepdims=True)
            total += eps
            array /= total
        return torch.from_numpy(array)
    last = mix.permute(1, 2, 0).contiguous()  # [N, N, n]: sums run along whole vectors
    for turn in range(2 * iterations - 1):
        last.div_(last.sum(1 if turn % 2 else 0, keepdim=True).add_(eps))
    return last.permute(2, 0, 1).contiguous()


@implement("hyper_open", "cpu")
def hyper_open(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    del fixed
    (count, dim), lead = streams.shape[-2:], streams.shape[:-2]
    source = wide(streams).reshape(-1, count, dim)
    logits = _logits(source.flatten(1), weight, norm_eps)
    pre, post, mix = logits.split((count, count, count * count), dim=-1)
    base, scales = base.to(logits.dtype), scale.tolist()
    share = torch.add(base[:count], pre, alpha=scales[0]).sigmoid_().add_(eps)
    post = torch.add(base[count : 2 * count], post, alpha=scales[1]).sigmoid_().mul_(2)
    mix = torch.add(base[2 * count :], mix, alpha=scales[2]).view(-1, count, count)
    mix = _balanced(mix.softmax(-1).add_(eps), eps, iterations)
    x = torch.bmm(share[:, None], source).view(*lead, dim)
    return x.to(streams.dtype), post.view(*lead, count), mix.view(*lead, count, count)


@implement("hyper_close", "cpu")
def hyper_close(y: Tensor, streams: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    count, dim = streams.shape[-2:]
    source = wide(streams).reshape(-1, count, dim)
    carried = torch.bmm(mix.reshape(-1, count, count).transpose(1, 2), source)
    carried.addcmul_(post.reshape(-1, count, 1), wide(y).reshape(-1, 1, dim))
    return carried.view(streams.shape).to(streams.dtype)


@implement("hyper_collapse", "cpu")
def hyper_collapse(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    eps: float,
    fixed: bool = False,
) -> Tensor:
    del fixed
    count, dim = streams.shape[-2:]
    source = wide(streams).reshape(-1, count, dim)
    logits = _logits(source.flatten(1), weight, norm_eps)
    share = logits.mul_(scale.to(logits.dtype)).add_(base.to(logits.dtype)).sigmoid_().add_(eps)
    x = torch.bmm(share[:, None], source)
    return x.view(*streams.shape[:-2], dim).to(streams.dtype)
