# SPDX-License-Identifier: Apache-2.0
"""Rows whose grammar the host follows: they wait for their masks, and nobody else does."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, FinishReason, SamplingParams
from freewheel.errors import RequestError
from freewheel.spec import StepPlan
from freewheel.structured import GuideDesk
from freewheel.structured.process import WorkerProcess
from tests.program.whitebox import engine, prompts, watch_requests
from tests.waiting import PATIENCE

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
pytest.importorskip("freewheel.structured.worker")

THINK, END_THINK, EOS = 261, 262, 257
NODE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "minimum": 3, "maximum": 77},
        "c": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/n"}},
    },
    "required": ["v"],
    "additionalProperties": False,
}
TREE = {"$defs": {"n": NODE}, "$ref": "#/$defs/n"}
NESTED = 'start: "a" start "b" | "c"'
GBNF = 'root ::= "a" root "b" | "c"'


def wanted(seed: int, **more: Any) -> list[SamplingParams]:
    """Guided requests of several kinds, a table, and free neighbours."""
    warm: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 40} | more
    cold: dict[str, Any] = warm | {"temperature": 0.0}
    return [
        SamplingParams(**warm, json_schema=TREE, frequency_penalty=1.0),
        SamplingParams(**warm),
        SamplingParams(**warm, grammar=NESTED, logprobs=1),
        SamplingParams(**warm, regex="[a-f]{3,6}"),
        SamplingParams(**warm, json_object=True, top_k=40),
        SamplingParams(**cold, grammar=GBNF),
        SamplingParams(**cold),
    ]


def alone(folder: Path, requests: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    llm = engine(folder, speculate=0, run_ahead=0, max_batch=1, prefill_batch=1)
    return [llm.generate([p], s)[0] for p, s in zip(requests, params, strict=True)]


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> tuple[list[list[int]], list[SamplingParams], list[Any]]:
    params = wanted(3)
    requests = prompts(5, len(params), 20, 256)
    return requests, params, alone(folders["t32"], requests, params)


def test_answers_keep_their_grammar(reference: Any) -> None:
    _, params, outputs = reference
    for wish, output in zip(params, outputs, strict=True):
        if output.finish_reason is not FinishReason.STOP or wish.structure is None:
            continue
        if wish.json_schema is not None:
            jsonschema.validate(json.loads(output.text), TREE)
        if wish.json_object:
            assert isinstance(json.loads(output.text), dict)
        if wish.grammar is not None:
            depth = output.text.count("a")
            assert output.text == "a" * depth + "c" + "b" * depth
    assert sum(one.finish_reason is FinishReason.STOP for one in outputs) >= 3
    assert [one.metrics.form for one in outputs] == [
        "host", None, "host", "device", "host", "host", None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("speculate", "run_ahead", "batch", "drafter"),
    [(3, 2, 8, "mtp"), (1, 0, 3, "mtp"), (3, 3, 4, "lookup"), ("auto", 2, 4, "mtp")],
)
def test_tokens_do_not_depend_on_drafts_company_or_delay(
    folders: dict[str, Path], reference: Any, speculate: Any, run_ahead: int, batch: int,
    drafter: str,
) -> None:  # fmt: skip
    requests, params, want = reference
    llm = engine(
        folders["t32"], speculate=speculate, run_ahead=run_ahead, max_batch=batch, drafter=drafter
    )
    outputs = llm.generate(requests, params)
    for one, other in zip(want, outputs, strict=True):
        assert one.token_ids == other.token_ids and one.finish_reason == other.finish_reason
    assert outputs[2].logprobs is not None and want[2].logprobs is not None
    for one, other in zip(want[2].logprobs, outputs[2].logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-9)


class SlowGuide:
    """Another guide's masks, some looks later: for each one it is asked for in vain so often."""

    def __init__(self, guide: Any, late: int) -> None:
        self._guide, self._late, self._looks = guide, late, 0
        self.waits = 0

    def follow(self, answer: Sequence[int]) -> None:
        self._looks = 0
        self._guide.follow(answer)
        self._guide.wait(PATIENCE)

    def mask(self) -> bytes | None:
        self._looks += 1
        return self._guide.mask() if self._looks > self._late else None

    @property
    def failure(self) -> str | None:
        return self._guide.failure

    def wait(self, seconds: float) -> None:
        self.waits += 1

    def close(self) -> None:
        self._guide.close()


