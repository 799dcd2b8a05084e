# SPDX-License-Identifier: Apache-2.0
"""Scheduler and simulated device together, the device as late as the host allows, all checked."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from freewheel.host import Request, Scheduler, Update
from freewheel.host.tenancy import Tenancy
from freewheel.spec import (
    CacheField,
    CacheGroup,
    FinishReason,
    SamplingParams,
    ShapeLadder,
    StepPlan,
    StepResult,
    Transfer,
    Way,
    feed_bound,
    page_writes_bound,
)
from tests.host.device import VOCABULARY, Device

FIELDS = (CacheField("latent", 8, "float32", (0,)),)


def history(page_size: int = 4) -> CacheGroup:
    return CacheGroup("history", page_size, 1, None, FIELDS)


def window(page_size: int, retention: int) -> CacheGroup:
    return CacheGroup("window", page_size, 1, retention, FIELDS)


@dataclass(frozen=True)
class Setup:
    """Options of a scheduler; `pages` leaves out the scratch page, `rows` the scratch row."""

    depth: int = 3
    max_batch: int = 4
    widths: tuple[int, ...] = (9, 16)
    prefill_batch: int = 2
    groups: tuple[CacheGroup, ...] = (history(),)
    pages: tuple[int, ...] = (1000,)
    rows: int = 4
    context_len: int = 64
    row_width: int = 80
    run_ahead: int = 2
    chunk: int | None = None
    prefix_cache: bool = True
    prefill_share: float = 0.5
    host_slots: int = 0

    def ladder(self) -> ShapeLadder:
        return ShapeLadder.build(self.max_batch, self.depth, self.widths, self.prefill_batch)

    def scheduler(self) -> Scheduler:
        return Scheduler(
            self.ladder(),
            self.groups,
            tuple(1 + pages for pages in self.pages),
            1 + self.rows,
            self.context_len,
            self.row_width,
            self.run_ahead,
            chunk=self.chunk,
            prefix_cache=self.prefix_cache,
            prefill_share=self.prefill_share,
            host_slots=self.host_slots,
        )

    def request(
        self,
        name: str,
        prompt: int | tuple[int, ...],
        max_tokens: int | None = 8,
        min_tokens: int = 0,
        stop_ids: tuple[int, ...] = (),
        priority: int = 0,
        tenant: str = "",
    ) -> Request:
        """A request; a number for its prompt gives that many tokens. Its name seeds it."""
        rng = random.Random(name)
        if isinstance(prompt, int):
            prompt = tuple(rng.randrange(VOCABULARY) for _ in range(prompt))
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
        seed = rng.randrange(2**62)
        request = Request(name, prompt, params, seed, self.context_len, stop_ids)
        request.priority, request.tenant = priority, tenant
        return request


@dataclass
class Flight:
    """A launched round: its rows, the live pages of each at launch, and their tables then."""

    plan: StepPlan
    tenants: dict[int, Request]
    pages: set[tuple[int, int]]
    tables: list[tuple[Tenancy, dict[tuple[int, int], int]]]
    result: StepResult | None = None


class Engine:
    """Launches, executes and collects; keeps every plan and update."""

    def __init__(self, setup: Setup, rng: random.Random | None = None):
        self.setup = setup
        self.rng = rng or random.Random(0)
        self.scheduler = setup.scheduler()
        self.ladder = setup.ladder()
        self.device = Device(setup.groups, setup.row_width, self.rng)
        self.flights: deque[Flight] = deque()
        self.moving: list[Transfer] = []
        self.tables: dict[int, dict[tuple[int, int], int]] = {}
        self.plans: list[StepPlan] = []
        self.updates: list[Update] = []

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> Update | None:
        update = self.scheduler.abort(request.id)
        if update is not None:
            self.updates.append(update)
        self.check()
        return update

    def launch(self) -> StepPlan | None:
        flying = len(self.flights)
        assert self.scheduler.in_flight == flying
        uppers = {r.seed: r.upper for r in self.scheduler.roster.running}
        ends = {r.seed: self.ends(r) for r in self.scheduler.roster.running}
        plan = self.scheduler.plan()
        self.moving += self.scheduler.transfers()
        self.check()
        if plan is None:
            return None
        assert flying <= self.setup.run_ahead
        self.check_shape(plan)
        tenants = {r.row: r for r in self.scheduler.roster.running if r.row in plan.rows}
        self.check_hazards(plan, tenants)
        for request in tenants.values():
            self.check_reserved(plan, request, uppers.get(request.seed), ends.get(request.seed))
        assert set(tenants) == set(plan.rows), "a row without a live tenant was launched"
        assert all(r.finish is None for r in tenants.values())
        pages = {page for row in plan.rows for page in self.live_pages(row, tenants[row].lower)}
        tables = [(r.tenancy, dict(self.tables[row])) for row, r in tenants.items() if r.tenancy]
        self.flights.append(Flight(plan, tenants, pages, tables))
        self.plans.append(plan)
        return plan

    def move(self) -> None:
        """Some transfer under way ends."""
        transfer = self.moving.pop(self.rng.randrange(len(self.moving)))
        self.scheduler.transferred(self.device.move(transfer))
        self.check()

    def damage(self) -> None:
        """Some block in host memory turns into something else."""
        if self.device.slots:
            slot = self.device.slots[self.rng.choice(sorted(self.device.slots))]
            slot.label = -1

    def execute(self) -> bool:
        """Let the device run its next round."""
        for flight in self.flights:
            if flight.result is None:
                flight.result = self.device.execute(flight.plan)
                return True
        return False

    def collect(self) -> list[Update]:
        while self.flights[0].result is None:
            self.execute()
        result = self.flights.popleft().result
        assert result is not None
        updates = self.scheduler.collect(result, now=float(result.round_id))
        self.updates += updates
        self.check()
        return updates

    def step(self) -> list[Update]:
        """Launch as far ahead as allowed, then read one letter."""
        while self.launch() is not None:
            pass
        if self.moving and (not self.flights or self.rng.random() < 0.5):
            self.move()
        return self.collect() if self.flights else []

    def drain(self, rounds: int = 10_000) -> None:
        while not self.scheduler.idle:
            self.step()
            assert len(self.plans) <= rounds, "somebody starves"
        while self.moving:
            self.move()
            self.moving += self.scheduler.transfers()
        for pool in (self.scheduler.roster.reservations.rows, *self.pools):
            assert pool.free + pool.cached == pool.total

    @property
    def pools(self):
        return self.scheduler.roster.reservations.pools

    def check(self) -> None:
        """Conservation, and one owner for everything owned."""
        reservations = self.scheduler.roster.reservations
        reservations.check()
        running = self.scheduler.roster.running
        assert reservations.rows.owned == len(running)
        for group, pool in enumerate(reservations.pools):
            held = [page for request in running for page in request.pages[group]]
            copies = [copy for r in running if r.tenancy is not None for copy in r.tenancy.copies]
            held += [copy.source for copy in copies if copy.group == group]
            assert len({*held, *pool._lent}) == pool.owned
            written = [page for request in running for page in self.own_pages(request, group)]
            assert len(written) == len(set(written)), "two rows write one page"

    def check_shape(self, plan: StepPlan) -> None:
        shape = plan.shape
        assert shape in (*self.ladder.shapes(), self.ladder.showing)
        running = self.scheduler.roster.running
        shows = [request.shows for request in running if request.row in plan.rows]
        assert len(shows) == 1 or shape in self.ladder.decode or not any(shows)
        assert shows == [True] or not shape.shows
        if self.setup.chunk is not None and shape not in self.ladder.decode:
            assert shape.width <= self.setup.chunk
        assert 1 <= len(plan.rows) <= shape.batch
        assert len(plan.rows) == len(plan.admissions) == len(plan.feeds) == len(set(plan.rows))
        assert 0 not in plan.rows
        for feed in plan.feeds:
            assert (feed is not None) == (shape not in self.ladder.decode)
            assert feed is None or 1 <= len(feed.tokens) <= feed_bound(shape, self.setup.row_width)
        bound = page_writes_bound(shape, self.setup.groups, self.setup.row_width)
        assert len(plan.page_writes) <= bound

    def check_hazards(self, plan: StepPlan, tenants: dict[int, Request]) -> None:
        """Nothing is handed to a new tenant that a round in flight may touch.

        Pages that it finds, and only reads, may be read by others at the same time.
        """
        for row, admission in zip(plan.rows, plan.admissions, strict=True):
            if admission is not None:
                assert not any(row in flight.plan.rows for flight in self.flights)
                self.tables[row] = {}
        self.check_moves(plan, tenants)
        for write in plan.page_writes:
            assert write.row in plan.rows and write.page > 0
            assert (write.group, write.column) not in self.tables[write.row], "written twice"
            page = (write.group, write.page)
            found = write.column < self.first_own_column(tenants[write.row], write.group)
            for flight in self.flights:
                assert page not in (self.written_pages(flight) if found else flight.pages)
            self.tables[write.row][write.group, write.column] = write.page

    def check_moves(self, plan: StepPlan, tenants: dict[int, Request]) -> None:
        """No copy under way touches what a round may write, or reads what one comes to hold."""
        written = {page for flight in self.flights for page in self.written_pages(flight)}
        touched = {page for flight in self.flights for page in flight.pages}
        new = {
            (write.group, write.page)
            for write in plan.page_writes
            if write.column >= self.first_own_column(tenants[write.row], write.group)
        }
        for transfer in self.moving:
            pages = {(g, p) for b in transfer.blocks for g, own in enumerate(b.pages) for p in own}
            assert not pages & (written | new)
            assert transfer.way is Way.OUT or not pages & touched

    def ends(self, request: Request) -> list[int]:
        """The columns of each group that its pages reach to."""
        assert request.tenancy is not None
        return [span.end for span in request.tenancy.spans]

    def check_reserved(
        self, plan: StepPlan, request: Request, upper: int | None, ends: list[int] | None
    ) -> None:
        """Pages reach to what this round may write from the upper bound on, and no further."""
        tenancy = request.tenancy
        assert tenancy is not None
        start = tenancy.start if upper is None else upper
        given = plan.shape.width
        if plan.shape.for_prompts:
            given = min(given, tenancy.known - start)
        reach = min(start + given + self.setup.depth, self.setup.row_width)
        before = ends or [0] * len(self.setup.groups)
        for group, end, had in zip(self.setup.groups, self.ends(request), before, strict=True):
            assert end <= max(had, group.pages_for(reach), group.pages_for(tenancy.start))

    def live_pages(self, row: int, lower: int) -> set[tuple[int, int]]:
        """Pages that the row may read or write, with at least `lower` tokens computed."""
        pages: set[tuple[int, int]] = set()
        for (group, column), page in self.tables[row].items():
            spec = self.setup.groups[group]
            first = 0 if spec.retention is None else max(0, lower - spec.retention)
            if column >= first // spec.page_size:
                pages.add((group, page))
        return pages

    def written_pages(self, flight: Flight) -> set[tuple[int, int]]:
        """Pages that a round in flight may write: those from its rows' lower bounds on."""
        return {
            (group, page)
            for tenancy, table in flight.tables
            for (group, column), page in table.items()
            if column >= tenancy.lower // self.setup.groups[group].page_size
        }

    def first_own_column(self, request: Request, group: int) -> int:
        """The first column whose page the request did not find in the prefix cache."""
        assert request.tenancy is not None
        return request.tenancy.start // self.setup.groups[group].page_size

    def own_pages(self, request: Request, group: int) -> list[int]:
        """The pages that it may write."""
        assert request.tenancy is not None
        span = request.tenancy.spans[group]
        return span.pages[max(0, self.first_own_column(request, group) - span.first) :]

    def tokens(self, request: Request) -> list[int]:
        """The output that the updates brought."""
        return [t for u in self.updates if u.request is request for t in u.tokens]

    def endings(self, request: Request) -> list[FinishReason]:
        return [u.finish for u in self.updates if u.request is request and u.finish is not None]
