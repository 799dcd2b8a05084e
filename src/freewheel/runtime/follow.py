# SPDX-License-Identifier: Apache-2.0
"""What ranks other than 0 do: as they are told, until they are told to end."""

from __future__ import annotations

import numpy as np
import torch

from freewheel.config import Launched
from freewheel.errors import RankError
from freewheel.runtime.build import build
from freewheel.runtime.describe import read_description
from freewheel.runtime.executor import Executor
from freewheel.runtime.page_copies import WORDS
from freewheel.runtime.parallel import Channel, Order, Task, join_launched
from freewheel.runtime.parallel.group import close_groups, meeting_place, open_groups
from freewheel.spec.errand import errand_in
from freewheel.spec.transfer_words import transfers_in


def follow(channel: Channel) -> None:
    """Build the engines that rank 0 builds, and run its rounds on them.

    Returns when rank 0 ends. Raises RankError if a rank is gone.
    """
    engines: list[Executor] = []
    while (order := channel.hear()).task is not Task.END:
        if order.task is Task.OPEN:
            config, ladder, mean = read_description(channel.text(order))
            built = build(config, ladder=ladder, mean=mean, leader=channel)
            engines.append(built.executor)
            continue
        _obey(engines[order.engine], channel, order)
    channel.release()
    close_groups()


def _obey(executor: Executor, channel: Channel, order: Order) -> None:
    """Do what one order says."""
    match order.task:
        case Task.CAPTURE:
            executor.capture([order.shape], lambda _: None)
        case Task.ROUND:
            executor.relay(order.shape, channel.fill)
            executor.mover.go_on()
        case Task.COPY:
            executor.copy_pages(channel.numbers(order).view(-1, WORDS))
        case Task.REPLAY:
            executor.replay_behind(order.shape)
        case Task.MIRROR:
            executor.mirror()
        case Task.READS:
            executor.host_reads()
        case Task.CLOSE:
            executor.close()
        case _:
            _move(executor, channel, order)


def _move(executor: Executor, channel: Channel, order: Order) -> None:
    """What one order says of blocks below the device."""
    match order.task:
        case Task.MOVE:
            words = np.asarray(channel.numbers(order))
            executor.part.start(transfers_in([int(word) for word in words]))
        case Task.SETTLE:
            executor.mover.go_on()
            executor.part.answer()
        case Task.FILES:
            executor.part.scan()
        case Task.ERRAND:
            executor.part.run(errand_in(channel.text(order)))
        case _:
            raise RankError(f"tp: rank 0 says {order.task.name}, which is for nobody else")


def follow_local(store: str, ranks: int, device: str, rank: int) -> None:
    """As `follow`, as a process that rank 0 started: `store` is a file where ranks meet."""
    place = meeting_place(store, ranks)
    place.set(f"running.{rank}", "1")
    follow(Channel(open_groups(device, rank, ranks, place, rank), lambda: ""))


def join(launched: Launched, device: str) -> None:
    """Meet the ranks that a launcher started. Returns at once on rank 0, at the end elsewhere.

    `device`: "cpu", "cuda", or "auto" for a CUDA device if there is one.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    channel = join_launched(launched, device)
    if launched.rank:
        follow(channel)
