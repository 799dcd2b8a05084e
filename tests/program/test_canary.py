# SPDX-License-Identifier: Apache-2.0
"""What turns over by itself is found before anything is computed from it, and computed anew."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel import LLM, FinishReason, SamplingParams
from freewheel.config import EngineConfig
from freewheel.engine import TokenEngine
from freewheel.engine.session import Live
from freewheel.errors import ConfigError
from freewheel.host import TextStream
from freewheel.spec import (
    BlockCopy,
    RowResult,
    StepResult,
    Transfer,
    TransferResult,
    Way,
)
from freewheel.spec.shape import StepShape
from freewheel.spec.violation import KINDS, VerdictLayout
from freewheel.state import Canary
from tests.program.test_schedules import CONTEXT, Schedule, tight
from tests.program.test_tier import HOST_GB, TierSchedule
from tests.program.whitebox import GREEDY, PoisonedEngine, answers, engine, prompts

BOTH = pytest.mark.parametrize("family", ["t32", "t4"])
PROMPT = random.Random(5).choices(range(256), k=37)


class Watched:
    """An engine with a canary, and what its letters said: (round, row) of each violation."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.llm = engine(folder, canary=options.pop("canary", "all"), **options)
        self.found: dict[tuple[int, int], RowResult] = {}
        self.rounds = 0
        self._collect = self.llm.executor.collect
        self.llm.executor.collect = self.collect  # type: ignore[method-assign]

    def collect(self) -> StepResult:
        letter = self._collect()
        self.rounds += 1
        self.found |= {(letter.round_id, r.row): r for r in letter.rows if r.violation is not None}
        return letter

    @property
    def canary(self) -> Canary:
        canary = self.llm.executor.canary
        assert canary is not None
        return canary


