# SPDX-License-Identifier: Apache-2.0
"""What rank 0 tells the others, and in which words: a header of numbers, then bytes or a letter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import Any, cast
from weakref import WeakMethod

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from freewheel.errors import ConfigError, RankError
from freewheel.runtime.parallel.group import (
    Groups,
    form_mesh,
    gather_into,
    gather_later,
    lost,
)
from freewheel.spec.shape import StepShape

_dist = cast(Any, dist)  # half of its members lack types

HEADER = 3 + len(fields(StepShape))
"""task, engine, bytes that follow, and the shape, field by field."""

DIGEST = 16
"""Bytes of a digest."""


class Task(IntEnum):
    """What a follower is to do."""

    END = 0
    OPEN = 1
    """Build an engine; its description follows."""
    CAPTURE = 2
    ROUND = 3
    """Run a round of the shape; its letter follows."""
    REPLAY = 4
    MIRROR = 5
    """Take over the static tensors of rank 0."""
    READS = 6
    """Say how many host reads were counted."""
    COPY = 7
    """Copy pages before the next round; which ones follows."""
    CLOSE = 8
    """Give the engine back."""
    MOVE = 9
    """Start transfers of blocks; which ones follows."""
    SETTLE = 10
    """Say which transfers have ended, without waiting for any."""
    FILES = 11
    """Say which blocks files hold."""
    ERRAND = 12
    """Do something for prompts that change engines; what follows, see `spec.errand`."""


NO_SHAPE = StepShape(1, 1, 0)


@dataclass(frozen=True)
class Order:
    """A header. `engine`: which of the engines that were opened. `size`: bytes that follow."""

    task: Task
    engine: int = 0
    size: int = 0
    shape: StepShape = NO_SHAPE


@dataclass(frozen=True)
class Gathered:
    """What every rank says of something, once all have; nobody waits meanwhile."""

    _work: Any
    _parts: Tensor  # int64 [ranks, N, 2]
    _why: Callable[[], str]

    @property
    def here(self) -> bool:
        """Whether `take` would wait for none."""
        return self._work.is_completed()

    def take(self) -> Tensor:
        """int64 [ranks, N, 2]: in the order of ranks. Raises RankError if one is gone."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise lost(self._why(), error) from error
        return self._parts


