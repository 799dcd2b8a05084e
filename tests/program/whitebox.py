# SPDX-License-Identifier: Apache-2.0
"""An engine whose insides a test may look at, and poison."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freewheel import LLM, SamplingParams
from freewheel.graph import TapeGraph
from freewheel.host import Request
from freewheel.ops.rows import parts_of
from freewheel.spec import Admission, CacheGroup, Feed, PageWrite, StepPlan
from tests.waiting import PATIENCE

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def engine(folder: Path, **options: Any) -> LLM:
    """Small pages, float64: rounding cannot turn one token into another."""
    compressed = json.loads((folder / "config.json").read_text())["model_type"] == "deepseek_v4"
    page_size = 16 if compressed else 4  # no window of entries may span two pages
    defaults: dict[str, Any] = {"page_size": page_size, "max_batch": 4, "chunk": 16}
    defaults |= {"dtype": "float64", "grammar_seconds": PATIENCE}
    return LLM(str(folder), **(defaults | options))


def prompts(seed: int, count: int, longest: int, vocabulary: int = 256) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(vocabulary) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]


def answers(llm: LLM, requests: list[list[int]], params: Any = GREEDY) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(requests, params)]


def watch_requests(llm: LLM) -> list[Request]:
    """Those that are asked for from now on, as they are asked for."""
    seen: list[Request] = []
    add = llm._session.add
    llm._session.add = lambda r, t: seen.append(r) or add(r, t)  # type: ignore[method-assign]
    return seen


class PoisonedEngine:
    """Before every round, everything that no live row has computed turns into NaN.

    That covers drafts' rows, rejected rows, free pages, pages of earlier tenants, and the scratch
    page. With `tape`, temporaries of the round are poisoned too. Rounds are watched through the
    executor's `launch`, which tests replace.
    """

    def __init__(self, llm: LLM, seed: int = 0, chance: float = 0.3) -> None:
        """`chance`: of a row's caches being compared with a one-shot prefill's, each round."""
        self.llm = llm
        self.chance = chance
        self.rng = random.Random(seed)
        self.checked = 0
        self.seen: dict[str, Request] = {}
        self.rounds = 0
        self._reference = engine(
            Path(llm.config.model),
            speculate=llm.config.speculate,
            drafter=llm.config.drafter,
            chunk=llm.context_len,
            max_batch=1,
            prefill_batch=1,
            context_len=llm.context_len,
            page_size=llm.config.page_size,
            kv_cache_dtype=llm.config.kv_cache_dtype,
        )
        self._launch = llm.executor.launch
        llm.executor.launch = self.launch  # type: ignore[method-assign]
        if llm.config.graph == "tape":
            tensors = tuple(llm.executor.arena.tensors())
            llm.executor._new_graph = lambda: TapeGraph(tensors, poison=True, harmless=True)  # type: ignore

    @property
    def caches(self) -> dict[Field, Tensor]:
        """Every part of every field, float64 or bytes [layers, pages, page_rows, width]."""
        return caches_of(self.llm)

    def launch(self, plan: StepPlan) -> None:
        fresh = {r for r, a in zip(plan.rows, plan.admissions, strict=True) if a is not None}
        for (group, _), tensor in self.caches.items():
            keep = torch.zeros(tensor.shape[1] * tensor.shape[2], dtype=torch.bool)
            for row in self.live_rows():
                if row not in fresh:
                    keep[self.slots(row, group)] = True
            keep[self.cached_slots(group)] = True
            # Bytes of ones are NaN, whichever number they are part of.
            nothing = torch.nan if tensor.is_floating_point() else 255
            tensor[:, ~keep.view(tensor.shape[1:3])] = nothing
        self._launch(plan)
        self.rounds += 1
        self.seen |= {r.id: r for r in (item.request for item in self.llm._session._live.values())}
        if self.rng.random() < self.chance:
            self.check_some_row()

    @property
    def preemptions(self) -> int:
        return sum(request.stats.preemptions for request in self.seen.values())

    def live_rows(self) -> list[int]:
        live = self.llm._session._live.values()
        return [item.request.row for item in live if item.request.row is not None]

    def slots(self, row: int, group: int) -> Tensor:
        """int64 [N]: where the row's certain cache rows are that the group promises to keep."""
        state = self.llm.executor.state
        kept = self.kept(row, group)
        size = self.llm.built.groups[group].page_rows
        return state.page_tables[group, row, kept // size].long() * size + kept % size

    def cached_slots(self, group: int) -> Tensor:
        """int64 [N]: what the prefix cache keeps."""
        prefix = self.llm._session._scheduler.copies[0].roster.reservations.prefix
        blocks = [] if prefix is None else list(prefix.blocks())
        pages = [p for b in blocks for p in (*b.pages[group], *(b.latest or [()] * 9)[group])]
        size = self.llm.built.groups[group].page_rows
        return (torch.tensor(pages, dtype=torch.int64)[:, None] * size + torch.arange(size)).view(
            -1
        )

    def kept(self, row: int, group: int) -> Tensor:
        """int64 [N]: stored rows of the row's own that it, or whoever finds its pages, may read."""
        spec = self.llm.built.groups[group]
        kept = kept_rows(spec, int(self.llm.executor.state.computed_lens[row]))
        if self.llm._session._scheduler.copies[0].roster.reservations.prefix is None:
            return kept
        (tenancy,) = (
            live.request.tenancy
            for live in self.llm._session._live.values()
            if live.request.row == row
        )
        assert tenancy is not None
        held = tenancy.spans[group].first * spec.page_rows
        return torch.arange(held, max(held, int(kept[-1]) + 1 if len(kept) else 0))

    def check_some_row(self) -> None:
        state = self.llm.executor.state
        rows = [row for row in self.live_rows() if int(state.computed_lens[row])]
        if rows:
            self.check(self.rng.choice(rows))

    def check(self, row: int) -> None:
        """The row's cache below `computed` equals that of one prefill of its certain tokens."""
        state = self.llm.executor.state
        tokens = state.tokens[row, : int(state.known_lens[row])].tolist()
        want = one_shot(self._reference, tokens)
        for (group, name), tensor in self.caches.items():
            slots, size = self.slots(row, group), tensor.shape[2]
            have = tensor[:, slots // size, slots % size]
            kept = self.kept(row, group)
            wanted = want[group, name][:, kept]
            torch.testing.assert_close(have, wanted, rtol=1e-9, atol=1e-11)
        self.checked += 1


Field = tuple[int, str]
"""A part of a field of a group: the group's index, and the field's name and the part's number."""


def kept_rows(group: CacheGroup, computed: int) -> Tensor:
    """int64 [N]: stored rows that `computed` tokens complete, and that the group still keeps."""
    first = 0 if group.retention is None else max(0, computed - group.retention)
    return torch.arange(first // group.stride, computed // group.stride)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; pages that nobody has written may hold anything, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def caches_of(llm: LLM) -> dict[Field, Tensor]:
    arena = llm.executor.arena
    return {
        (index, f"{field.name}.{nth}"): part
        for index, group in enumerate(llm.built.groups)
        for field in group.fields
        for nth, part in enumerate(
            parts_of(arena[f"cache.{group.name}.{field.name}"], *field.parts)
        )
    }


def one_shot(llm: LLM, tokens: list[int]) -> dict[Field, Tensor]:
    """Every part after one rectangle over all tokens: float64 or bytes [layers, rows, width]."""
    shape = llm.built.ladder.fit_prefill(1, len(tokens), ready=True)
    admission = Admission(
        known=len(tokens),
        computed=0,
        limit=llm.context_len,
        minimum=0,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        stop_ids=(),
    )
    groups, reach = llm.built.groups, min(len(tokens) + shape.depth, llm.context_len)
    writes = tuple(
        PageWrite(1, index, c, c + 1)
        for index, group in enumerate(groups)
        for c in range(group.pages_for(reach))
    )
    llm.executor.launch(StepPlan(0, shape, (1,), (admission,), (Feed(0, tuple(tokens)),), writes))
    llm.executor.collect()
    return {
        (index, name): tensor[:, 1:].flatten(1, 2)[:, : len(tokens) // groups[index].stride].clone()
        for (index, name), tensor in caches_of(llm).items()
    }


class ScriptedDrafts:
    """Before every round, drafts become right for exactly `right` places, and wrong behind them.

    `script`: the row's tokens. Rounds must be read one by one (`run_ahead` 0), of one row.
    """

    def __init__(self, llm: LLM) -> None:
        self.script: list[int] = []
        self.right = 0
        self._llm = llm
        self._launch = llm.executor.launch
        llm.executor.launch = self.launch  # type: ignore[method-assign]

    def launch(self, plan: StepPlan) -> None:
        state = self._llm.executor.state
        for row in plan.rows:
            known = int(state.known_lens[row])
            for ahead in range(int(state.draft_lens[row]) if known else 0):
                token = self.script[known + ahead]
                state.tokens[row, known + ahead] = (
                    token if ahead < self.right else (token + 1) % 256
                )
        self._launch(plan)


def mixed_params(seed: int) -> Iterator[SamplingParams]:
    """Greedy and sampled, short and long."""
    rng = random.Random(seed)
    while True:
        yield SamplingParams(
            temperature=rng.choice([0.0, 0.9]),
            top_p=rng.choice([1.0, 0.9]),
            seed=rng.randrange(2**31),
            max_tokens=rng.choice([1, 3, 12, 30]),
            ignore_eos=True,
        )
