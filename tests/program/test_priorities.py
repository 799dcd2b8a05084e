# SPDX-License-Identifier: Apache-2.0
"""Priorities and tenants reach the scheduler, and change no token."""

from __future__ import annotations

from pathlib import Path

import pytest

from freewheel import SamplingParams
from freewheel.engine import TokenEngine
from freewheel.errors import ConfigError, RequestError
from tests.program.whitebox import answers, engine

SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]


def test_the_lower_value_is_answered_first_whoever_came_first(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"], max_batch=1, prefill_batch=1, run_ahead=0)
    alone = answers(llm, PROMPTS, SHORT)
    tokens = TokenEngine(llm)
    for name, prompt, priority in zip("abcd", PROMPTS, (5, 0, -1, 0), strict=True):
        tokens.submit(name, prompt, SHORT, priority=priority)
    ended: list[str] = []
    found: dict[str, list[int]] = {name: [] for name in "abcd"}
    while tokens.busy:
        for step in tokens.step():
            found[step.id] += step.tokens
            ended += [step.id] if step.finish is not None else []
    assert ended == ["c", "b", "d", "a"]
    assert [tuple(found[name]) for name in "abcd"] == alone


def test_tenants_take_turns(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"], max_batch=1, prefill_batch=1, run_ahead=0)
    tokens = TokenEngine(llm)
    for name in ("a1", "a2", "a3", "b1", "b2"):
        tokens.submit(name, [1, 2, ord(name[1])], SHORT, tenant=name[0])
    ended: list[str] = []
    while tokens.busy:
        ended += [step.id for step in tokens.step() if step.finish is not None]
    assert ended == ["a1", "b1", "a2", "b2", "a3"]


def test_generate_takes_one_priority_or_one_each(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"], max_batch=1, prefill_batch=1)
    alone = answers(llm, PROMPTS, SHORT)
    outputs = llm.generate(PROMPTS, SHORT, priority=[3, -1, 0, 2])
    assert [output.token_ids for output in outputs] == alone
    for wrong in ([1], "low", 1.5, [0, 0, 0, True]):
        with pytest.raises(RequestError, match="priority"):
            llm.generate(PROMPTS, SHORT, priority=wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="priority"):
        llm.stream(PROMPTS[0], priority=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0, 1, True, -0.5])
def test_a_share_of_all_or_nothing_is_refused(folders: dict[str, Path], share: float) -> None:
    with pytest.raises(ConfigError, match="prefill_share"):
        engine(folders["t32"], prefill_share=share)
