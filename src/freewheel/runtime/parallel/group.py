# SPDX-License-Identifier: Apache-2.0
"""The groups of a mesh, by torch.distributed: NCCL between GPUs, gloo on a CPU and for letters."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from freewheel.errors import RankError
from freewheel.ops import join_group
from freewheel.spec.mesh import LAYER_RANKS, REPLICA_RANKS

_dist = cast(Any, dist)  # half of its members lack types

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

IDLE = timedelta(days=365)
"""A follower waits for its next order as long as nobody asks for anything."""

MEETING = timedelta(minutes=30)
"""Ranks wait for one another inside a round: the slowest may be compiling its kernels."""


@dataclass(frozen=True)
class TorchGroup:
    """A group of torch.distributed, as ops see it (`ops.collective.Group`).

    `why`: says what is known of a rank that is gone. Raises RankError if one is.
    """

    group: Any
    ranks: int
    why: Callable[[], str]

    def sum_into(self, x: Tensor) -> None:
        try:
            _dist.all_reduce(x, group=self.group)
        except RuntimeError as error:
            raise lost(self.why(), error) from error

    def gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty((self.ranks, *x.shape))
        try:
            gather_into(parts, x, self.group)
        except RuntimeError as error:
            raise lost(self.why(), error) from error
        return parts

    def scatter_sum(self, x: Tensor) -> Tensor:
        own = x.new_empty(x.shape[1:])
        try:
            scatter_sum_into(own, x, self.group)
        except RuntimeError as error:
            raise lost(self.why(), error) from error
        return own

    def exchange(self, x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        try:
            _dist.all_to_all_single(received, x, group=self.group)
        except RuntimeError as error:
            raise lost(self.why(), error) from error
        return received


def scatter_sum_into(own: Tensor, x: Tensor, group: Any) -> None:
    """own [...] becomes this rank's part of the sum of every rank's x [ranks, ...]."""
    if "reduce_scatter_single" in vars(dist):
        _dist.reduce_scatter_single(own.view(-1), x.view(-1), group=group)
    else:
        _dist.reduce_scatter_tensor(own.view(-1), x.view(-1), group=group)


def gather_into(parts: Tensor, x: Tensor, group: Any) -> None:
    """parts [ranks, *x.shape] becomes every rank's x."""
    _gather(parts, x, group, later=False)


def gather_later(parts: Tensor, x: Tensor, group: Any) -> Any:
    """As `gather_into`, without waiting: the work, whose `is_completed` and `wait` say when."""
    return _gather(parts, x, group, later=True)


def _gather(parts: Tensor, x: Tensor, group: Any, later: bool) -> Any:
    """Newer versions of torch call it otherwise."""
    flat = parts.view(-1)
    if "all_gather_single" in vars(dist):
        return _dist.all_gather_single(flat, x.view(-1), group=group, async_op=later)
    return _dist.all_gather_into_tensor(flat, x.view(-1), group=group, async_op=later)


def lost(why: str, error: RuntimeError | ValueError) -> RankError:
    """What to raise where torch.distributed says that ranks no longer meet."""
    # Its first sentence, without the places in its sources that gloo and NCCL name.
    said = re.sub(r"^\[/[^\]]*\]\s*|\s*(?:in: )?/\S+:\d+,?", "", str(error).splitlines()[0])
    reason = why or said.split(". ")[0].rstrip(".")
    return RankError(f"tp: another rank of this engine is gone ({reason}); start it anew")


@dataclass(frozen=True)
class Groups:
    """`control`: of all ranks, on the host. `answers`: likewise, for what nobody waits for.
    `world`: of all ranks, on the device. `parts`: those of the mesh that this rank is in, on the
    device."""

    control: Any
    answers: Any
    world: Any
    ranks: int
    rank: int
    device: str
    parts: list[Any] = field(default_factory=list[Any])

    def abort(self) -> None:
        """Let nothing on the device wait for a rank that is gone."""
        for group in (*self.parts, self.world):
            group.abort()


def open_groups(device: str, rank: int, ranks: int, store: Any, local: int) -> Groups:
    """Meet the other ranks. Groups that ops name are joined by `form_mesh`.

    `store`: where ranks find each other; None takes what a launcher says in the environment.
    `local`: which CUDA device of this machine is the rank's.
    """
    if device == "cuda":
        torch.cuda.set_device(local)
    _dist.init_process_group(
        BACKENDS[device], store=store, rank=rank, world_size=ranks, timeout=MEETING
    )
    control, answers = (_dist.new_group(backend="gloo", timeout=IDLE) for _ in range(2))
    return Groups(control, answers, _dist.group.WORLD, ranks, rank, device)


def form_mesh(groups: Groups, tp: int, dp: int, why: Callable[[], str]) -> None:
    """Join the groups that ops name, as a rank of `dp` copies of a model that `tp` ranks share."""
    names = (REPLICA_RANKS, LAYER_RANKS)
    mesh = init_device_mesh(groups.device, (dp, tp), mesh_dim_names=names)
    for name, ranks in zip(names, (dp, tp), strict=True):
        group = mesh.get_group(name)
        groups.parts.append(group)
        join_group(name, TorchGroup(group, ranks, why))


def meeting_place(file: str, ranks: int) -> Any:
    """A file in which ranks of one machine find each other."""
    return _dist.FileStore(file, ranks)


def close_groups() -> None:
    """Leave all groups; others may be gone already."""
    if dist.is_initialized():
        _dist.destroy_process_group()
