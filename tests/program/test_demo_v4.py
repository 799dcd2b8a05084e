# SPDX-License-Identifier: Apache-2.0
"""The shipped DeepSeek-V4 model answers alike however it is run, far past its window."""

from __future__ import annotations

from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.audit import audit

PROMPT = "Emma was"
LONG = (
    "It was a bright morning, and the whole party was gathered in the garden. Mr. Knightley had "
    "walked over from Donwell, and was talking with her father of the roads and the weather. "
)
FAR = SamplingParams(temperature=0, max_tokens=310, ignore_eos=True)
"""More than two windows and two entries of 128 tokens."""
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=48)


def ids(params: SamplingParams, **options: Any) -> list[tuple[int, ...]]:
    llm = LLM("demo-v4", context_len=512, max_batch=2, prefill_batch=1, **options)
    return [output.token_ids for output in llm.generate([PROMPT, LONG], params)]


@pytest.fixture(scope="module")
def plain() -> dict[SamplingParams, list[tuple[int, ...]]]:
    return {p: ids(p, speculate=0, run_ahead=0) for p in (FAR, SEEDED)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"speculate": 7, "run_ahead": 3}, {"speculate": 3, "chunk": 16}],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_the_v4_demo_answers_alike_however_it_is_run(
    plain: dict[SamplingParams, list[tuple[int, ...]]], options: dict[str, Any]
) -> None:
    for params, want in plain.items():
        assert [len(tokens) for tokens in want] == [params.max_tokens] * 2
        assert ids(params, **options) == want


def test_half_the_drafts_of_the_v4_demo_are_accepted() -> None:
    """A floor under the measured figure: it falls through when drafts go wrong."""
    llm = LLM("demo-v4", context_len=512, max_batch=1, prefill_batch=1)
    params = SamplingParams(temperature=0, max_tokens=64)
    metrics = llm.generate("Once upon a time", params)[0].metrics
    assert metrics.tokens_per_round > 2


def test_rounds_of_the_v4_demo_leave_the_host_alone() -> None:
    report = audit(LLM("demo-v4", context_len=512, max_batch=4, guard=True), rounds=20)
    assert report.failures == ()
    assert report.sites == ()
    assert report.rounds >= 20 and report.tokens > 40
