# SPDX-License-Identifier: Apache-2.0
"""The groups of a mesh, by torch.distributed: NCCL between GPUs, gloo on a CPU and for letters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from freewheel.errors import RankError
from freewheel.ops import join_group
from freewheel.spec.mesh import LAYER_RANKS

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


def gather_into(parts: Tensor, x: Tensor, group: Any) -> None:
    """parts [ranks, *x.shape] becomes every rank's x. Newer versions of torch call it otherwise."""
    flat = parts.view(-1)
    if "all_gather_single" in vars(dist):
        _dist.all_gather_single(flat, x.view(-1), group=group)
    else:
        _dist.all_gather_into_tensor(flat, x.view(-1), group=group)


def lost(why: str, error: RuntimeError) -> RankError:
    """What to raise where torch.distributed says that ranks no longer meet."""
    reason = why or str(error).splitlines()[0]
    return RankError(f"tp: another rank of this engine is gone ({reason}); start it anew")


@dataclass(frozen=True)
class Groups:
    """`control`: of all ranks, on the host. `world`: of all ranks, on the device."""

    control: Any
    world: Any
    ranks: int
    rank: int


def open_groups(
    device: str, rank: int, ranks: int, store: Any, why: Callable[[], str], local: int
) -> Groups:
    """Meet the other ranks, and join the groups that ops name.

    `store`: where ranks find each other; None takes what a launcher says in the environment.
    `local`: which CUDA device of this machine is the rank's.
    """
    if device == "cuda":
        torch.cuda.set_device(local)
    _dist.init_process_group(
        BACKENDS[device], store=store, rank=rank, world_size=ranks, timeout=MEETING
    )
    mesh = init_device_mesh(device, (1, ranks), mesh_dim_names=("dp", "tp"))
    join_group(LAYER_RANKS, TorchGroup(mesh.get_group("tp"), ranks, why))
    control = _dist.new_group(backend="gloo", timeout=IDLE)
    return Groups(control, mesh.get_group("tp"), ranks, rank)


def meeting_place(file: str, ranks: int) -> Any:
    """A file in which ranks of one machine find each other."""
    return _dist.FileStore(file, ranks)


def close_groups() -> None:
    """Leave all groups; others may be gone already."""
    if dist.is_initialized():
        _dist.destroy_process_group()
