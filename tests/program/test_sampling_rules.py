# SPDX-License-Identifier: Apache-2.0
"""Penalties, biases, bans and scores: known answers, and nothing left behind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from freewheel import FinishReason, SamplingParams
from freewheel.errors import RequestError
from freewheel.models.deepseek_v32 import DeepseekV32
from freewheel.spec import ShapeLadder, StepShape
from freewheel.spec.shape import ECHOES
from tests.fixtures.closed_form import PEN_X, PEN_Y, PERM_VOCAB, perm_run
from tests.program.whitebox import ScriptedDrafts, answers, engine, prompts, watch_requests

DEPTHS = (0, 1, 3)
LETTERS = {PEN_X: "X", PEN_Y: "Y"}


def spelt(tokens: tuple[int, ...]) -> str:
    return "".join(LETTERS.get(token, "?") for token in tokens)


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 12, "ignore_eos": True} | changes))


@pytest.mark.parametrize("speculate", DEPTHS)
def test_pen_gives_its_stated_texts_and_scores(folders: dict[str, Path], speculate: int) -> None:
    llm = engine(folders["pen"], speculate=speculate)
    cases = {
        "XXXXXXXXXXXX": greedy(),
        "XXXXYXYXYXYX": greedy(frequency_penalty=1.0),
        "XYXXXXXX": greedy(presence_penalty=4.0, max_tokens=8),
        "YYYYYYYYYYYY": greedy(logit_bias={PEN_Y: 3.6}),
    }
    for text, params in cases.items():
        assert spelt(llm.generate([[3]], params)[0].token_ids) == text
    output = llm.generate([[3]], greedy(logprobs=2, max_tokens=9))[0]
    assert output.logprobs is not None and len(output.logprobs) == 9
    for one in output.logprobs:
        assert one.token_id == PEN_X
        assert one.logprob == pytest.approx(-0.0325, abs=1e-4)
        assert [token for token, _ in one.top] == [PEN_X, PEN_Y]
        assert one.top[1][1] == pytest.approx(-3.5325, abs=1e-4)


@pytest.mark.parametrize("speculate", DEPTHS)
def test_a_repetition_penalty_divides_what_is_there_and_multiplies_below_zero(
    folders: dict[str, Path], speculate: int
) -> None:
    """10 / 2 is below 6.5; then 6.5 / 2 is below both; X, at 5, goes on. The prompt counts."""
    llm = engine(folders["pen"], speculate=speculate)
    params = greedy(repetition_penalty=2.0, max_tokens=5)
    assert spelt(llm.generate([[3]], params)[0].token_ids) == "XYXXX"
    assert spelt(llm.generate([[PEN_X]], params)[0].token_ids) == "YXXXX"
    other = greedy(presence_penalty=4.0, max_tokens=3)
    assert spelt(llm.generate([[PEN_X]], other)[0].token_ids) == "XYX"


@pytest.mark.parametrize("speculate", DEPTHS)
def test_perm_scores_every_token_of_prompt_and_answer(
    folders: dict[str, Path], speculate: int
) -> None:
    llm = engine(folders["perm"], speculate=speculate)
    right = 10 - math.log(math.exp(10) + PERM_VOCAB - 1)
    prompt = [*perm_run(7, 20), 0]  # the last is not what follows
    output = llm.generate([prompt], greedy(logprobs=0, prompt_logprobs=1, max_tokens=13))[0]
    assert output.token_ids == tuple(perm_run(0, 13))
    assert output.logprobs is not None and output.prompt_logprobs is not None
    assert [one.token_id for one in output.logprobs] == list(output.token_ids)
    assert all(one.logprob == pytest.approx(right, abs=1e-4) for one in output.logprobs)
    assert all(one.top == () for one in output.logprobs)
    first, *others = output.prompt_logprobs
    assert first is None
    scored = [one for one in others if one is not None]
    assert [one.token_id for one in scored] == prompt[1:]
    assert all(one.logprob == pytest.approx(right, abs=1e-4) for one in scored[:-1])
    assert scored[-1].logprob == pytest.approx(right - 10, abs=1e-4)
    assert scored[-1].top[0][0] == perm_run(prompt[-2], 1)[0]


@pytest.mark.parametrize("chunk", [9, 16, 40])
def test_prompt_scores_do_not_depend_on_chunks_drafts_or_streaming(
    folders: dict[str, Path], chunk: int
) -> None:
    prompt = prompts(seed=4, count=1, longest=40)[0] * 2
    params = greedy(prompt_logprobs=2, logprobs=1, max_tokens=6)
    plain = engine(folders["t32"], speculate=0, chunk=128).generate([prompt], params)[0]
    llm = engine(folders["t32"], speculate=3, chunk=chunk)
    chunks = list(llm.stream(prompt, params))
    last = chunks[-1]
    assert plain.prompt_logprobs is not None and last.prompt_logprobs is not None
    assert len(last.prompt_logprobs) == len(prompt)
    streamed = [one for part in chunks for one in part.logprobs or ()]
    pairs = [*zip(plain.prompt_logprobs, last.prompt_logprobs, strict=True)]
    pairs += [*zip(plain.logprobs or (), streamed, strict=True)]
    for one, other in pairs[1:]:
        assert one is not None and other is not None
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_a_rejected_draft_is_not_counted_and_an_accepted_one_once(
    folders: dict[str, Path], right: int
) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, frequency_penalty=0.7, presence_penalty=0.4,
        repetition_penalty=1.3, bad_words=("e", "th"), logprobs=1,
    )  # fmt: skip
    prompt = prompts(seed=9, count=1, longest=20)[0]
    want = engine(folders["t32"], speculate=0).generate([prompt], params)[0]
    llm = engine(folders["t32"], speculate=3, run_ahead=0, max_batch=1, prefill_batch=1)
    drafts = ScriptedDrafts(llm)
    drafts.script, drafts.right = [*prompt, *want.token_ids, *[0] * 8], right
    output = llm.generate([prompt], params)[0]
    assert output.token_ids == want.token_ids
    assert output.metrics.rounds == 1 + -(-23 // (right + 1))


def test_penalties_survive_preemption_and_leave_nothing_in_a_reused_row(
    folders: dict[str, Path],
) -> None:
    requests = prompts(seed=2, count=6, longest=30)
    wished = SamplingParams(
        temperature=0.8, seed=5, max_tokens=30, ignore_eos=True, frequency_penalty=1.0,
        repetition_penalty=1.2, logit_bias={3: 4.0}, bad_words=("a",), logprobs=2,
        prompt_logprobs=0,
    )  # fmt: skip
    plain = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True)
    alone = engine(folders["t32"], speculate=0, max_batch=1, prefill_batch=1)
    params = [wished if n % 2 else plain for n in range(6)]
    want = [alone.generate([p], s)[0] for p, s in zip(requests, params, strict=True)]
    page_bytes = sum(group.page_bytes for group in alone.built.groups)
    llm = engine(
        folders["t32"], speculate=3, max_batch=3, context_len=64, cache_bytes=30 * page_bytes
    )
    requests_seen = watch_requests(llm)
    have = llm.generate(requests, params)
    assert sum(request.stats.preemptions for request in requests_seen) > 0
    for one, other in zip(want, have, strict=True):
        assert other.token_ids == one.token_ids
        for field in ("logprobs", "prompt_logprobs"):
            first, second = vars(one)[field], vars(other)[field]
            assert (first is None) == (second is None)
            for a, b in zip(first or (), second or (), strict=True):
                assert a is b or a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_sampled_tokens_follow_the_biased_law_with_drafts(folders: dict[str, Path]) -> None:
    llm = engine(folders["pen"], speculate=3, max_batch=8, dtype="float32")
    biases = {PEN_Y: 2.0, 7: 3.5}
    params = [
        SamplingParams(
            temperature=2.0, seed=seed, max_tokens=100, ignore_eos=True, logit_bias=biases
        )
        for seed in range(12)
    ]
    tokens = [t for o in llm.generate([[k] for k in range(12)], params) for t in o.token_ids]
    logits = torch.zeros(64, dtype=torch.float64)
    logits[PEN_X], logits[PEN_Y], logits[7] = 10, 8.5, 3.5
    share = (logits / 2).softmax(0)
    named = [PEN_X, PEN_Y, 7]
    want = [float(share[t]) for t in named]
    counts = [tokens.count(t) for t in named]
    want.append(1 - sum(want))
    counts.append(len(tokens) - sum(counts))
    expected = [len(tokens) * p for p in want]
    chi_square = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001


@pytest.mark.parametrize("speculate", [0, 3])
def test_broken_logits_end_their_own_request_and_no_other(
    folders: dict[str, Path], speculate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model says NaN behind token 43; PERM from 7 gets there, from 10 it does not."""
    want = perm_run(10, 8)
    assert 43 not in want and perm_run(7, 4)[3] == 43
    forward = DeepseekV32.forward

    def breaking(self: Any, view: Any, cache: Any) -> Any:
        hidden = forward(self, view, cache)
        return torch.where((view.tokens == 43)[..., None], torch.nan, hidden)

    monkeypatch.setattr(DeepseekV32, "forward", breaking)
    llm = engine(folders["perm"], speculate=speculate)
    broken, whole = llm.generate([[7], [10]], greedy(max_tokens=8))
    assert (broken.token_ids, broken.finish_reason) == ((38, 1, 8, 43), FinishReason.ERROR)
    assert (whole.token_ids, whole.finish_reason) == (tuple(want), FinishReason.LENGTH)
    assert llm.generate([[43]], greedy())[0].token_ids == ()


