# SPDX-License-Identifier: Apache-2.0
"""Owns the device: the static tensors, the round, and one graph for each shape."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freewheel import ops
from freewheel.decode import Drafter, Round
from freewheel.graph import (
    CudaGraph,
    EagerGraph,
    Graph,
    GraphPool,
    SyncLog,
    TapeGraph,
    no_host_sync,
)
from freewheel.memory import Sizes
from freewheel.models.base import Model
from freewheel.ops import kernels_loaded
from freewheel.runtime.convoy import Part
from freewheel.runtime.counters import Counters
from freewheel.runtime.deterministic import in_fixed_blocks
from freewheel.runtime.files import FileStore
from freewheel.runtime.mailbox import Mailbox, digest_of, outbox_shape
from freewheel.runtime.mover import Mover
from freewheel.runtime.page_copies import copies_in, copy_pages
from freewheel.runtime.parallel import Alone, Peers
from freewheel.runtime.perturb import Perturber
from freewheel.runtime.rehearsal import rehearse
from freewheel.runtime.streams import (
    Streams,
    await_device,
    empty_caches,
    open_streams,
)
from freewheel.runtime.uplink import Uplink
from freewheel.spec.cache import CacheGroup
from freewheel.spec.mesh import ALONE, REPLICA_RANKS, Mesh
from freewheel.spec.picks import picked_layers
from freewheel.spec.plan import StepPlan, StepResult
from freewheel.spec.shape import MAX_LAG, StepShape
from freewheel.spec.violation import Watch
from freewheel.state import Arena, CachePool, Canary, InboxLayout, SequenceState

REPLAYS = 3
"""Replays that are timed together."""


@dataclass(frozen=True)
class Lane:
    """One shape's letters and graph."""

    home: Tensor  # int32 [copies * B, words]  what all copies of the model have in their outboxes
    uplink: Uplink
    graph: Graph[None]


def launch_round(
    plan: StepPlan,
    lane: Lane,
    mailbox: Mailbox,
    streams: Streams,
    watch: AbstractContextManager[object],
) -> None:
    """Queue one round as `streams` says: a letter up, one graph under `watch`, a letter home."""
    with torch.inference_mode(), streams.rounds():
        lane.uplink.post(plan)
        mailbox.make_way(plan.shape)
        with watch:
            lane.graph.replay()
        mailbox.post(plan, lane.home)


