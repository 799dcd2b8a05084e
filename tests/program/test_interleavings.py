# SPDX-License-Identifier: Apache-2.0
"""The letters' own code under every order of events that its marks allow.

The device here is two queues. Between any two steps of the host it may have done nothing, or
everything, or anything between that the marks do not forbid; all of these are tried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from freewheel.runtime.counters import Counters
from freewheel.runtime.executor import Lane, launch_round
from freewheel.runtime.mailbox import Mailbox, outbox_shape
from freewheel.runtime.uplink import Uplink
from freewheel.spec import Feed, StepPlan, StepShape
from freewheel.state import InboxLayout

SHAPES = (StepShape(1, 1, 0), StepShape(2, 1, 0))


class Choices:
    """Answers to `among`, replayed from a list and then 0; `advance` makes the next list."""

    def __init__(self) -> None:
        self._answers: list[int] = []
        self._limits: list[int] = []
        self._at = 0

    def among(self, count: int) -> int:
        if self._at == len(self._answers):
            self._answers.append(0)
            self._limits.append(count)
        answer = self._answers[self._at]
        self._at += 1
        return answer

    def advance(self) -> bool:
        """Go on to the next sequence; False after the last."""
        self._at = 0
        while self._answers:
            if self._answers[-1] + 1 < self._limits[-1]:
                self._answers[-1] += 1
                return True
            self._answers.pop()
            self._limits.pop()
        return False


@dataclass
class Work:
    """One thing in a queue. `free`: it takes no time, so it is done as soon as it may be."""

    do: Callable[[], None]
    may: Callable[[], bool] = lambda: True
    free: bool = False


@dataclass
class Device:
    """`Streams` whose work is done when `choices` says so. `broken` names a mark that fails."""

    choices: Choices
    broken: str = ""
    queues: dict[str, deque[Work]] = field(
        default_factory=lambda: {"rounds": deque(), "copies": deque()}
    )
    current: list[str] = field(default_factory=lambda: ["outside"])

    @contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        self.current.append(name)
        yield
        self.current.pop()

    def rounds(self) -> AbstractContextManager[object]:
        return self._inside("rounds")

    def copies(self) -> AbstractContextManager[object]:
        return self._inside("copies")

    def queue(self, work: Work) -> None:
        self.queues[self.current[-1]].append(work)

    def copy(self, target: Tensor, source: Tensor) -> None:
        def do() -> None:
            target.copy_(source)

        self.queue(Work(do))

    def mark(self) -> EventMark:
        return EventMark(self)

    def pages(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def beside(self, seconds: float) -> float:
        return seconds

    def drift(self) -> None:
        """Between two steps of the host the device does as much as it is told to."""
        while True:
            ready = self._ready()
            choice = self.choices.among(len(ready) + 1) if ready else 0
            if choice == 0:
                return
            ready[choice - 1].popleft().do()

    def run_until(self, passed: Callable[[], bool]) -> None:
        ready = self._ready()
        while not passed():
            assert ready, "the host waits for what cannot happen"
            choice = self.choices.among(len(ready)) if len(ready) > 1 else 0
            ready[choice].popleft().do()
            ready = self._ready()

    def _ready(self) -> list[deque[Work]]:
        """Queues whose head may be done and takes time; what takes none is done here."""
        moved = True
        while moved:
            moved = False
            for queue in self.queues.values():
                while queue and queue[0].free and queue[0].may():
                    queue.popleft().do()
                    moved = True
        return [queue for queue in self.queues.values() if queue and queue[0].may()]


class EventMark:
    """As a CUDA event: it can be set again, and who follows it means its latest setting."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._settings = self._passed = 0

    def set(self) -> None:
        self._settings += 1
        setting = self._settings

        def do() -> None:
            self._passed = max(self._passed, setting)

        self._device.queue(Work(do, free=True))

    def _passed_by_now(self) -> Callable[[], bool]:
        setting = self._settings
        return lambda: self._passed >= setting

    def follow(self) -> None:
        if self._device.broken != "follow":
            self._device.queue(Work(lambda: None, self._passed_by_now(), free=True))

    def wait(self) -> None:
        if self._device.broken != "wait":
            self._device.run_until(self._passed_by_now())


class Echo:
    """A round that answers with its row, its turn and the token that it was fed."""

    def __init__(self, device: Device, turns: list[int], inbox: Tensor, outbox: Tensor) -> None:
        self._device, self._turns = device, turns
        self._inbox, self._outbox = inbox, outbox

    def capture(self, fn: Callable[[], None]) -> None:
        raise NotImplementedError

    def replay(self) -> None:
        layout = InboxLayout(self._outbox.shape[0], 2, 0)

        def do() -> None:
            start = int(self._inbox[layout.feed_spans])
            self._turns.append(start)
            token = int(self._inbox[layout.feed_tokens])
            self._outbox[0] = torch.tensor([1, 0, start, 0, 0, token])

        self._device.queue(Work(do))


def fly(choices: Choices, order: tuple[int, ...], depth: int, broken: str = "") -> None:
    """Rounds of the shapes `order`, `depth` ahead of the letters; each letter must be its own."""
    device, turns, read = Device(choices, broken), [], []
    mailbox = Mailbox(depth, device, Counters())
    lanes = []
    for shape in SHAPES:
        layout = InboxLayout.of(shape, (), row_width=64)
        inbox = torch.zeros(layout.words, dtype=torch.int32)
        outbox = torch.zeros(outbox_shape(shape), dtype=torch.int32)
        uplink = Uplink(layout, inbox, depth, device, Counters())
        lanes.append(Lane(outbox, uplink, Echo(device, turns, inbox, outbox)))
        mailbox.open(shape)

    def collect() -> None:
        device.drift()
        result = mailbox.collect()
        row = result.rows[0]
        assert (row.computed, row.tokens) == (result.round_id, (result.round_id + 100,))
        assert result.round_id in turns, "a letter was read before its round had finished"
        read.append(result.round_id)

    for turn, which in enumerate(order):
        feed = Feed(turn, (turn + 100,))
        plan = StepPlan(turn, SHAPES[which], (turn + 1,), (None,), (feed,), ())
        device.drift()
        launch_round(plan, lanes[which], mailbox, device, nullcontext())
        if len(mailbox) > depth:
            collect()
    while len(mailbox):
        collect()
    assert turns == read == list(range(len(order)))


def every_order(order: tuple[int, ...], depth: int, broken: str = "", limit: int = 2000) -> int:
    """How many sequences of events were tried: all, or the first `limit`."""
    choices = Choices()
    for tried in range(1, limit + 1):
        fly(choices, order, depth, broken)
        if not choices.advance():
            return tried
    return limit


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1)])
def test_every_letter_is_its_round_s_own_in_every_order_of_events(
    order: tuple[int, ...], depth: int
) -> None:
    assert every_order(order, depth) > 1


@pytest.mark.parametrize("depth", [1, 3])
def test_longer_runs_keep_their_letters_apart_too(depth: int) -> None:
    assert every_order((0, 0, 1, 0, 0, 0), depth, limit=1500) == 1500


@pytest.mark.parametrize("broken", ["follow", "wait"])
def test_without_a_mark_some_order_mixes_letters_up(broken: str) -> None:
    with pytest.raises(AssertionError):
        every_order((0, 0, 0), 1, broken)
