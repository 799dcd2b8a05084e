# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads of one process: what a collective means, without a library for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from freewheel.ops import join_group, leave_group
from tests.waiting import PATIENCE

T = TypeVar("T")


class ThreadGroup:
    """Every thread of `run` is a rank of it, or of one of several groups like it: `groups` lists
    the ranks of each."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._members = {rank: tuple(group) for group in groups for rank in group}
        self._barriers = {
            tuple(group): threading.Barrier(len(group), timeout=PATIENCE) for group in groups
        }
        self._given: dict[int, Tensor] = {}
        self._own = threading.local()

    def sum_into(self, x: Tensor) -> None:
        x.copy_(self.gather(x).sum(0))

    def gather(self, x: Tensor) -> Tensor:
        members = self._members[self._own.rank]
        self._given[self._own.rank] = x.clone()
        self._barriers[members].wait()
        parts = [self._given[rank] for rank in members]
        self._barriers[members].wait()
        return torch.stack(parts)

    def scatter_sum(self, x: Tensor) -> Tensor:
        return self.gather(x).sum(0)[self._index]

    def exchange(self, x: Tensor) -> Tensor:
        return self.gather(x)[:, self._index].clone()

    @property
    def _index(self) -> int:
        return self._members[self._own.rank].index(self._own.rank)

    def enter(self, rank: int) -> None:
        """This thread is `rank`."""
        self._own.rank = rank

    def leave(self) -> None:
        """A rank failed: nobody waits for it."""
        for barrier in self._barriers.values():
            barrier.abort()


def on_ranks(count: int, work: Callable[[int], T], dp: int = 1) -> list[T]:
    """What `work(rank)` gives on each of `count` ranks, all at once, in `dp` copies."""
    tp = count // dp
    groups = {
        "tp": ThreadGroup([range(n * tp, (n + 1) * tp) for n in range(dp)]),
        "dp": ThreadGroup([range(n, count, tp) for n in range(tp)]),
    }

    def run(rank: int) -> T:
        for group in groups.values():
            group.enter(rank)
        try:
            with torch.inference_mode():
                return work(rank)
        except BaseException:
            for group in groups.values():
                group.leave()
            raise

    for name, group in groups.items():
        join_group(name, group)
    try:
        with ThreadPoolExecutor(count) as pool:
            jobs = [pool.submit(run, rank) for rank in range(count)]
            return [job.result() for job in jobs]
    finally:
        for name in groups:
            leave_group(name)