def begin(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> Live:
    return llm._session.add(llm._request(prompt, params, ""), TextStream(lambda ids: ""))


def decoding(llm: LLM, live: Live, tokens: int = 3) -> int:
    """The row of a request, once it has so many tokens."""
    while len(live.request.output) < tokens:
        llm._session.step()
    assert live.request.row is not None
    return live.request.row


def finish(llm: LLM) -> None:
    while llm._session.busy:
        llm._session.step()
    llm._session.close([])


def flip(tensor: Tensor, *place: int) -> None:
    tensor[place].flatten().view(torch.int32)[0] ^= 1 << 9


def disturbed(folder: Path, want: int, run_ahead: int, seed: int) -> int:
    """Damage until `want` were done: each is in the letter of its own round, and answers are those
    of an engine that nobody disturbed. How many were done.

    There are pages for sixteen requests, because each that is damaged is lost.
    """
    watched = Watched(
        folder, run_ahead=run_ahead, perturb=3, perturb_seed=seed, context_len=CONTEXT,
        cache_bytes=1 << 27, max_batch=16,
    )  # fmt: skip
    calm = engine(folder, run_ahead=run_ahead, context_len=CONTEXT)
    perturber = watched.llm.executor.perturber
    assert perturber is not None
    for number in range(1000):
        asked = prompts(seed + number, 6, 40)
        assert answers(watched.llm, asked) == answers(calm, asked)
        if len(perturber.done) >= want:
            break
    for damage in perturber.done:
        verdict = watched.found[damage.round_id, damage.row].violation
        assert verdict is not None and damage.kind in verdict.kinds
    assert {damage.kind for damage in perturber.done} <= set(KINDS.values())
    assert watched.llm.alarm.counts.total() >= len(perturber.done)
    return len(perturber.done)


def test_damage_is_found_in_its_round_and_answers_are_as_if_nothing_were(
    folders: dict[str, Path],
) -> None:
    """That of the other family is a kind of fault (`tests/faults`)."""
    assert disturbed(folders["t4"], 6, run_ahead=2, seed=0) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("family, damages", [("t32", 200), ("t4", 50)])
@pytest.mark.parametrize("run_ahead", [0, 1, 2, 3])
def test_a_thousand_damages_are_all_found_within_a_round(
    folders: dict[str, Path], family: str, damages: int, run_ahead: int
) -> None:
    assert disturbed(folders[family], damages, run_ahead, 1000 * (run_ahead + 1)) >= damages


def schedules(llm: LLM, kind: type[Schedule], seed: int) -> None:
    for number in range(2):
        kind(llm, random.Random(seed + number)).run()
    assert not llm.alarm.counts


@BOTH
def test_nothing_is_found_where_nothing_is(folders: dict[str, Path], family: str) -> None:
    """Among drafts, aborts, preemptions and pages from host memory."""
    llm = tight(folders[family], 1, 3, canary="all", host_cache_gb=HOST_GB)
    TierSchedule(llm, random.Random(4)).run()
    assert not llm.alarm.counts and llm.executor.counters.rounds > 20


@pytest.mark.exhaustive
@BOTH
@pytest.mark.parametrize("run_ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("canary", ["all", 2])
@pytest.mark.parametrize("tier", [0, HOST_GB])
def test_nothing_is_found_under_many_schedules(
    folders: dict[str, Path], family: str, run_ahead: int, canary: int | str, tier: float
) -> None:
    more = {"host_cache_gb": tier} if tier else {}
    llm = tight(folders[family], run_ahead, (3, 1, 7, 2)[run_ahead], canary=canary, **more)
    schedules(llm, TierSchedule if tier else Schedule, 70 + run_ahead)


def test_nothing_is_found_with_drafters_that_lag_or_look_up(folders: dict[str, Path]) -> None:
    for options in ({"speculate": "auto"}, {"speculate": 3, "drafter": "lookup"}):
        llm = engine(folders["t32"], canary="all", context_len=CONTEXT, **options)
        answers(llm, prompts(2, 6, 40))
        assert not llm.alarm.counts


def test_free_pages_full_of_nan_are_nothing_to_find(folders: dict[str, Path]) -> None:
    poisoned = PoisonedEngine(engine(folders["t32"], canary="all", context_len=CONTEXT))
    answers(poisoned.llm, prompts(3, 6, 40))
    assert poisoned.rounds > 10 and not poisoned.llm.alarm.counts


def test_a_found_prompt_that_was_damaged_while_nobody_read_it_is_computed_anew(
    folders: dict[str, Path],
) -> None:
    watched = Watched(folders["t32"], run_ahead=0)
    llm = watched.llm
    first = llm.generate([PROMPT], GREEDY)[0].token_ids
    prefix = llm._session.scheduler.copies[0].roster.reservations.prefix  # type: ignore[union-attr]
    assert prefix is not None
    block = list(prefix.blocks())[1]
    (page,) = block.pages[0]
    flip(llm.executor.cache.stored("history")[1], 0, page)
    rounds = watched.rounds
    again = llm.generate([PROMPT], GREEDY)[0]
    assert again.token_ids == first
    assert [at for at, _ in watched.found] == [rounds]  # its very first round
    pool = llm._session.scheduler.copies[0].roster.reservations.pools[0]
    assert pool._lost == {page} and pool.free + pool.cached + 1 == pool.total
    third = llm.generate([PROMPT], GREEDY)[0]
    assert third.token_ids == first and len(watched.found) == 1
    assert third.metrics.cached_tokens > 0


def test_a_key_that_turns_nan_is_found_though_no_answer_would_show_it(
    folders: dict[str, Path],
) -> None:
    watched = Watched(folders["t32"], run_ahead=0)
    live = begin(watched.llm, PROMPT)
    row = decoding(watched.llm, live)
    page = live.request.pages[0][2]
    watched.llm.executor.cache.stored("history")[1][0, page, 1] = torch.nan
    round_id = watched.rounds
    watched.llm._session.step()
    verdict = watched.found[round_id, row].violation
    assert verdict is not None and verdict.kinds == ("kv",) and verdict.columns == ((2,),)
    finish(watched.llm)
    assert live.request.output == list(
        engine(folders["t32"]).generate([PROMPT], GREEDY)[0].token_ids
    )


def test_a_page_that_was_damaged_is_never_handed_out_again(folders: dict[str, Path]) -> None:
    watched = Watched(folders["t32"], run_ahead=1, max_batch=2, context_len=64)
    llm, bad = watched.llm, set[int]()
    for number in range(4):
        live = begin(llm, prompts(number, 1, 40)[0] + PROMPT[:9])
        decoding(llm, live)
        assert bad.isdisjoint(live.request.pages[0])
        bad.add(live.request.pages[0][0])
        flip(llm.executor.cache.stored("history")[0], 1, live.request.pages[0][0])
        finish(llm)
    reserved = llm._session.scheduler.copies[0].roster.reservations
    reserved.check()
    assert reserved.pools[0]._lost == bad and reserved.pools[0].quarantined == 4
    load = TokenEngine(llm).load()
    assert load.canary is not None and (load.canary.kv, load.canary.pages) == (4, 4)
    assert load.pages[0].quarantined == 4


def test_two_requests_that_share_a_damaged_page_both_go_on(folders: dict[str, Path]) -> None:
    watched = Watched(folders["t32"])
    llm = watched.llm
    llm.generate([PROMPT], GREEDY)
    asked = [[*PROMPT, 3], [*PROMPT, 5, 9]]
    lives = [begin(llm, prompt) for prompt in asked]
    for live in lives:
        decoding(llm, live)
    shared = {live.request.pages[0][1] for live in lives}
    assert len(shared) == 1
    flip(llm.executor.cache.stored("history")[0], 0, *shared)
    finish(llm)
    assert {row for _, row in watched.found} == {1, 2}
    wanted = answers(engine(folders["t32"]), asked)
    assert [tuple(live.request.output) for live in lives] == wanted


def test_a_request_that_a_strict_canary_ends_is_told_so(folders: dict[str, Path]) -> None:
    tokens = TokenEngine(engine(folders["t32"], canary="all", strict=True, perturb=1))
    tokens.submit("a", PROMPT, GREEDY)
    steps = [step for _ in range(200) if tokens.busy for step in tokens.step()]
    assert steps[-1].finish is FinishReason.ERROR
    assert steps[-1].fault == "the canary found its pages or tokens damaged"


def test_some_pages_a_round_find_damage_within_a_turn(folders: dict[str, Path]) -> None:
    watched = Watched(folders["t32"], canary=2, run_ahead=0, context_len=CONTEXT)
    llm = watched.llm
    live = begin(llm, PROMPT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    decoding(llm, live)
    held, start = len(live.request.pages[0]), watched.rounds
    flip(llm.executor.cache.stored("history")[0], 0, live.request.pages[0][4])
    while not watched.found:
        llm._session.step()
    assert watched.rounds - start <= -(-(held + 4) // 2) + 1


@BOTH
def test_a_damaged_page_that_goes_to_host_memory_is_known_when_it_comes_back(
    folders: dict[str, Path], family: str
) -> None:
    llm = engine(folders[family], host_cache_gb=HOST_GB, canary="all")
    llm.generate([PROMPT], GREEDY)
    prefix = llm._session.scheduler.copies[0].roster.reservations.prefix
    assert prefix is not None
    block = next(prefix.blocks())
    mover, group = llm.executor.mover, next(g for g, own in enumerate(block.pages) if own)
    out = Transfer(1, Way.OUT, (BlockCopy(0, 5, block.pages),))
    back = Transfer(2, Way.IN, (BlockCopy(0, 5, block.pages),))
    for damaged in (False, True):
        if damaged:
            stored = llm.executor.cache.stored(llm.built.groups[group].name)[0]
            flip(stored, 0, block.pages[group][0])
        found: list[TransferResult] = []
        for one in (out, back):
            mover.start(one)
            found += mover.wait()
        assert [r.damaged for r in found] == [frozenset(), frozenset({0} if damaged else ())]


def test_letters_are_as_many_and_nothing_is_read_in_between(folders: dict[str, Path]) -> None:
    llm = engine(folders["t4"], canary="all", guard=True)
    answers(llm, prompts(1, 4, 30))
    counters = llm.executor.counters
    assert counters.rounds == counters.uploads == counters.downloads == counters.graph_launches
    assert not llm.executor.sync_log.reads and not llm.executor.sync_log.copies


@BOTH
def test_all_that_letters_bring_comes_as_without_a_canary(
    folders: dict[str, Path], family: str
) -> None:
    on, off = engine(folders[family], canary="all"), engine(folders[family])
    scored = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    biased = SamplingParams(temperature=0, max_tokens=5, logit_bias={9: 3}, min_tokens=5)
    for params in (scored, biased):
        found, wanted = (llm.generate([PROMPT], params)[0] for llm in (on, off))
        assert found.token_ids == wanted.token_ids
        assert (found.logprobs, found.prompt_logprobs) == (wanted.logprobs, wanted.prompt_logprobs)
    assert on.selection(PROMPT) == off.selection(PROMPT)
    assert not on.alarm.counts


class Silent:
    """Does nothing, in the places where a canary does something."""

    def __init__(self, layout: VerdictLayout) -> None:
        self.layout = layout

    def check(self, shape: StepShape, inbox: Tensor, outbox: Tensor) -> Tensor:
        del outbox
        return inbox[: shape.batch]

    def seal(self, shape: StepShape, rows: Tensor) -> None: ...


@BOTH
def test_without_a_canary_a_round_makes_not_one_call_more(
    folders: dict[str, Path], family: str
) -> None:
    off = engine(folders[family])
    silent = engine(folders[family])
    silent.executor._round = type(silent.executor._round)(
        silent.executor.state,
        silent.executor.cache,
        silent.executor._round.target,
        silent.executor._round.drafter,
        Silent(VerdictLayout(())),  # type: ignore[arg-type]
    )
    on = engine(folders[family], canary="all")
    for llm in (off, silent, on):
        answers(llm, [PROMPT])
    shapes = [s for s in off.shapes() if off.executor.calls(s) is not None]
    assert len(shapes) >= 2
    for shape in shapes:
        assert off.executor.calls(shape) == silent.executor.calls(shape)
        more, fewer = on.executor.calls(shape), off.executor.calls(shape)
        assert more is not None and fewer is not None and more > fewer
    assert off.executor.canary is None
    assert not [name for name in off.executor.arena.names() if name.startswith("canary")]


def test_a_verdict_names_the_columns_that_are_wrong() -> None:
    layout = VerdictLayout((33, 4))
    words = [0] * layout.words
    assert layout.words == 4 and layout.read(words) is None
    words[0], words[1], words[2], words[3] = 5, 1 << 30 | 1, 1 << 1, 1 << 3
    found = layout.read(words)
    assert found is not None
    assert found.kinds == ("kv", "tokens") and found.columns == ((0, 30, 32), (3,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"canary": "some"}, "canary: must be off, all, or pages"),
        ({"canary": -1}, "canary: must be between"),
        ({"canary": True}, "canary: must be a whole number"),
        ({"strict": True}, "strict: needs a canary"),
        ({"perturb": 3}, "perturb: needs a canary"),
        ({"canary": "all", "perturb": -1}, "perturb: must be between"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="demo", **options)