def test_a_request_with_nothing_left_to_choose_ends_with_an_error(
    folders: dict[str, Path],
) -> None:
    llm = engine(folders["pen"], speculate=3)
    stuck, fine = llm.generate(
        [[1], [2]], [greedy(allowed_token_ids=(40,), bad_words=("H",)), greedy()]
    )
    assert chr(32 + 40) == "H"
    assert (stuck.token_ids, stuck.finish_reason) == ((), FinishReason.ERROR)
    assert fine.finish_reason == FinishReason.LENGTH


def test_rounds_in_which_nobody_asks_for_more_run_the_same_calls_as_ever(
    folders: dict[str, Path],
) -> None:
    """And their letters are no longer."""
    fresh = engine(folders["t32"], speculate=3)
    used = engine(folders["t32"], speculate=3)
    wished = greedy(frequency_penalty=1.0, logprobs=5, prompt_logprobs=5)
    used.generate([[1, 2, 3]] * 3, wished)
    for llm in (fresh, used):
        answers(llm, [[1, 2, 3]] * 4)
    shape = fresh.built.ladder.decode[-1]
    assert shape.extras == 0
    assert fresh.executor.calls(shape) == used.executor.calls(shape)
    listing = used.executor._lanes[shape].graph._program.listing  # type: ignore[union-attr]
    assert "choose" in listing
    assert not any(name in listing for name in ("adjust", "score", "constrain"))
    launched = {shape for shape in used.executor._lanes if shape.extras}
    assert launched and all(used.executor.calls(s) for s in launched)


