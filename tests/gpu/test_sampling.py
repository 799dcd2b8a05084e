# SPDX-License-Identifier: Apache-2.0
"""Penalties, scores and forms in CUDA graphs: the closed forms' answers, at every depth."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, Output, SamplingParams
from freewheel.graph import cuda_waits_are_errors
from tests.fixtures.closed_form import PEN_X, PEN_Y

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_batch": 4,
    "prefill_batch": 2,
    "chunk": 16,
    "page_size": 16,
}


def wishes() -> list[SamplingParams]:
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    form: dict[str, Any] = {"regex": "(AB|C){2,6}[0-9]"} if find_spec("outlines_core") else {}
    return [
        SamplingParams(**greedy, frequency_penalty=1.0, logprobs=2),
        SamplingParams(**greedy, presence_penalty=4.0),
        SamplingParams(**greedy, repetition_penalty=2.0, prompt_logprobs=1),
        SamplingParams(**greedy, logit_bias={PEN_Y: 3.6}, bad_words=("H",)),
        SamplingParams(temperature=1.0, seed=3, max_tokens=30, **form),
        SamplingParams(temperature=2.0, seed=4, max_tokens=20, ignore_eos=True, logprobs=20),
        SamplingParams(temperature=2.0, seed=5, max_tokens=20, allowed_token_ids=(3, 40, 63)),
    ]


def run(folder: Path, device: str, **options: Any) -> list[Output]:
    llm = LLM(str(folder), device=device, **{**OPTIONS, **options})
    if device == "cuda":
        llm.capture(extras=3)
    with cuda_waits_are_errors():
        return llm.generate([[3], [PEN_X] * 20, [3, 4, 5], [1], [2], [6], [7]], wishes())


@pytest.mark.parametrize("speculate", [0, 1, 3])
def test_features_give_on_cuda_what_they_give_on_the_cpu(
    folders: dict[str, Path], speculate: int
) -> None:
    pytest.importorskip("outlines_core")
    found = run(folders["pen"], "cuda", speculate=speculate)
    want = run(folders["pen"], "cpu", speculate=0)
    text = {PEN_X: "X", PEN_Y: "Y"}
    assert "".join(text[token] for token in found[0].token_ids) == "XXXXYXYXYXYX"
    for one, other in zip(want, found, strict=True):
        assert (other.token_ids, other.finish_reason) == (one.token_ids, one.finish_reason)
        for field in ("logprobs", "prompt_logprobs"):
            first, second = vars(one)[field], vars(other)[field]
            assert (first is None) == (second is None)
            for a, b in zip(first or (), second or (), strict=True):
                assert a is b or a.logprob == pytest.approx(b.logprob, abs=1e-4)
