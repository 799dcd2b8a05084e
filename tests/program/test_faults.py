# SPDX-License-Identifier: Apache-2.0
"""What a request does wrong by itself costs nobody else; faults of other kinds are in
`tests/faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from freewheel import FinishReason, SamplingParams
from tests.program.whitebox import engine

PROMPT = [7] * 21
FREE = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.mark.exhaustive
def test_requests_that_fail_by_themselves_do_not_clear_away_what_others_find(
    folders: dict[str, Path],
) -> None:
    llm = engine(folders["t32"], speculate=0, max_batch=2, graph="eager")
    doomed = SamplingParams(allowed_token_ids=(5,), bad_words=("\x05",), max_tokens=4)
    llm.generate([PROMPT], FREE)
    for _ in range(4):
        assert llm.generate([PROMPT], doomed)[0].finish_reason is FinishReason.ERROR
        assert llm.generate([PROMPT], FREE)[0].metrics.cached_tokens > 0
