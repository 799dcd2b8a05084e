# SPDX-License-Identifier: Apache-2.0
"""Matrix products whose result for one token does not depend on how many others there are.

A library chooses its kernel, its tiles and the order of its sums by the shape of a product, so a
token's last bits change with the batch and the width. Here every product sees the same number of
tokens, padded with zeros: one shape for each weight, one order of sums. The price is that a wide
rectangle reads the weights once a block. Kernels of this package are told to keep to one order, if
they do not do so anyway; an op that has none for its arguments runs in blocks as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from freewheel import ops
from freewheel.graph.dispatch import Args, DispatchMode, OpOverload, decompose

__all__ = ["BLOCK", "FixedBlocks", "in_fixed_blocks"]

T = TypeVar("T")

BLOCK, WIDE_BLOCK = 16, 32
"""Tokens of one product; and of one whose kernel for more tokens than a few is no slower."""

aten = torch.ops.aten

_TOKENS: dict[Any, tuple[int, int]] = {
    aten.mm.default: (0, 0),
    aten.addmm.default: (1, 0),
    aten.bmm.default: (0, 1),
    ops.wide_linear: (0, 0),
}
"""Product -> which argument holds the tokens, and along which of its dimensions."""

_SIZES = {ops.wide_linear: WIDE_BLOCK, aten.mm.default: 128}

_BY_TOKEN: dict[Any, tuple[int, ...]] = {
    ops.grouped_experts: (0, 3, 4),
    ops.block_linear: (0,),
    ops.block_experts: (0, 5, 6),
    ops.mxfp4_experts: (0, 5, 6),
    ops.repacked_experts: (0, 3, 4),
    ops.clamped_experts: (0, 3, 4),
    ops.project_raw: (0,),
}
"""Op that has kernels of its own for few tokens -> its arguments [B, W, ...], a place a token."""

_APART: dict[Any, Callable[..., Any]] = {
    ops.block_open_latents: ops.open_latents_apart,
    ops.block_add_rms_norm: ops.add_norm_apart,
    ops.sparse_mla_values: ops.values_apart,
    ops.wide_route: ops.wide_route_apart,
    ops.wide_route_best: ops.wide_route_best_apart,
    ops.hyper_cross: ops.hyper_cross_apart,
    ops.all_reduce: ops.all_reduce_in_order,
    ops.scatter_sum: ops.scatter_sum_in_order,
}
"""Op that is several in one, or whose order of sums is a library's -> what keeps to one order."""

_PADDED = (ops.hyper_open, ops.hyper_enter, ops.hyper_collapse)
"""Ops on streams [..., N, D] whose kernels differ only where tokens are fewer than `BLOCK`."""

_FIXED = (ops.sparse_mla, ops.fp8_sparse_mla, ops.window_attention, ops.fp8_window_attention)
"""Ops that sum in one order whatever the number of tokens, if they are told to."""

_PARTED: dict[Any, tuple[int, ...]] = {
    ops.wide_linear: (0,),
    ops.wide_route: (0,),
    ops.wide_route_best: (0,),
    ops.block_add_rms_norm: (0, 3),
    ops.block_open_latents: (1, 8, 11),
}
"""Op whose kernels do so, in parts of sums -> its arguments [..., n], a place a token; of these the
first is what it computes in, and n may be missing."""

_TOLD = (
    ops.block_linear,
    ops.block_experts,
    ops.mxfp4_experts,
    ops.repacked_experts,
    ops.hyper_cross,
    ops.hyper_open,
    ops.hyper_enter,
    ops.hyper_collapse,
)
"""Ops whose kernels do so. These and those of `_PARTED` have none for other dtypes, and on the CPU:
there they are in another table."""

_KERNEL_DTYPES = (torch.bfloat16, torch.float32)

PIECE = 1024
"""Tokens of one launch at most of `_PARTED`: parts are held for all of them."""


class FixedBlocks(DispatchMode):
    """A context in which products run `BLOCK` tokens at a time.

    Tokens are expected on the left, weights on the right, as `torch.nn.functional.linear` and
    `einsum("bwhn,hnc->bwhc", tokens, weight)` put them.
    """

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        parts = decompose(func)
        if parts is not None:
            with self:  # a composite hides its products
                return parts(*args, **kwargs)
        if func in _TOLD and _has_kernels(args[0]):
            return _told(func, args, kwargs)
        if func in _PARTED and _has_kernels(args[_PARTED[func][0]]):
            return _in_pieces(func, _PARTED[func], args, kwargs)
        if func in _APART:
            with self:
                return _APART[func](*args, **kwargs)
        if func in _TOKENS:
            return _product(func, args, kwargs)
        return _kept_in_order(func, args, kwargs)


def _kept_in_order(func: OpOverload, args: Args, kwargs: dict[str, Any]) -> Any:
    """An op of this package that may have to be told, or run in blocks; any other as it is."""
    if func in _FIXED:
        return _told(func, args, kwargs)
    if func in _BY_TOKEN:
        return _token_by_token(func, _BY_TOKEN[func], args, kwargs)
    if func in _PADDED:
        return _padded(func, *args, **kwargs)
    if func is ops.shared_products:
        return _parts_by_blocks(func, *args, **kwargs)
    return func(*args, **kwargs)


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _KERNEL_DTYPES