class Channel:
    """Between rank 0 and all others; whatever one tells, the others must hear."""

    def __init__(self, groups: Groups, why: Callable[[], str]) -> None:
        self.rank, self.ranks = groups.rank, groups.ranks
        self._groups, self._why = groups, why
        self._formed: tuple[int, int] | None = None
        self._closing: list[WeakMethod[Callable[[], None]]] = []
        self._header = torch.zeros(HEADER, dtype=torch.int64)
        self._words = np.asarray(self._header)  # the same memory
        self._digest = torch.zeros(DIGEST, dtype=torch.uint8)
        self._digests = torch.zeros(self.ranks, DIGEST, dtype=torch.uint8)

    def at_close(self, release: Callable[[], None]) -> None:
        """Call `release`, a method, before the groups are closed, if whose it is still lives.

        Graphs hold on to the communicators that their collectives use: NCCL waits for the last of
        these before it lets go of one.
        """
        self._closing.append(WeakMethod(release))

    def release(self, waits: bool = True) -> None:
        """Whatever was registered lets go of the groups; `waits`: once all rounds are over."""
        if waits and self._groups.device == "cuda":
            torch.cuda.synchronize()
        while self._closing:
            method = self._closing.pop()()
            if method is not None:
                method()

    def form(self, tp: int, dp: int) -> None:
        """On all, once: join the groups of a mesh of `dp` copies, each shared by `tp` ranks.

        Raises ConfigError if the ranks are not so many, or have formed another mesh.
        """
        if self._formed == (tp, dp):
            return
        if self._formed is not None or tp * dp != self.ranks:
            raise ConfigError(f"tp: {self.ranks} ranks cannot form {dp} copies of {tp}")
        self._formed = (tp, dp)
        self._meet(lambda: form_mesh(self._groups, tp, dp, self._why))

    def tell(self, order: Order, payload: Tensor | None = None) -> None:
        """On rank 0. `payload`: `order.size` bytes of host memory."""
        self._words[:] = (order.task, order.engine, order.size, *astuple(order.shape))
        self._send(self._header)
        if payload is not None:
            self._send(payload)

    def hear(self) -> Order:
        """On the others: the next order. What follows it is then to be taken by `fill`."""
        self._send(self._header)
        task, engine, size, *words = (int(word) for word in self._words)
        kinds = (type(value) for value in astuple(NO_SHAPE))
        shape = StepShape(*(kind(word) for kind, word in zip(kinds, words, strict=True)))
        return Order(Task(task), engine, size, shape)

    def fill(self, payload: Tensor) -> None:
        """On the others: what follows an order, into host memory of just that size."""
        self._send(payload)

    def numbers(self, order: Order) -> Tensor:
        """On the others: what follows an order, as int64."""
        found = torch.zeros(order.size // 8, dtype=torch.int64)
        self.fill(found)
        return found

    def text(self, order: Order) -> str:
        """On the others: what follows an order, as text."""
        raw = torch.zeros(order.size, dtype=torch.uint8)
        self.fill(raw)
        return np.asarray(raw).tobytes().decode()

    def mirror(self, tensor: Tensor) -> None:
        """On all: `tensor`, contiguous and on the device, becomes what it is on rank 0."""
        self._meet(lambda: _dist.broadcast(_bytes(tensor), 0, group=self._groups.world))

    def agree(self, what: str, digest: bytes) -> None:
        """On all: raise RankError, naming the ranks, unless all of a copy of the model come with
        the same digest."""
        np.asarray(self._digest)[:] = np.frombuffer(digest, dtype=np.uint8)
        self._meet(lambda: gather_into(self._digests, self._digest, self._groups.control))
        tp = self.ranks if self._formed is None else self._formed[0]
        found = np.asarray(self._digests).reshape(-1, tp, DIGEST)
        differs = (found != found[:, :1]).any(axis=2)  # bool [copies, tp]
        for copy, others in enumerate(differs):
            if others.any():
                ranks = ", ".join(str(copy * tp + rank) for rank in np.flatnonzero(others))
                raise RankError(
                    f"check_ranks: rank {ranks} decided otherwise than rank {copy * tp} in {what}"
                )

    def counts(self, own: int) -> list[int]:
        """On all: every rank's number, in the order of ranks."""
        numbers = torch.zeros(self.ranks, dtype=torch.int64)
        given = torch.tensor([own], dtype=torch.int64)
        self._meet(lambda: gather_into(numbers, given, self._groups.control))
        return [int(number) for number in np.asarray(numbers)]

    def ask(self, own: Tensor) -> Gathered:
        """On all, and without waiting for any: what each of them says; own: int64 [N, 2]."""
        parts = own.new_empty((self.ranks, *own.shape))
        started: list[Any] = []
        self._meet(lambda: started.append(gather_later(parts, own, self._groups.answers)))
        return Gathered(started[0], parts, self._why)

    def texts(self, own: bytes) -> list[bytes]:
        """On all: what each of them says, of any length, in the order of ranks."""
        sizes = self.counts(len(own))
        padded = np.zeros(max(1, *sizes), dtype=np.uint8)
        padded[: len(own)] = np.frombuffer(own, dtype=np.uint8)
        parts = torch.zeros(self.ranks, len(padded), dtype=torch.uint8)
        given = torch.from_numpy(padded)
        self._meet(lambda: gather_into(parts, given, self._groups.control))
        found = zip(np.asarray(parts), sizes, strict=True)
        return [row[:size].tobytes() for row, size in found]

    def _send(self, tensor: Tensor) -> None:
        self._meet(lambda: _dist.broadcast(tensor, 0, group=self._groups.control))

    def _meet(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (RuntimeError, ValueError) as error:  # a ValueError: the groups are closed
            raise lost(self._why(), error) from error


def bytes_of(text: str) -> Tensor:
    """uint8 [bytes]: a text as it is told."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