def test_a_ladder_has_every_extra_for_prompts_and_all_but_echoes_for_decoding() -> None:
    ladder = ShapeLadder.build(4, 3, (16, 64), 2)
    every = set(ladder.shapes(ECHOES))
    assert set(ladder.shapes()) == {s for s in every if not (s.extras or s.tables or s.shows)}
    assert ladder.fit_decode(3, ECHOES) == StepShape(4, 4, 3, 2)
    assert ladder.fit_prefill(2, 20, True, ECHOES) in every
    assert all(ladder.fit_decode(n, e) in every for n in (1, 2, 4) for e in range(3))


@pytest.mark.parametrize(
    ("field", "wish"),
    [
        ("presence_penalty", {"presence_penalty": 101}),
        ("frequency_penalty", {"frequency_penalty": math.nan}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("repetition_penalty", {"repetition_penalty": -1.0}),
        ("logit_bias", {"logit_bias": {3: 101}}),
        ("logit_bias", {"logit_bias": dict.fromkeys(range(301), 1)}),
        ("logit_bias", {"logit_bias": {"3": 1}}),
        ("logit_bias", {"logit_bias": {64: 1}}),
        ("logit_bias", {"logit_bias": [(1, 2), (1, 3)]}),
        ("bad_words", {"bad_words": ("",)}),
        ("bad_words", {"bad_words": "word"}),
        ("bad_words", {"bad_words": ("A" * 9,)}),
        ("bad_words", {"bad_words": tuple(f"{number}" for number in range(10, 60))}),
        ("allowed_token_ids", {"allowed_token_ids": ()}),
        ("allowed_token_ids", {"allowed_token_ids": (64,)}),
        ("allowed_token_ids", {"allowed_token_ids": (-1,)}),
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": True}),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_wish_that_cannot_be_kept_is_refused_by_name(
    folders: dict[str, Path], field: str, wish: dict[str, Any]
) -> None:
    llm = engine(folders["pen"], speculate=0)
    with pytest.raises(RequestError) as caught:
        llm.generate([[1]], SamplingParams(**wish))
    assert caught.value.field == field