class Executor:
    """Runs plans. `launch` returns nothing: what a round did comes home through `collect`."""

    def __init__(  # noqa: PLR0913
        self,
        target: Model,
        drafter: Drafter,
        weights: Iterable[Tensor],
        groups: tuple[CacheGroup, ...],
        sizes: Sizes,
        shapes: tuple[StepShape, ...],
        *,
        device: str,
        graph: str,
        run_ahead: int,
        guard: bool,
        deterministic: bool = False,
        grammars: int = 0,
        peers: Peers | None = None,
        mesh: Mesh = ALONE,
        check_ranks: bool = False,
        canary: Watch | None = None,
        files: FileStore | None = None,
    ) -> None:
        """`peers`: the other ranks that hold a share of the model; None if there are none.

        `mesh`: how they share it. `canary`: what to watch. `files`: where blocks go in the end.
        """
        self._replica = mesh.replica
        self._peers = Alone() if peers is None else peers
        self._check_ranks = check_ranks
        self.arena = Arena(device)
        for index, weight in enumerate(weights):
            self.arena.adopt(f"weights.{index}", weight)
        self.state = SequenceState.build(
            self.arena, sizes.rows, sizes.row_width, groups, target.spec.vocab_size, grammars
        )
        self.cache = CachePool(self.arena, groups, sizes.pages)
        self.counters = Counters()
        self.sync_log = SyncLog()
        drafter.open(self.arena, sizes.rows)
        self.canary = self._new_canary(canary, drafter, mesh.layer.count)
        self.perturber = self._new_perturber(canary, drafter)
        self._round = Round(self.state, self.cache, target, drafter, self.canary)
        self._picked = picked_layers(target.spec)
        self._verdicts = None if self.canary is None else self.canary.layout
        self._graph, self._run_ahead = graph, run_ahead
        self._guard, self._deterministic = guard, deterministic
        self._letters = {shape: self._new_letters(shape) for shape in shapes}
        self.arena.seal()
        # On a CPU, what others take from the processor is no part of a round.
        self.clock = time.process_time if device == "cpu" else time.perf_counter
        self._streams = open_streams(device)
        self.mover = Mover(self.cache, sizes.host_slots, device, self.canary, files)
        self.part = Part(self.mover, mesh, self._streams, self._peers)
        self.carrier = self.part.lead()
        self._pool = GraphPool() if graph == "cuda" else None
        self._mailbox = Mailbox(
            run_ahead, self._streams, self.counters, mesh.dp, self._picked, self._verdicts
        )
        self._lanes: dict[StepShape, Lane] = {}
        self._ready = False
        self._peers.at_close(self.release)

    @property
    def copies(self) -> int:
        """Of the model: a plan says what each of them does."""
        return self._replica.count

    @property
    def in_flight(self) -> int:
        """Rounds launched whose letters were not read."""
        return len(self._mailbox)

    def capture(self, shapes: Iterable[StepShape], progress: Callable[[StepShape], None]) -> None:
        """Make the graphs of `shapes`; `progress` is called after each.

        From here on a round of any other shape counts as a late capture: it keeps all others
        waiting. Largest first, so that graphs can share memory: the order of `ShapeLadder.shapes`.
        """
        wanted = tuple(shapes)
        self._rehearse([shape for shape in wanted if shape not in self._lanes])
        for shape in wanted:
            self._lane(shape)
            progress(shape)
        self._ready = True

    def launch(self, plan: StepPlan) -> None:
        """One round: a letter up, one graph, a letter home. RankError if a rank is gone."""
        self.counters.late_captures += self._ready and plan.shape not in self._lanes
        if any(one.copies for one in plan.each):
            copies = copies_in(plan)
            self._peers.copy(copies)
            self.copy_pages(copies)
        self._perturb(plan)
        kernels = kernels_loaded()
        launch_round(plan, self._lane(plan.shape), self._mailbox, self._streams, self._watch())
        self.counters.late_kernels += self._ready * (kernels_loaded() - kernels)
        self.counters.graph_launches += 1
        self.counters.rounds += 1
        self._agree(plan.shape)

    def copy_pages(self, copies: Tensor) -> None:
        """What rows of the next round take over from others; see `page_copies`."""
        with torch.inference_mode(), self._streams.rounds():
            copy_pages(self.cache, self.canary, copies, self._replica.index)

    def relay(self, shape: StepShape, fill: Callable[[Tensor], None]) -> None:
        """A round that rank 0 planned, on a letter that `fill` brings. Nothing goes home."""
        lane = self._lane(shape)
        with torch.inference_mode(), self._streams.rounds():
            lane.uplink.relay(fill)
            with self._watch():
                lane.graph.replay()
        self.counters.rounds += 1
        self._agree(shape)

    def release(self) -> None:
        """Give all graphs back."""
        self._lanes.clear()

    def close(self) -> None:
        """Give back all memory and all graphs, and part from the other ranks. The last call.

        Whoever holds the executor holds nothing then.
        """
        device = self.arena.device
        with suppress(RuntimeError):  # a device that failed has nothing to wait for
            await_device(device)
        self.release()
        if self.mover.files is not None:
            self.mover.files.close()
        self.part.close()
        self._peers.leave()
        del self.arena, self.state, self.cache, self.canary, self.perturber, self.mover
        del self.part, self.carrier
        del self._round, self._letters, self._mailbox, self._pool, self._streams
        gc.collect()
        empty_caches(device)

    def mirror(self) -> None:
        """Give every rank the state and the caches of rank 0, which were written by hand."""
        own = [self.arena[n] for n in self.arena.names() if not n.startswith("weights.")]
        with torch.inference_mode():
            self._peers.mirror(own)

    def host_reads(self) -> list[int]:
        """Reads and copies besides letters that the guard saw in rounds, of every rank."""
        return self._peers.reads(len(self.sync_log.reads) + len(self.sync_log.copies))

    def collect(self) -> StepResult:
        """The oldest letter home. RankError if a rank is gone: the letter would be no answer."""
        try:
            letter = self._mailbox.collect()
        finally:
            self._peers.check()
        if self.perturber is not None:
            self.perturber.heard(letter)
        return letter

    def replay(self, shape: StepShape) -> None:
        """The graph of `shape` once more, in the current stream, on the letter that came last."""
        lane = self._lane(shape)
        self._peers.replay(shape)
        with torch.inference_mode():
            lane.graph.replay()

    @contextmanager
    def observed(self, wrap: Callable[[Graph[None]], Graph[None]]) -> Generator[None]:
        """Rounds of captured shapes replay `wrap(graph)` inside: to time or to count them."""
        lanes = self._lanes
        self._lanes = {s: replace(lane, graph=wrap(lane.graph)) for s, lane in lanes.items()}
        try:
            yield
        finally:
            self._lanes = lanes

    def idle_rounds(self, shape: StepShape, count: int) -> None:
        """Rounds of `shape` in which every row is padding: all of its work, and no effect."""
        for number in range(count):
            self.launch(_idle_plan(shape, number))
            self.collect()

    def idle_seconds(self, shape: StepShape) -> float:
        """What the device takes for a round of `shape` in which every row is padding.

        The least of two runs of replays, without letters: nothing but the device is waited for.
        """
        self.idle_rounds(shape, 1)
        mark, times = self._streams.mark(), list[float]()
        for _ in range(2):
            begun = self.clock()
            with self._streams.rounds():
                for _ in range(REPLAYS):
                    self.replay(shape)
                mark.set()
            mark.wait()
            times.append((self.clock() - begun) / REPLAYS)
        return min(times)

    def replay_behind(self, shape: StepShape) -> None:
        """As `replay`, behind the rounds queued so far."""
        with self._streams.rounds():
            self.replay(shape)

    def beside(self, seconds: float) -> float:
        """Of so many seconds of the host's work, those in which rounds that are queued go on."""
        return self._streams.beside(seconds)

    def calls(self, shape: StepShape) -> int | None:
        """Operator calls that one replay of `shape` makes; None if it is not captured as a tape."""
        lane = self._lanes.get(shape)
        if lane is None or not isinstance(lane.graph, TapeGraph):
            return None
        return len(lane.graph)

    def _agree(self, shape: StepShape) -> None:
        """With `check_ranks`: RankError unless all ranks decided alike in the last round."""
        if not self._check_ranks:
            return
        state = self.state
        decided = (self._letters[shape][1], *state.lengths, state.tokens)
        self._peers.agree(
            f"round {self.counters.rounds} of {shape}", digest_of(decided, self._streams)
        )

    def _new_canary(self, wanted: Watch | None, drafter: Drafter, ranks: int) -> Canary | None:
        if wanted is None:
            return None
        return Canary.build(self.arena, self.state, self.cache, wanted.pages, drafter.unread, ranks)

    def _new_perturber(self, wanted: Watch | None, drafter: Drafter) -> Perturber | None:
        if wanted is None or not wanted.perturb:
            return None
        unread = 0 if drafter.unread is None else MAX_LAG
        return Perturber(self.state, self.cache, wanted.perturb, wanted.seed, unread)

    def _perturb(self, plan: StepPlan) -> None:
        if self.perturber is not None:
            with torch.inference_mode(), self._streams.rounds():
                self.perturber.before(plan)

    def _watch(self) -> AbstractContextManager[object]:
        return no_host_sync(raise_=False, log=self.sync_log) if self._guard else nullcontext()

    def _lane(self, shape: StepShape) -> Lane:
        if shape not in self._lanes:
            self._lanes[shape] = self._open_lane(shape)
        return self._lanes[shape]

    def _new_letters(self, shape: StepShape) -> tuple[Tensor, Tensor, Tensor]:
        """(inbox, outbox, what goes home) of one shape, static."""
        name = f"letters.{shape.batch}x{shape.width}+{shape.depth}.{shape.extras}"
        name += f".{shape.tables:d}{shape.guided:d}{shape.catches_up:d}{shape.shows:d}"
        words = self._inbox_layout(shape).words
        inbox = self.arena.new(f"{name}.inbox", (words,), torch.int32)
        batch, width = outbox_shape(shape, self._picked.words, self._verdicts)
        outbox = self.arena.new(f"{name}.outbox", (batch, width), torch.int32)
        if self.copies == 1:
            return inbox, outbox, outbox
        home = self.arena.new(f"{name}.home", (self.copies * batch, width), torch.int32)
        return inbox, outbox, home

    def _inbox_layout(self, shape: StepShape) -> InboxLayout:
        state = self.state
        return InboxLayout.of(shape, self.cache.groups, state.tokens.shape[1], state.vocabulary)

    def _open_lane(self, shape: StepShape) -> Lane:
        """Capture the graph of a shape on scratch rows: its inbox still holds an empty letter."""
        inbox, _, home = self._letters[shape]
        layout = self._inbox_layout(shape)
        graph = self._new_graph()
        self._peers.capture(shape)
        with torch.inference_mode(), self._streams.rounds():
            graph.capture(self._advance(shape))
        self._mailbox.open(shape)
        uplink = Uplink(
            layout,
            inbox,
            self._run_ahead,
            self._streams,
            self.counters,
            lambda letter: self._peers.round(shape, letter),
            self._replica,
        )
        return Lane(home, uplink, graph)

    def _advance(self, shape: StepShape) -> Callable[[], None]:
        """The round of a shape, as it is captured."""
        inbox, outbox, home = self._letters[shape]

        def advance() -> None:
            self._round.advance(shape, inbox, outbox)
            if self.copies > 1:
                every = ops.all_gather(outbox.view(-1), self.copies, REPLICA_RANKS)
                home.copy_(every.view(home.shape))

        return in_fixed_blocks(advance) if self._deterministic else advance

    def _rehearse(self, shapes: Iterable[StepShape]) -> None:
        """Load the kernels of shapes together; capturing would load one after another."""
        if self._pool is None:
            return
        with self._streams.rounds(), self._pool.warming():
            rehearse([self._advance(shape) for shape in shapes], "cuda")

    def _new_graph(self) -> Graph[None]:
        if self._pool is not None:
            return CudaGraph(tuple(self.arena.tensors()), pool=self._pool, harmless=True)
        if self._graph == "tape":
            return TapeGraph(tuple(self.arena.tensors()), harmless=True)
        return EagerGraph(harmless=True)


def _idle_plan(shape: StepShape, number: int) -> StepPlan:
    return StepPlan(round_id=number, shape=shape, rows=(), admissions=(), feeds=(), page_writes=())
