# SPDX-License-Identifier: Apache-2.0
"""Deterministic mode: every bit of a request is the same alone and in poisoned company."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
LENGTH, TOKENS = 150, 48
PARTS = 12
"""Of the prompt set: they may run side by side."""

Bits = tuple[tuple[int, ...], list[Tensor]]


def prompts() -> list[list[int]]:
    """The request that is watched, then seven others; they all have ended before it does."""
    rng = random.Random(3)
    lengths = (LENGTH, 1, 63, 64, 65, 200, 17, 130)
    return [[rng.randrange(2, 900) for _ in range(length)] for length in lengths]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def watched_bits(company: int, **options: Any) -> Bits:
    """Tokens of the first request, and all cache rows it computed, with `company` others beside it.

    Every cache is NaN before. The request's pages are its own until the end: it ends last.
    """
    batch: dict[str, Any] = {"max_batch": company + 1, "prefill_batch": min(2, company + 1)}
    llm = LLM("demo", device="cuda", context_len=512, **(batch | options))
    llm.capture()
    names = [name for name in llm.executor.arena.names() if name.startswith("cache.")]
    for name in names:
        llm.executor.arena[name].fill_(torch.nan)
    torch.cuda.synchronize()
    given = prompts()[: company + 1]
    params = [greedy(TOKENS), *(greedy(20) for _ in given[1:])]
    answer = llm.generate(given, params)[0].token_ids
    torch.cuda.synchronize()
    state = llm.executor.state
    starts = state.tokens[:, :LENGTH].cpu()
    (row,) = [r for r in range(1, starts.shape[0]) if starts[r].tolist() == given[0]]
    size, computed = state.page_sizes[0], int(state.computed_lens[row])
    at = torch.arange(computed, device="cuda")
    slots = state.page_tables[0, row, at // size].long() * size + at % size
    rows = [llm.executor.arena[name].flatten(1, 2)[:, slots].clone() for name in names]
    assert computed == LENGTH + TOKENS - 1 and all(bool(r.isfinite().all()) for r in rows)
    return answer, rows


def differing(one: Bits, other: Bits) -> int:
    """Elements of the caches that are not the same."""
    pairs = zip(one[1], other[1], strict=True)
    return sum(int((a != b).sum()) for a, b in pairs)


@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_of_a_request_is_the_same_in_any_company(dtype: str, speculate: int) -> None:
    options = {"dtype": dtype, "speculate": speculate, "deterministic": True, "chunk": 64}
    alone = watched_bits(0, **options)
    for company in (1, 7):
        found = watched_bits(company, **options)
        assert found[0] == alone[0]
        assert differing(found, alone) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_is_the_same_in_any_chunks_and_with_any_drafts(dtype: str) -> None:
    """The target's rows: the draft layer's own exist only where it drafts."""
    options: dict[str, Any] = {"dtype": dtype, "deterministic": True}
    first = watched_bits(0, speculate=3, chunk=256, **options)
    for speculate, chunk in ((3, 64), (7, 100), (1, 16)):
        found = watched_bits(0, speculate=speculate, chunk=chunk, **options)
        assert found[0] == first[0]
        assert differing(found, first) == 0


@pytest.mark.parametrize("part", range(PARTS))
def test_the_demo_answers_the_prompt_set_on_the_gpu_as_on_the_cpu(part: int) -> None:
    found = json.loads((ROOT / "benchmarks" / "prompts.json").read_text(encoding="utf-8"))
    texts = [item["prompt"] for item in found][part::PARTS]
    answers = [
        LLM(
            "demo", dtype="float32", context_len=1024, device=device, deterministic=on_the_gpu
        ).generate(texts, greedy(32))
        for device, on_the_gpu in (("cpu", False), ("cuda", True))
    ]
    differ = [
        text
        for text, one, other in zip(texts, *answers, strict=True)
        if one.token_ids != other.token_ids
    ]
    assert not differ
