# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads of one process: what a collective means, without a library for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from freewheel.ops import join_group, leave_group

T = TypeVar("T")


class ThreadGroup:
    """Every thread of `run` is a rank of it."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=30)
        self._given: list[Tensor | None] = [None] * ranks
        self._own = threading.local()
        self.ranks = ranks
        self.calls = 0

    def sum_into(self, x: Tensor) -> None:
        x.copy_(self.gather(x).sum(0))

    def gather(self, x: Tensor) -> Tensor:
        self._given[self._own.rank] = x.clone()
        self.calls += 1
        self._barrier.wait()
        parts = [part for part in self._given if part is not None]
        self._barrier.wait()
        return torch.stack(parts)

    def run(self, rank: int, work: Callable[[int], T]) -> T:
        self._own.rank = rank
        try:
            with torch.inference_mode():
                return work(rank)
        except BaseException:
            self._barrier.abort()
            raise


@contextmanager
def joined(group: ThreadGroup, name: str = "tp") -> Generator[ThreadGroup]:
    join_group(name, group)
    try:
        yield group
    finally:
        leave_group(name)


def on_ranks(count: int, work: Callable[[int], T]) -> list[T]:
    """What `work(rank)` gives on each of `count` ranks, all at once."""
    with joined(ThreadGroup(count)) as group, ThreadPoolExecutor(count) as pool:
        jobs = [pool.submit(group.run, rank, work) for rank in range(count)]
        return [job.result() for job in jobs]
