# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections while the second demo trains: how streams are read, mixed and written.

`B` rows, `T` positions, `S` streams, `D` hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkhorn import balanced

if TYPE_CHECKING:
    from model_v4 import DemoV4Config


def unit(x: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Hyper(NamedTuple):
    """A hyper-connection's own weights."""

    fn: Tensor
    base: Tensor
    scale: Tensor

    def open(self, c: DemoV4Config, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, D], post [B, T, S], mix [B, T, S, S] of streams [B, T, S, D]; in float32."""
        count = c.hc_mult
        with torch.autocast(streams.device.type, enabled=False):
            flat = unit(streams.float().flatten(2), c.rms_norm_eps)
            pre, post, mix = F.linear(flat, self.fn).split([count, count, count * count], dim=-1)
            bases = self.base.split([count, count, count * count])
            share = (pre * self.scale[0] + bases[0]).sigmoid() + c.hc_eps
            post = 2 * (post * self.scale[1] + bases[1]).sigmoid()
            mix = (mix * self.scale[2] + bases[2]).unflatten(-1, (count, count)).softmax(-1)
            mix = balanced(mix + c.hc_eps, c.hc_eps, c.hc_sinkhorn_iters)
            x = (share[..., None] * streams.float()).sum(2)
        return x, post, mix


def close(y: Tensor, streams: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """[B, T, S, D]: what each stream keeps of the others, and its share of y [B, T, D]."""
    with torch.autocast(y.device.type, enabled=False):
        carried = (mix[..., None] * streams.float()[..., None, :]).sum(2)
        return post[..., None] * y.float()[:, :, None] + carried


class HyperHead(NamedTuple):
    """How streams become one again: the weights of a head's collapse."""

    fn: Tensor
    base: Tensor
    scale: Tensor

    def collapse(self, c: DemoV4Config, streams: Tensor) -> Tensor:
        """[B, T, D] of streams [B, T, S, D]."""
        with torch.autocast(streams.device.type, enabled=False):
            flat = unit(streams.float().flatten(2), c.rms_norm_eps)
            logits = F.linear(flat, self.fn) * self.scale + self.base
            return ((logits.sigmoid() + c.hc_eps)[..., None] * streams.float()).sum(2)
