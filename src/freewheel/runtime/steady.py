# SPDX-License-Identifier: Apache-2.0
"""Rounds of decoding alone, in a steady state, to be timed: the product's own rounds and host loop.

Rows are put where a prompt would have brought them, over caches of random numbers, so that no
prompt need be computed; from there on the scheduler, the executor and the graphs are those of any
engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel.config import EngineConfig, room_for
from freewheel.graph import Graph, SyncLog, no_host_sync
from freewheel.host import Request, Scheduler
from freewheel.runtime.build import Built, build
from freewheel.runtime.clock import Span, TimedGraph, open_clock, wait_for_device
from freewheel.runtime.tracing import DeviceTrace, traced
from freewheel.spec import SamplingParams, ShapeLadder, StepShape

NARROWEST_PROMPT = 16
"""Width of the one prompt rectangle, which is never captured."""


@dataclass(frozen=True)
class SteadyRun:
    """`rounds` rounds of `rows` rows in all, each in flight with those before it.

    `seconds`: the host's, from letter to letter. `tokens`: decided in these rounds, of all rows.
    `host`: what the host did, `device`: each round from its first kernel's start to its last's end.
    """

    rounds: int
    rows: int
    seconds: float
    tokens: int
    host: tuple[Span, ...]
    device: tuple[Span, ...]


@dataclass(frozen=True)
class SteadyCounts:
    """What crossed between host and device in `rounds` rounds, by the guard and our counters.

    `calls`: operator calls of a round, if its graph counts them. `trace`: what the profiler saw,
    on a CUDA device.
    """

    rounds: int
    host_reads: int
    uploads: int
    downloads: int
    graph_launches: int
    calls: int | None
    trace: DeviceTrace | None


class SteadyDecode:
    """An engine that only decodes: `batches` rows at once, `context` tokens behind each.

    Where there are several copies of the model, so many rows of each, which all do the same.
    """

    def __init__(
        self, config: EngineConfig, batches: Sequence[int], mean: float | None, rounds: int
    ) -> None:
        """`mean`: tokens a round that drafts are made right for; None leaves them to the model.

        The rest of `config.context_len` behind `room_for(rounds)` is the context; no run may be
        longer. Raises what `build` raises.
        """
        depth = config.depth
        shapes = tuple(StepShape(batch, 1 + depth, depth) for batch in sorted(set(batches)))
        ladder = ShapeLadder(shapes, ((1, NARROWEST_PROMPT),), depth)

        self.config = config
        self.built: Built = build(config, ladder=ladder, mean=mean)
        self.executor = self.built.executor
        self.shapes = {shape.batch: shape for shape in shapes}
        self._context = self.built.sizes.row_width - room_for(rounds, depth)
        self._fill()

    def capture(self, batch: int) -> float:
        """Make the graph of a batch; seconds that it took."""
        began = time.perf_counter()
        self.executor.capture([self.shapes[batch]], lambda _: None)
        wait_for_device(self.built.resolved.device)
        return time.perf_counter() - began

    def run(self, batch: int, rounds: int, slow_host: float = 0.0, warm: int = 4) -> SteadyRun:
        """Time `rounds` rounds of `batch` rows after `warm` others. `slow_host`: seconds of sleep
        in each turn of the host's loop."""
        clock = open_clock(self.built.resolved.device)
        marks: list[tuple[Callable[[], float], Callable[[], float]]] = []
        loop = _Loop(self, self._place(batch), slow_host)
        with self.executor.observed(lambda graph: TimedGraph(graph, clock, marks)):
            loop.turn(warm)
            loop.spans.clear()
            loop.launched = 0
            tokens, began, skipped = loop.tokens, time.perf_counter(), len(marks)
            loop.turn(rounds)
            ended, tokens = time.perf_counter(), loop.tokens - tokens
            loop.end()
        wait_for_device(self.built.resolved.device)
        spans = tuple(
            Span(f"round {number}", begin(), end())
            for number, (begin, end) in enumerate(marks[skipped : skipped + rounds])
        )
        host = tuple(span for span in loop.spans if span.begin < ended)
        rows = batch * self.executor.copies
        return SteadyRun(rounds, rows, ended - began, tokens, host, spans)

    def count(self, batch: int, rounds: int) -> SteadyCounts:
        """Run `rounds` rounds under the guard and, on a CUDA device, under the profiler."""
        counters, log = self.executor.counters, SyncLog()
        before = vars(counters).copy()
        trace: DeviceTrace | None = None
        with self.executor.observed(lambda graph: WatchedGraph(graph, log)):
            _Loop(self, self._place(batch), 0.0).turn_and_end(rounds)
        made = {name: count - before[name] for name, count in vars(counters).items()}
        if self.built.resolved.device == "cuda":
            loop = _Loop(self, self._place(batch), 0.0)
            trace = traced(lambda: loop.turn_and_end(rounds))
        return SteadyCounts(
            rounds=made["rounds"],
            host_reads=len(log.reads),
            uploads=made["uploads"],
            downloads=made["downloads"],
            graph_launches=made["graph_launches"],
            calls=self.executor.calls(self.shapes[batch]),
            trace=trace,
        )

    def _fill(self) -> None:
        """Random tokens in every row, random numbers in every cache."""
        arena = self.executor.arena
        self.executor.state.tokens[1:].random_(0, self.built.spec.vocab_size)
        for name in arena.names():
            if name.startswith("cache."):
                _draw(arena[name])

    def _place(self, batch: int) -> Scheduler:
        """`batch` rows that have just been through a prompt of the context's length."""
        wait_for_device(self.built.resolved.device)
        built, sizes = self.built, self.built.sizes
        scheduler = Scheduler(
            built.ladder,
            built.groups,
            sizes.pages,
            sizes.rows,
            sizes.row_width,
            sizes.row_width,
            self.config.run_ahead,
        )
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        for number in range(batch):
            prompt = (0,) * self._context
            request = Request(f"row-{number}", prompt, params, number, sizes.row_width)
            scheduler.add(request)
            scheduler.roster.admit(request)
            self._place_row(scheduler, request)
        self.executor.mirror()
        wait_for_device(self.built.resolved.device)
        return scheduler

    def _place_row(self, scheduler: Scheduler, request: Request) -> None:
        """On the host and on the device: all but the last certain token are computed."""
        tenancy, state = scheduler.roster.tenancy(request), self.executor.state
        request.output.append(0)
        tenancy.lower, tenancy.last_round = self._context, 0
        for group, span in zip(self.built.groups, tenancy.spans, strict=True):
            if group.retention is not None:
                span.first = max(0, self._context - group.retention) // group.page_size
        writes = scheduler.roster.reservations.reserve(tenancy, self._context)
        assert writes is not None, "there are pages for every row's whole context"
        row = tenancy.row
        state.page_tables[:, row] = 0
        for index, span in enumerate(tenancy.spans):
            pages = torch.tensor(span.pages, dtype=torch.int32)  # int32 [P]
            state.page_tables[index, row, span.first : span.end].copy_(pages)
        state.known_lens[row] = self._context + 1
        state.computed_lens[row] = self._context
        state.limit_lens[row] = request.limit
        for column in (state.draft_lens, state.minimum_lens, state.temperature, state.uses):
            column[row] = 0
        state.stop_ids[row] = -1