def test_a_row_that_waits_for_a_mask_delays_nobody(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The neighbour is in as many rounds as it is alone, whenever masks come."""
    free = SamplingParams(temperature=1, seed=1, max_tokens=30, ignore_eos=True)
    held = SamplingParams(temperature=1, seed=2, max_tokens=20, grammar='start: "a" start | "b"')
    rows: list[tuple[int, ...]] = []
    guides: list[SlowGuide] = []
    make = GuideDesk.guide

    def slow(desk: GuideDesk, source: str, stop_ids: Sequence[int]) -> Any:
        guides.append(SlowGuide(make(desk, source, stop_ids), late))
        return guides[-1]

    monkeypatch.setattr(GuideDesk, "guide", slow)
    llm = engine(folders["t32"], speculate=3, run_ahead=2, max_batch=2)
    launch = llm.executor.launch

    def watch(plan: StepPlan) -> None:
        rows.append(plan.rows)
        assert len(plan.masks) in (0, len(plan.rows))
        launch(plan)

    llm.executor.launch = watch  # type: ignore[method-assign]
    counts: list[int] = []
    answers: list[Any] = []
    for delay, requests in ((0, 1), (0, 2), (4, 2), (9, 2)):
        late = delay
        rows.clear()
        outputs = llm.generate([[5, 6]] * requests, [free, held][:requests])
        answers.append(outputs[0].token_ids)
        first = next(row[0] for row in rows)
        counts.append(sum(first in row for row in rows))
        if requests == 2:
            assert len(outputs[1].token_ids) > 2
    assert len(set(answers)) == 1
    assert max(counts[1:]) <= counts[0] + 2, counts


def test_a_row_gets_its_mask_in_the_letter_of_its_round_and_no_other_letter(
    folders: dict[str, Path],
) -> None:
    llm = engine(folders["t32"], speculate=3, run_ahead=2, max_batch=2)
    plans: list[StepPlan] = []
    launch = llm.executor.launch
    llm.executor.launch = lambda plan: plans.append(plan) or launch(plan)  # type: ignore
    params = SamplingParams(temperature=1, seed=1, max_tokens=20, grammar=NESTED)
    output = llm.generate([[9, 9, 9]], params)[0]
    counters = llm.executor.counters
    assert counters.uploads == counters.downloads == counters.rounds == len(plans)
    lengths = [mask.length for plan in plans for mask in plan.masks if mask is not None]
    assert lengths == list(range(3, 3 + len(output.token_ids)))
    assert output.metrics.drafted == 0


@pytest.mark.parametrize("drafter", ["mtp", "lookup"])
@pytest.mark.parametrize("speculate", [1, 3])
def test_masks_begin_behind_the_end_of_thinking_within_an_accepted_run(
    folders: dict[str, Path], speculate: int, drafter: str
) -> None:
    params = [
        SamplingParams(
            temperature=1.0, seed=budget, max_tokens=60, json_schema=TREE, frequency_penalty=1.0,
            thinking_token_budget=budget, logit_bias={END_THINK: 3.0},
        )
        for budget in (0, 1, 5, 30)
    ]  # fmt: skip
    requests = [[5, 6, THINK, 10]] * 4
    want = alone(folders["t32"], requests, params)
    llm = engine(folders["t32"], speculate=speculate, drafter=drafter, max_batch=4)
    outputs = llm.generate(requests, params)
    for wish, output, other in zip(params, outputs, want, strict=True):
        assert output.token_ids == other.token_ids
        thought = output.token_ids.index(END_THINK)
        assert wish.thinking_token_budget is not None and thought <= wish.thinking_token_budget
        assert EOS not in output.token_ids[:thought]
        if output.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(bytes(output.token_ids[thought + 1 : -1])), TREE)
        assert 0 <= output.metrics.accepted <= output.metrics.drafted


@pytest.mark.parametrize("grammar", [NESTED, 'start: "x" /[0-9]/'])
def test_a_trigger_begins_the_grammar_and_without_one_the_answer_is_free(
    folders: dict[str, Path], grammar: str
) -> None:
    """That is what a tool call is: text as the model likes, and behind the mark a valid call."""
    mark = 250
    wish: dict[str, Any] = {
        "temperature": 1.0,
        "max_tokens": 30,
        "grammar": grammar,
        "grammar_trigger": mark,
    }
    params = [SamplingParams(**wish, seed=1), SamplingParams(**wish, seed=1, logit_bias={mark: 9})]
    free = SamplingParams(temperature=1.0, max_tokens=30, seed=1)
    requests = [[7, 8]] * 3
    want = alone(folders["t32"], requests, [*params, free])
    outputs = engine(folders["t32"], speculate=3, max_batch=4).generate(requests, [*params, free])
    assert [o.token_ids for o in outputs] == [o.token_ids for o in want]
    assert mark in outputs[1].token_ids
    if mark not in outputs[2].token_ids:
        assert outputs[0].token_ids == outputs[2].token_ids
    if outputs[1].finish_reason is FinishReason.STOP:
        body = outputs[1].token_ids[outputs[1].token_ids.index(mark) + 1 : -1]
        assert bytes(body)[:1] in (b"a", b"c", b"x")


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
@pytest.mark.parametrize("longer", [-1, 0, 1, 2])
def test_a_row_never_follows_the_mask_of_an_earlier_tenant(
    folders: dict[str, Path], run_ahead: int, longer: int
) -> None:
    """The first one's last mask allows its end alone, at a position that the second reaches."""
    mark = 250
    first = SamplingParams(temperature=0, max_tokens=9, grammar='start: "x" /[0-9]/')
    second = SamplingParams(
        temperature=0, max_tokens=9, grammar='start: "y" /[0-9]/ "z"', grammar_trigger=mark,
        logit_bias={mark: 50.0},
    )  # fmt: skip
    llm = engine(folders["t32"], speculate=3, max_batch=1, prefill_batch=1, run_ahead=run_ahead)
    llm.generate([[5] * 6], first)
    (output,) = llm.generate([[7] * (6 + longer)], second)
    assert output.token_ids[0] == mark
    assert bytes(output.token_ids[1:-1]).startswith(b"y") and output.token_ids[-1] == EOS


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_guided_requests_survive_preemption(folders: dict[str, Path], run_ahead: int) -> None:
    words = 'start: /[a-z]{5} / start | "."'
    params = [
        SamplingParams(temperature=1, seed=n, max_tokens=48, grammar=words,
                       logit_bias={ord("."): -100})
        for n in range(4)
    ]  # fmt: skip
    requests = prompts(seed=8, count=4, longest=8)
    want = [output.token_ids for output in alone(folders["t32"], requests, params)]
    page_bytes = sum(group.page_bytes for group in engine(folders["t32"], speculate=0).built.groups)
    llm = engine(
        folders["t32"], speculate=3, max_batch=4, context_len=64, cache_bytes=32 * page_bytes,
        run_ahead=run_ahead,
    )  # fmt: skip
    seen = watch_requests(llm)
    assert [output.token_ids for output in llm.generate(requests, params)] == want
    assert sum(request.stats.preemptions for request in seen) > 0


def test_a_process_that_dies_costs_no_answer(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"], speculate=3, max_batch=3)
    held = SamplingParams(temperature=1, seed=2, max_tokens=40, grammar='start: "a" start | "b"',
                          logit_bias={ord("a"): 9})  # fmt: skip
    free = SamplingParams(temperature=1, seed=1, max_tokens=40, ignore_eos=True)
    want = llm.generate([[1]] * 3, [held, free, held])
    launch, rounds = llm.executor.launch, 0

    def kill(plan: StepPlan) -> None:
        nonlocal rounds
        rounds += 1
        process = llm._guides._process._process
        if rounds == 12 and process is not None:
            process.kill()
        launch(plan)

    llm.executor.launch = kill  # type: ignore[method-assign]
    outputs = llm.generate([[1]] * 3, [held, free, held])
    assert [one.token_ids for one in outputs] == [one.token_ids for one in want]
    assert llm.generate([[1]], held)[0].token_ids == want[0].token_ids


def test_a_mask_that_takes_too_long_ends_its_own_answer(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(folders["t32"], speculate=3, max_batch=2)
    held = SamplingParams(temperature=1, seed=2, max_tokens=40, grammar=NESTED)
    free = SamplingParams(temperature=1, seed=1, max_tokens=40, ignore_eos=True)
    want = llm.generate([[1]], free)[0].token_ids
    llm._guides._seconds = 0.2
    exchange = WorkerProcess._exchange

    def stopped(process: WorkerProcess, letter: tuple[bytes, ...], seconds: float) -> Any:
        asked = process is llm._guides._process and len(letter) == 1  # not the vocabulary
        if asked and process._process is not None:
            process._process.send_signal(signal.SIGSTOP)
        return exchange(process, letter, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "_exchange", stopped)
        outputs = llm.generate([[1]] * 2, [held, free])
    assert outputs[0].finish_reason is FinishReason.ERROR and outputs[1].token_ids == want
    llm._guides._seconds = PATIENCE
    assert llm.generate([[1]], held)[0].finish_reason is not FinishReason.ERROR


@pytest.mark.parametrize(
    ("field", "wish"),
    [
        ("grammar", {"grammar": ""}),
        ("grammar", {"grammar": 'start: "a'}),
        ("grammar", {"grammar": "start: nowhere"}),
        ("grammar", {"grammar": "root ::= ("}),
        ("grammar", {"grammar": "start: start"}),
        ("grammar", {"grammar": "start: " + '"a" ' * 100_000}),
        ("grammar", {"grammar": NESTED, "regex": "a"}),
        ("json_object", {"regex": "a", "json_object": True}),
        ("json_object", {"json_object": 1}),
        ("grammar_trigger", {"grammar_trigger": 3}),
        ("grammar_trigger", {"grammar": NESTED, "grammar_trigger": 10**6}),
        ("json_schema", {"json_schema": {"not": {"type": "integer"}}}),
        ("json_schema", {"json_schema": {"type": "array", "items": {}, "uniqueItems": True}}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_followed_is_refused_by_name(
    folders: dict[str, Path], t32: LLM, field: str, wish: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as caught:
        t32.generate([[1]], SamplingParams(**wish))
    assert caught.value.field == field


@pytest.fixture(scope="module")
def t32(folders: dict[str, Path]) -> LLM:
    return engine(folders["t32"], speculate=3)


def test_what_is_made_at_the_start_serves_forms_that_the_host_follows(
    folders: dict[str, Path],
) -> None:
    llm = engine(folders["t32"], speculate=1, max_batch=2, prefill_batch=1)
    llm.capture(extras=3, guided=True)
    for scores in (None, 2):
        params = SamplingParams(json_object=True, seed=1, max_tokens=12, logprobs=scores)
        outputs = llm.generate([[1, 2], [3]], [params, SamplingParams(max_tokens=4)])
        assert outputs[0].metrics.form == "host"
    assert llm.executor.counters.late_captures == 0
