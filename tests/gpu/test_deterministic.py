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
from freewheel.spec.cache import CacheGroup

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


def watched_bits(model: str, company: int, **options: Any) -> Bits:
    """Tokens of the first request, and all cache rows it has, with `company` others beside it.

    Every cache is NaN before. The request's pages are its own until the end: it ends last.
    """
    batch: dict[str, Any] = {"max_batch": company + 1, "prefill_batch": min(2, company + 1)}
    llm = LLM(model, device="cuda", context_len=512, **(batch | options))
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
    computed = int(state.computed_lens[row])
    rows = [
        llm.executor.arena[f"cache.{group.name}.{field.name}"].flatten(1, 2)[:, slots].clone()
        for table, group in zip(state.page_tables[:, row], llm.executor.cache.groups, strict=True)
        for slots in (slots_of(table, group, computed),)
        for field in group.fields
    ]
    assert len(rows) == len(names)
    assert computed == LENGTH + TOKENS - 1 and all(bool(r.isfinite().all()) for r in rows)
    return answer, rows


def slots_of(table: Tensor, group: CacheGroup, computed: int) -> Tensor:
    """Of the rows that the group must keep of so many tokens; only of those that are whole."""
    first = 0 if group.retention is None else max(0, computed - group.retention)
    row = torch.arange(first // group.stride, computed // group.stride, device="cuda")
    page = table[row * group.stride // group.page_size].long()
    return page * group.page_rows + row % group.page_rows


def differing(one: Bits, other: Bits) -> int:
    """Elements of the caches that are not the same."""
    pairs = zip(one[1], other[1], strict=True)
    return sum(int((a != b).sum()) for a, b in pairs)


@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["demo", "demo-v4"])
def test_every_bit_of_a_request_is_the_same_in_any_company(
    model: str, dtype: str, speculate: int
) -> None:
    options = {"dtype": dtype, "speculate": speculate, "deterministic": True, "chunk": 64}
    alone = watched_bits(model, 0, **options)
    for company in (1, 7):
        found = watched_bits(model, company, **options)
        assert found[0] == alone[0]
        assert differing(found, alone) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["demo", "demo-v4"])
def test_every_bit_is_the_same_in_any_chunks_and_with_any_drafts(model: str, dtype: str) -> None:
    """The target's rows: the draft layer's own exist only where it drafts."""
    options: dict[str, Any] = {"dtype": dtype, "deterministic": True}
    first = watched_bits(model, 0, speculate=3, chunk=256, **options)
    for speculate, chunk in ((3, 64), (7, 100), (1, 16)):
        found = watched_bits(model, 0, speculate=speculate, chunk=chunk, **options)
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