class WatchedGraph:
    """A captured graph whose replays are watched; `log` takes what was read or copied."""

    def __init__(self, graph: Graph[None], log: SyncLog) -> None:
        self._graph, self._log = graph, log

    def capture(self, fn: Callable[[], None]) -> None:
        self._graph.capture(fn)

    def replay(self) -> None:
        with no_host_sync(raise_=False, log=self._log):
            self._graph.replay()


class _Loop:
    """The host's loop: plan, launch, and read the letter that is due.

    `spans`: what it did. `tokens`: decided in the rounds read, `launched`: rounds launched, so far.
    """

    def __init__(self, steady: SteadyDecode, scheduler: Scheduler, slow_host: float) -> None:
        self.spans: list[Span] = []
        self.tokens = self.launched = 0
        self._executor, self._scheduler = steady.executor, scheduler
        self._slow_host = slow_host

    def turn(self, rounds: int) -> None:
        """Launch so many rounds. What is in flight behind `run_ahead` others is read."""
        for _ in range(rounds):
            with self._span("plan"):
                plan = self._scheduler.plan()
            assert plan is not None, "every row decodes, and letters are read as they are due"
            with self._span(f"launch {self.launched}"):
                self._executor.launch(plan.alike(self._executor.copies))
            self.launched += 1
            if self._slow_host:
                with self._span("sleep"):
                    time.sleep(self._slow_host)
            if self._executor.in_flight > self._scheduler.run_ahead:
                self._read()

    def end(self) -> None:
        """Read what is still under way."""
        while self._executor.in_flight:
            self._read()

    def turn_and_end(self, rounds: int) -> None:
        self.turn(rounds)
        self.end()

    def _read(self) -> None:
        with self._span("await letter"):
            letter = self._executor.collect()
        with self._span("read letter"):
            self._scheduler.collect(letter, time.perf_counter())
        self.tokens += sum(len(row.tokens) for copy in letter.each for row in copy.rows)

    @contextmanager
    def _span(self, name: str) -> Generator[None]:
        begin = time.perf_counter()
        yield
        self.spans.append(Span(name, begin, time.perf_counter()))


def _draw(cache: Tensor) -> None:
    """Random numbers of size one; where rows are bytes, FP8 and scales no larger than 64."""
    if cache.dtype.is_floating_point:
        cache.normal_()
    else:
        cache.random_(0, 64)
