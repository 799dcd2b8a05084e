# SPDX-License-Identifier: Apache-2.0
"""Every two features of sampling together: the same with and without drafts, alone and in a batch.

A case is a pair of features, a model, a draft depth, a batch and a prompt; its answer, scores
included, is compared with the one computed alone, without drafts.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, Logprobs, Output, SamplingParams
from tests.program.whitebox import engine

FEATURES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 3.0},
    "frequency": {"frequency_penalty": 1.5},
    "negative": {"frequency_penalty": -2.0, "presence_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.6},
    "bias": {"logit_bias": {5: 9.0, 9: 12.5, 8: -100.0, 40: 10.0}},
    "bad_words": {"bad_words": ("(", "!", "K:", ")H", "8")},
    "allowed": {"allowed_token_ids": (*range(3, 60, 2), 8, 38, 28, 40)},
    "minimum": {"min_tokens": 5, "stop_token_ids": (8, 40, 41)},
    "stop_ids": {"stop_token_ids": (5, 9, 43)},
    "ignore_eos": {"ignore_eos": True},
    "stop": {"stop": ("8", "5+", "K")},
    "temperature": {"temperature": 0.9},
    "hot": {"temperature": 2.5},
    "top_k": {"temperature": 1.3, "top_k": 4},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "min_p": {"temperature": 1.3, "min_p": 0.05},
    "regex": {"regex": "([ -S]{2}){2,4}|[A-Z]+"},
    "choice": {"choice": ("YES", "NO", "YES AND NO", "H")},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "short": {"max_tokens": 6},
}
MODELS = ("perm_x", "pen", "t32")
WAYS = ((1, 1), (1, 4), (3, 1), (3, 4))
"""(draft depth, batch)."""
TOKENS = 11

Answer = tuple[Any, ...]


def pairs() -> list[SamplingParams]:
    """One request for each pair of features."""
    every: list[SamplingParams] = []
    for index, (one, other) in enumerate(itertools.combinations(FEATURES.values(), 2)):
        base = {"temperature": 0.0, "max_tokens": TOKENS, "seed": index}
        wish = base | one | other
        form = {"regex", "choice"} & wish.keys()
        if len(form) == 2 or (form and {"ignore_eos", "min_tokens"} & wish.keys()):
            continue  # refused: they contradict each other
        every.append(SamplingParams(**wish))
    return every


def prompt_of(index: int, vocabulary: int) -> list[int]:
    rng = random.Random(index)
    return [rng.randrange(vocabulary) for _ in range(rng.choice([1, 2, 5, 17, 20]))]


def rounded(logprobs: tuple[Logprobs | None, ...] | None) -> Any:
    if logprobs is None:
        return None
    return [
        None if one is None else (one.token_id, round(one.logprob, 4), [t for t, _ in one.top])
        for one in logprobs
    ]


def answer_of(output: Output) -> Answer:
    return (
        output.token_ids,
        output.text,
        output.finish_reason,
        rounded(output.logprobs),
        rounded(output.prompt_logprobs),
    )


def run(llm: LLM, indices: list[int], params: list[SamplingParams]) -> list[Answer]:
    vocabulary = llm.spec.vocab_size
    prompts = [prompt_of(index, vocabulary) for index in indices]
    outputs = llm.generate(prompts, [params[index] for index in indices])
    return [answer_of(output) for output in outputs]


def check(folder: Path, indices: list[int], ways: tuple[tuple[int, int], ...]) -> int:
    """Compare all ways of computing these pairs; returns how many answers were compared."""
    params = pairs()
    alone = engine(folder, speculate=0, run_ahead=0, max_batch=1, prefill_batch=1, graph="eager")
    want = run(alone, indices, params)
    compared = 0
    for depth, batch in ways:
        llm = engine(folder, speculate=depth, max_batch=batch, prefill_batch=min(batch, 2))
        have = run(llm, indices, params)
        for index, one, other in zip(indices, want, have, strict=True):
            assert other == one, (params[index], depth, batch)
        compared += len(have)
    return compared


@pytest.mark.parametrize("name", MODELS)
def test_two_features_together_do_not_depend_on_drafts_or_company(
    folders: dict[str, Path], name: str
) -> None:
    count = len(pairs())
    indices = random.Random(name).sample(range(count), 12)
    assert check(folders[name], indices, ((1, 4), (3, 1))) == 24


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_two_features_together_do_not_depend_on_drafts_or_company(
    folders: dict[str, Path], name: str, way: tuple[int, int]
) -> None:
    """205 pairs, two depths, two batches, three models: 2460 answers."""
    compared = check(folders[name], list(range(len(pairs()))), (way,))
    assert compared * len(MODELS) * len(WAYS) >= 2000