def _in_pieces(
    func: OpOverload, places: tuple[int, ...], args: Args, kwargs: dict[str, Any]
) -> Any:
    """`func` of all tokens, or of PIECE at a time."""
    lead = args[places[0]].shape[:-1]
    count = lead.numel()
    if count <= PIECE:
        return _told(func, args, kwargs)
    flat = {at: args[at].reshape(1, count, *args[at].shape[len(lead) :]) for at in places}
    found: list[Any] = []
    for first in range(0, count, PIECE):
        own = {at: line[:, first : first + PIECE] for at, line in flat.items()}
        given = tuple(own.get(index, arg) for index, arg in enumerate(args))
        found.append(_told(func, given, kwargs))
    if isinstance(found[0], Tensor):
        return torch.cat(found, 1).view(*lead, *found[0].shape[2:])
    return tuple(
        torch.cat(own, 1).view(*lead, *own[0].shape[2:]) for own in zip(*found, strict=True)
    )


def _product(func: OpOverload, args: Args, kwargs: dict[str, Any]) -> Tensor:
    """A product of tokens and a weight, for blocks of tokens."""
    index, dim = _TOKENS[func]
    tokens: Tensor = args[index]
    if func is ops.wide_linear:
        tokens = tokens.reshape(-1, tokens.shape[-1])

    def product(block: Tensor) -> Tensor:
        return func(*args[:index], block, *args[index + 1 :], **kwargs)

    out = by_blocks(product, (tokens,), dim, size=_SIZES.get(func, BLOCK))
    return out.view(*args[0].shape[:-1], -1) if func is ops.wide_linear else out


def _told(func: OpOverload, args: Args, kwargs: dict[str, Any]) -> Any:
    """`func` with `fixed`, which the dispatcher has put among `args` if a later argument is."""
    place = [argument.name for argument in func._schema.arguments].index("fixed")
    if place < len(args):
        return func(*args[:place], True, *args[place + 1 :], **kwargs)
    return func(*args, **{**kwargs, "fixed": True})


def _token_by_token(
    func: OpOverload, places: tuple[int, ...], args: Args, kwargs: dict[str, Any]
) -> Tensor:
    """`func`, for blocks of tokens; what fills the last one up has no weight and index 0."""
    lead = args[0].shape[:-1]
    flat = tuple(args[index].reshape(1, lead.numel(), -1) for index in places)

    def placed(*blocks: Tensor) -> Tensor:
        own = dict(zip(places, blocks, strict=True))
        return func(*(own.get(index, arg) for index, arg in enumerate(args)), **kwargs)

    return by_blocks(placed, flat, 1).reshape(*lead, -1)


def _padded(func: OpOverload, streams: Tensor, *args: Any) -> Any:
    """`func` of at least `BLOCK` tokens: those that are missing are zeros."""
    lead = streams.shape[:-2]
    count = lead.numel()
    if not 0 < count < BLOCK:
        return func(streams, *args)
    found = func(_block(streams.reshape(count, *streams.shape[-2:]), 0, 0, BLOCK), *args)
    if isinstance(found, Tensor):
        return found[:count].view(*lead, *found.shape[1:])
    return tuple(one[:count].view(*lead, *one.shape[1:]) for one in found)


def _parts_by_blocks(func: OpOverload, x: Tensor, *args: Any) -> Tensor:
    """`shared_products`, in as many parts as a block of tokens has, whatever their number.

    What is wide is added up at once, in the order of its parts, in which their reader would.
    """
    weights = args[:4]
    lead, inputs = x.shape[:-1], x.shape[-1]
    wide, parts = lead.numel() > ops.MANY_TOKENS, ops.parts_for(WIDE_BLOCK, inputs)
    own_kernels = _has_kernels(x)
    if own_kernels and not wide:
        return func(x, *weights, parts, True)

    def product(block: Tensor) -> Tensor:
        found = func(block, *weights, parts, own_kernels)  # [parts, .., N]
        return reduce(torch.add, found.unbind(0)) if wide else found

    into, size = 0 if wide else 1, ops.MANY_TOKENS if own_kernels else WIDE_BLOCK
    out = by_blocks(product, (x.reshape(-1, inputs),), 0, into, size)
    return out.view(1 if wide else parts, *lead, out.shape[-1])


def by_blocks(
    product: Callable[..., Tensor],
    tokens: tuple[Tensor, ...],
    dim: int,
    into: int | None = None,
    size: int = BLOCK,
) -> Tensor:
    """`product(*tokens)`, computed `size` places of dimension `dim` of each at a time.

    `into`: the dimension of the result where they are; None: the same.
    """
    count, into = tokens[0].shape[dim], dim if into is None else into
    places = range(0, count, size)
    blocks = [product(*(_block(one, dim, at, size) for one in tokens)) for at in places]
    if not blocks:
        return product(*tokens)
    return (torch.cat(blocks, into) if len(blocks) > 1 else blocks[0]).narrow(into, 0, count)


def _block(tokens: Tensor, dim: int, at: int, size: int) -> Tensor:
    """`size` places from `at` on, zeros behind the last."""
    some = tokens.narrow(dim, at, min(size, tokens.shape[dim] - at))
    if some.shape[dim] == size:
        return some.clone(memory_format=torch.contiguous_format)
    shape = [*some.shape]
    shape[dim] = size
    block = some.new_zeros(shape)
    block.narrow(dim, 0, some.shape[dim]).copy_(some)
    return block


def in_fixed_blocks(fn: Callable[[], T]) -> Callable[[], T]:
    """`fn`, to be called under `FixedBlocks`."""

    def blocked() -> T:
        with FixedBlocks():
            return fn()

    return blocked
