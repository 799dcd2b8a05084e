# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose right answers are known by arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freewheel import FinishReason, SamplingParams
from freewheel.spec import StepPlan
from tests.fixtures.closed_form import PEN_X, PEN_Y, perm, perm_run
from tests.program.whitebox import engine

RUN = (38, 1, 8, 43, 26, 5, 28, 15, 14, 9, 48, 51, 2)


def solo(**changes: object) -> dict[str, object]:
    return {"max_batch": 1, "prefill_batch": 1, "run_ahead": 0} | changes


@pytest.mark.parametrize("speculate", [0, 1, 2, 3, 7])
def test_perm_follows_its_permutation_and_every_draft_is_right(
    folders: dict[str, Path], speculate: int
) -> None:
    llm = engine(folders["perm"], **solo(speculate=speculate))
    params = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)
    output = llm.generate([[7]], params)[0]
    assert output.token_ids == RUN == tuple(perm_run(7, 13))
    assert output.metrics.rounds == 1 + -(-12 // (1 + speculate))
    assert output.metrics.accepted == 12 - (output.metrics.rounds - 1)


def test_perm_x_accepts_two_three_three_three(folders: dict[str, Path]) -> None:
    llm = engine(folders["perm_x"], **solo(speculate=3))
    accepted: list[int] = []
    collect = llm.executor.collect

    def watch() -> object:
        result = collect()
        accepted.extend(row.agreed for row in result.rows)
        return result

    llm.executor.collect = watch  # type: ignore[method-assign,assignment]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    output = llm.generate([[7]], params)[0]
    assert output.token_ids == tuple(perm_run(7, 16))
    assert accepted[:5] == [0, 2, 3, 3, 3]


@pytest.mark.parametrize("name", ["perm", "perm_x"])
@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("stop", [38, 1, 8, 43, 2])
def test_nothing_follows_a_stop_token_wherever_it_falls_in_an_accepted_run(
    folders: dict[str, Path], name: str, speculate: int, stop: int
) -> None:
    llm = engine(folders[name], **solo(speculate=speculate, run_ahead=2))
    params = SamplingParams(temperature=0, max_tokens=13, stop_token_ids=(stop,))
    output = llm.generate([[7]], params)[0]
    assert output.token_ids == RUN[: RUN.index(stop) + 1]
    assert output.finish_reason == FinishReason.STOP
    assert output.text == "".join(chr(32 + token) for token in output.token_ids[:-1])
    assert output.metrics.completion_tokens == len(output.token_ids)


def test_a_wrong_draft_of_the_end_token_does_not_end_the_request(folders: dict[str, Path]) -> None:
    """PERM-x drafts a wrong token after multiples of four; that token is made a stop id."""
    llm = engine(folders["perm_x"], **solo(speculate=3))
    drafted: set[int] = set()
    launch = llm.executor.launch

    def watch(plan: StepPlan) -> None:
        launch(plan)
        state = llm.executor.state
        known = int(state.known_lens[1])
        drafted.update(state.tokens[1, known : known + int(state.draft_lens[1])].tolist())

    llm.executor.launch = watch  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)
    llm.generate([[7]], params)
    wrong = sorted(drafted - set(perm_run(7, 20)))
    assert wrong
    again = SamplingParams(temperature=0, max_tokens=13, stop_token_ids=tuple(wrong[:4]))
    assert llm.generate([[7]], again)[0].token_ids == RUN


@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("stop", ["(K", "K:", "%<", "<", "I"])
def test_a_stop_string_cuts_exactly_across_tokens_and_inside_an_accepted_run(
    folders: dict[str, Path], speculate: int, stop: str
) -> None:
    full = "".join(chr(32 + token) for token in RUN)
    llm = engine(folders["perm"], **solo(speculate=speculate, run_ahead=2))
    params = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True, stop=(stop,))
    output = llm.generate([[7]], params)[0]
    cut = full.find(stop)
    if cut < 0:
        assert (output.text, output.finish_reason) == (full, FinishReason.LENGTH)
        return
    assert (output.text, output.finish_reason) == (full[:cut], FinishReason.STOP)
    assert output.token_ids == RUN[: cut + len(stop)]
    kept = SamplingParams(
        temperature=0, max_tokens=13, ignore_eos=True, stop=(stop,), include_stop_str_in_output=True
    )
    assert llm.generate([[7]], kept)[0].text == full[:cut] + stop


@pytest.mark.parametrize("speculate", [0, 1, 3])
def test_joined_chunks_equal_the_whole_output(folders: dict[str, Path], speculate: int) -> None:
    llm = engine(folders["perm"], **solo(speculate=speculate, run_ahead=2))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=("zz",))
    whole = llm.generate([[7]], params)[0]
    chunks = list(llm.stream([7], params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(t for chunk in chunks for t in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason
    accepted = sum(piece.accepted for chunk in chunks for piece in chunk.pieces)
    assert accepted == whole.metrics.accepted  # one piece a token here


@pytest.mark.parametrize("speculate", [0, 3])
def test_the_context_limit_ends_a_request_with_its_last_token_right(
    folders: dict[str, Path], speculate: int
) -> None:
    llm = engine(folders["perm"], **solo(speculate=speculate, context_len=20, chunk=9))
    for length in (1, 12, 18, 19):
        prompt = [7] * length
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        output = llm.generate([prompt], params)[0]
        assert output.token_ids == tuple(perm_run(7, 20 - length))
        assert output.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("minimum", [0, 1, 3, 5])
@pytest.mark.parametrize("speculate", [0, 3])
def test_an_end_token_is_masked_until_the_minimum(
    folders: dict[str, Path], minimum: int, speculate: int
) -> None:
    """Masked, the runner-up is chosen: never the stop token before `min_tokens` tokens."""
    llm = engine(folders["perm"], **solo(speculate=speculate))
    stop = RUN[2]
    params = SamplingParams(
        temperature=0, max_tokens=10, min_tokens=minimum, stop_token_ids=(stop,), ignore_eos=True
    )
    output = llm.generate([[7]], params)[0]
    assert stop not in output.token_ids[:minimum]
    if minimum < 3:
        assert output.token_ids == RUN[:3]
    else:
        assert output.token_ids[:2] == RUN[:2] and output.token_ids[2] != stop
        for before, after in zip(output.token_ids[3:], output.token_ids[4:], strict=False):
            assert after == perm(before) or after == stop


def test_pen_samples_its_analytic_distribution(folders: dict[str, Path]) -> None:
    llm = engine(folders["pen"], speculate=3, max_batch=8, dtype="float32")
    draws = 600
    params = SamplingParams(temperature=2.0, seed=11, max_tokens=100, ignore_eos=True)
    tokens = [t for o in llm.generate([[k] for k in range(6)], params) for t in o.token_ids]
    assert len(tokens) == draws
    logits = torch.zeros(64)
    logits[PEN_X], logits[PEN_Y] = 10, 6.5
    share = (logits / 2).softmax(0)
    for token in (PEN_X, PEN_Y):
        p = float(share[token])
        assert abs(tokens.count(token) / draws - p) < 4 * (p * (1 - p) / draws) ** 0.5
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert llm.generate([[3]], greedy)[0].token_ids == (PEN_X,) * 8
