# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections (arXiv:2512.24880): N residual streams around a layer.

Before a layer the streams are collapsed to one; behind it they are mixed with one another and with
its output. All weights follow from the streams themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops.dense import wide
from freewheel.ops.registry import op


def mix_logits(streams: Tensor, weight: Tensor, norm_eps: float) -> Tensor:
    """float [..., M]: weight [M, N * D] times the streams [..., N, D] over their common size."""
    flat = wide(streams).flatten(-2)
    normed = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    return F.linear(normed, weight.to(normed.dtype))


def collapse(streams: Tensor, share: Tensor) -> Tensor:
    """[..., D]: the streams [..., N, D] summed with share float [..., N]."""
    return (share[..., None] * wide(streams)).sum(-2).to(streams.dtype)


def balance(mix: Tensor, eps: float, iterations: int) -> Tensor:
    """Sinkhorn: mix [..., N, N] with columns, then rows and columns in turn, scaled to sum to 1."""
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


def _fake_hyper_open(streams: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    lead, count = streams.shape[:-2], streams.shape[-2]
    x = streams.new_empty((*lead, streams.shape[-1]))
    dtype = torch.float64 if streams.dtype == torch.float64 else torch.float32
    post = streams.new_empty((*lead, count), dtype=dtype)
    return x, post, streams.new_empty((*lead, count, count), dtype=dtype)


@op(
    "hyper_open(Tensor streams, Tensor weight, Tensor base, Tensor scale, float norm_eps, "
    "float eps, int iterations, bool fixed=False) -> (Tensor, Tensor, Tensor)",
    fake=_fake_hyper_open,
)
def hyper_open(
    streams: Tensor,  # [..., N, D]
    weight: Tensor,  # float [(2 + N) * N, N * D]
    base: Tensor,  # float [(2 + N) * N]
    scale: Tensor,  # float [3]
    norm_eps: float,
    eps: float,
    iterations: int,
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # [..., D], float [..., N], float [..., N, N]
    """(x, post, mix): the layer's input, and the weights with which `hyper_close` puts it back.

    Of the logits weight * streams: the first N, times scale[0], plus base, give through a sigmoid
    the shares of the streams in x; the next N give post, twice a sigmoid; the rest, row by row
    through a softmax and then balanced, mix. `fixed`: kernels for a GPU keep one order of sums,
    whatever the number of tokens.
    """
    count = streams.shape[-2]
    logits = mix_logits(streams, weight, norm_eps)
    sizes = (count, count, count * count)
    pre, post, mix = logits.split(sizes, dim=-1)
    base = base.to(logits.dtype)
    pre_base, post_base, mix_base = base.split(sizes)
    pre_scale, post_scale, mix_scale = scale.to(logits.dtype).unbind()
    share = (pre * pre_scale + pre_base).sigmoid() + eps
    mixed = (mix * mix_scale + mix_base).unflatten(-1, (count, count)).softmax(-1) + eps
    x = collapse(streams, share)
    return x, 2 * (post * post_scale + post_base).sigmoid(), balance(mixed, eps, iterations)


@op(
    "hyper_close(Tensor y, Tensor streams, Tensor post, Tensor mix) -> Tensor",
    fake=lambda y, streams, *_: torch.empty_like(streams, memory_format=torch.contiguous_format),
)
def hyper_close(
    y: Tensor,  # [..., D]  the layer's output
    streams: Tensor,  # [..., N, D]
    post: Tensor,  # float [..., N]
    mix: Tensor,  # float [..., N, N]
) -> Tensor:  # [..., N, D]
    """Stream k becomes post[k] * y + sum over j of mix[j, k] * stream j: mix counts transposed."""
    carried = mix.transpose(-1, -2) @ wide(streams)
    return (post[..., None] * wide(y)[..., None, :] + carried).to(streams.dtype)


@op(
    "hyper_collapse(Tensor streams, Tensor weight, Tensor base, Tensor scale, float norm_eps, "
    "float eps, bool fixed=False) -> Tensor",
    fake=lambda streams, *_: streams.new_empty((*streams.shape[:-2], streams.shape[-1])),
)
def hyper_collapse(
    streams: Tensor,  # [..., N, D]
    weight: Tensor,  # float [N, N * D]
    base: Tensor,  # float [N]
    scale: Tensor,  # float [1]
    norm_eps: float,
    eps: float,
    fixed: bool = False,
) -> Tensor:  # [..., D]
    """The one stream that the head reads: as `hyper_open`'s x."""
    logits = mix_logits(streams, weight, norm_eps)
    share = (logits * scale.to(logits.dtype) + base.to(logits.dtype)).sigmoid() + eps
    return collapse(streams, share)
