# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections: parallel residual streams around every layer (arXiv:2512.24880)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from freewheel import ops
from freewheel.nn.norm_rope import Norm
from freewheel.nn.source import WeightSource, wide_dtype
from freewheel.spec.compressed import CompressedSpec, HyperSpec


@dataclass(frozen=True)
class Left:
    """A layer's output, and what puts it back: its streams are not mixed until the next is entered.

    That one op leaves a layer and enters the next saves a pass over the streams.
    """

    y: Tensor  # float [B, W, D]
    streams: Tensor  # float [B, W, N, D]
    post: Tensor  # float [B, W, N]
    mix: Tensor  # float [B, W, N, N]

    def close(self) -> Tensor:
        """The next streams [B, W, N, D]."""
        return ops.hyper_close(self.y, self.streams, self.post, self.mix)


@dataclass(frozen=True)
class HyperConnection:
    """Into and out of one attention or one mixture of experts, N streams of D elements."""

    spec: HyperSpec
    weight: Tensor  # float32 [(2 + N) * N, N * D]
    base: Tensor  # float32 [(2 + N) * N]
    scale: Tensor  # float32 [3]
    norm_eps: float

    def through(self, before: Tensor | Left, norm: Norm, layer: Callable[[Tensor], Tensor]) -> Left:
        """`layer`, of the normed input [B, W, D] that the streams [B, W, N, D] before it give."""
        spec = self.spec
        own = (self.weight, self.base, self.scale, self.norm_eps, spec.eps, spec.iterations)
        if isinstance(before, Left):
            left = (before.y, before.streams, before.post, before.mix)
            streams, x, post, mix = ops.hyper_cross(*left, *own, norm.weight, norm.eps)
        else:
            streams = before
            x, post, mix = ops.hyper_enter(streams, *own, norm.weight, norm.eps)
        return Left(layer(x), streams, post, mix)


@dataclass(frozen=True)
class HyperHead:
    """Out of the last layer."""

    spec: HyperSpec
    weight: Tensor  # float32 [N, N * D]
    base: Tensor  # float32 [N]
    scale: Tensor  # float32 [1]
    norm_eps: float

    def __call__(self, streams: Tensor) -> Tensor:  # [..., N * D] -> [..., D]
        split = streams.unflatten(-1, (self.spec.streams, -1))
        return ops.hyper_collapse(
            split, self.weight, self.base, self.scale, self.norm_eps, self.spec.eps
        )


def spread(x: Tensor, streams: int) -> Tensor:
    """[B, W, N, D]: every stream begins as x [B, W, D]."""
    return x[:, :, None].expand(-1, -1, streams, -1).contiguous()


def load_hyper_connection(source: WeightSource, spec: CompressedSpec, name: str) -> HyperConnection:
    """`name`_fn, `name`_base and `name`_scale, all in float32."""
    own, dtype = spec.hyper, wide_dtype(source.dtype)
    count = (2 + own.streams) * own.streams
    return HyperConnection(
        spec=own,
        weight=source.tensor(f"{name}_fn", (count, own.streams * spec.hidden_size), dtype),
        base=source.tensor(f"{name}_base", (count,), dtype),
        scale=source.tensor(f"{name}_scale", (3,), dtype),
        norm_eps=spec.norm_eps,
    )


def load_hyper_head(source: WeightSource, spec: CompressedSpec, name: str) -> HyperHead:
    """`name`_fn, `name`_base and `name`_scale, all in float32."""
    own, dtype = spec.hyper, wide_dtype(source.dtype)
    return HyperHead(
        spec=own,
        weight=source.tensor(f"{name}_fn", (own.streams, own.streams * spec.hidden_size), dtype),
        base=source.tensor(f"{name}_base", (own.streams,), dtype),
        scale=source.tensor(f"{name}_scale", (1,), dtype),
        norm_eps=spec.norm_eps,
    )
