# SPDX-License-Identifier: Apache-2.0
"""What ranks exchange inside a round: sums of what each computed in part, parts side by side, and
a piece for each.

To a graph these are ops like any other. Which processes a group has, and by what library they talk,
is said once by `join_group`; the specification below is the same for all. Every rank of a group
must call the same ops in the same order and with the same shapes.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from freewheel.errors import ConfigError
from freewheel.ops.registry import nothing, op

MEETINGS = frozenset(
    {
        "all_reduce",
        "all_reduce_in_order",
        "all_gather",
        "scatter_sum",
        "scatter_sum_in_order",
        "all_to_all",
    }
)
"""Names of the ops in which a rank waits for others."""


class Group(Protocol):
    """The ranks of a group, as one of them sees it. All wait for nothing but the device."""

    def sum_into(self, x: Tensor) -> None:
        """Replace x by the sum of every rank's x: the same bits on every rank."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]: every rank's x, in the order of ranks."""
        ...

    def scatter_sum(self, x: Tensor) -> Tensor:
        """x[own rank] of the sum of every rank's x [ranks, ...]."""
        ...

    def exchange(self, x: Tensor) -> Tensor:
        """As x [ranks, ...]: of every rank, in the order of ranks, x[own rank]."""
        ...


_GROUPS: dict[str, Group] = {}


def join_group(name: str, group: Group) -> None:
    """From here on `name` means `group` in this process."""
    _GROUPS[name] = group


def leave_group(name: str) -> None:
    """`name` means nothing any more."""
    _GROUPS.pop(name, None)


def _group(name: str) -> Group:
    if name not in _GROUPS:
        raise ConfigError(f"tp: this process is in no group {name!r}; see join_group")
    return _GROUPS[name]


@op("all_reduce(Tensor(a!) x, str group) -> ()", fake=nothing)
def all_reduce(
    x: Tensor,  # float [...]  contiguous
    group: str,
) -> None:
    """x becomes the sum of the x of all ranks of the group; the same bits on every rank."""
    _group(group).sum_into(x)


@op("all_reduce_in_order(Tensor(a!) x, str group) -> ()", fake=nothing)
def all_reduce_in_order(
    x: Tensor,  # float [...]  contiguous
    group: str,
) -> None:
    """As `all_reduce`, added up in float32 or wider and in the order of ranks.

    A library adds in an order that the size of x decides where there are more than two ranks, so a
    token's last bits would depend on how many others there are.
    """
    x.copy_(_sum_in_order(_group(group).gather(x)))


@op(
    "all_gather(Tensor x, int ranks, str group) -> Tensor",
    fake=lambda x, ranks, group: x.new_empty((*x.shape[:-1], ranks * x.shape[-1])),
)
def all_gather(
    x: Tensor,  # [..., N]
    ranks: int,
    group: str,
) -> Tensor:  # [..., ranks * N]
    """The x of all ranks of the group side by side in the last dimension, in the order of ranks."""
    parts = _group(group).gather(x.contiguous())  # [ranks, ..., N]
    return parts.movedim(0, -2).reshape(*x.shape[:-1], ranks * x.shape[-1])


@op(
    "scatter_sum(Tensor x, str group) -> Tensor",
    fake=lambda x, group: x.new_empty(x.shape[1:]),
)
def scatter_sum(
    x: Tensor,  # float [ranks, ...]
    group: str,
) -> Tensor:  # float [...]
    """The sum of the x of all ranks of the group, of which rank r gets part r."""
    return _group(group).scatter_sum(x.contiguous())


@op(
    "scatter_sum_in_order(Tensor x, str group) -> Tensor",
    fake=lambda x, group: x.new_empty(x.shape[1:]),
)
def scatter_sum_in_order(
    x: Tensor,  # float [ranks, ...]
    group: str,
) -> Tensor:  # float [...]
    """As `scatter_sum`, added up in float32 or wider and in the order of ranks."""
    return _sum_in_order(_group(group).exchange(x.contiguous()))


def _sum_in_order(parts: Tensor) -> Tensor:
    """[...], in the dtype of parts [ranks, ...]."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


@op(
    "all_to_all(Tensor x, str group) -> Tensor",
    fake=lambda x, group: x.new_empty(x.shape),
)
def all_to_all(
    x: Tensor,  # [ranks, ...]
    group: str,
) -> Tensor:  # [ranks, ...]
    """Part r of x goes to rank r of the group; what comes from rank r is part r of the result."""
    return _group(group).exchange(x.contiguous())


@op(
    "split_embedding(Tensor tokens, Tensor weight, int first) -> Tensor",
    fake=lambda tokens, weight, first: weight.new_empty((*tokens.shape, weight.shape[1])),
)
def split_embedding(
    tokens: Tensor,  # int32 [...]
    weight: Tensor,  # float [V / ranks, H]
    first: int,
) -> Tensor:  # float [..., H]
    """Rows of a table of which this rank holds those from token `first` on; zeros for others.

    Summed over the ranks this is the row of the whole table, exactly: all but one add zero.
    """
    place = tokens.long() - first
    held = (place >= 0) & (place < weight.shape[0])  # bool [...]
    rows = weight[place.clamp(0, weight.shape[0] - 1)]
    return rows.masked_fill(~held[..., None], 0)


@op(
    "own_experts(Tensor ids, Tensor weights, int first, int count) -> (Tensor, Tensor)",
    fake=lambda ids, weights, first, count: (
        ids.new_empty(ids.shape),
        weights.new_empty(ids.shape),
    ),
)
def own_experts(
    ids: Tensor,  # int32 [..., top_k]
    weights: Tensor,  # float [..., top_k]
    first: int,
    count: int,
) -> tuple[Tensor, Tensor]:  # int32 [..., top_k], float [..., top_k]
    """The choices that fall on experts `first` to `first + count` - 1, counted from `first`.

    Every other choice becomes -1 with weight 0, a choice of nobody, so shapes do not depend on
    where tokens go. Experts neither read nor compute anything for it.
    """
    place = ids - first
    held = (place >= 0) & (place < count)  # bool [..., top_k]
    return place.where(held, -1), weights.masked_fill(~held, 0)
