# SPDX-License-Identifier: Apache-2.0
"""The shipped model answers alike however it is run, as shipped: float32 on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from freewheel import LLM, SamplingParams

PROMPT = "Emma was"
LONG = (
    "It was a bright morning, and the whole party was gathered in the garden. Mr. Knightley had "
    "walked over from Donwell, and was talking with her father of the roads and the weather. "
)
GREEDY = SamplingParams(temperature=0, max_tokens=64)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=64)


def ids(params: SamplingParams, **options: Any) -> list[tuple[int, ...]]:
    llm = LLM("demo", context_len=512, max_batch=2, prefill_batch=1, **options)
    return [output.token_ids for output in llm.generate([PROMPT, LONG], params)]


@pytest.fixture(scope="module")
def plain() -> dict[SamplingParams, list[tuple[int, ...]]]:
    return {p: ids(p, speculate=0, graph="eager", run_ahead=0) for p in (GREEDY, SEEDED)}


@pytest.mark.parametrize(
    "options",
    [
        {"speculate": 1},
        {"speculate": 3},
        {"speculate": 7},
        {"speculate": 3, "graph": "eager"},
        {"speculate": 3, "run_ahead": 0},
        {"speculate": 3, "run_ahead": 1},
        {"speculate": 3, "run_ahead": 3},
        {"speculate": 3, "chunk": 16},
        {"speculate": 3, "chunk": 64},
        {"speculate": 3, "drafter": "lookup"},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_the_demo_answers_alike_however_it_is_run(
    plain: dict[SamplingParams, list[tuple[int, ...]]], options: dict[str, Any]
) -> None:
    for params, want in plain.items():
        assert ids(params, **options) == want


def test_drafts_are_accepted_alike_whatever_the_chunks() -> None:
    """Were the drafter's cache wrong at a chunk's tail, only acceptance would tell."""
    counts: set[tuple[int, ...]] = set()
    for chunk in (9, 16, 64, 256):
        llm = LLM(
            "demo", context_len=512, chunk=chunk, dtype="float64", max_batch=1, prefill_batch=1
        )
        outputs = llm.generate([LONG, LONG[:90]], GREEDY)
        counts.add(tuple(n for o in outputs for n in (o.metrics.rounds, o.metrics.accepted)))
    assert len(counts) == 1


def test_most_drafts_of_the_demo_are_accepted() -> None:
    """A floor far under the measured figure: it falls through when drafts go wrong."""
    llm = LLM("demo", context_len=512, max_batch=1, prefill_batch=1)
    metrics = llm.generate(LONG, GREEDY)[0].metrics
    assert metrics.tokens_per_round > 1.5


def test_an_engine_starts_without_pytorch_s_compiler() -> None:
    """Importing it takes longer than everything else that a start does."""
    script = (
        "import sys; from freewheel import LLM, SamplingParams\n"
        "llm = LLM('demo', max_batch=1, prefill_batch=1, device='cpu')\n"
        "llm.generate('Emma', SamplingParams(temperature=0, max_tokens=4))\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, check=False
    )
    assert ran.stdout == b"False\n", ran.stderr.decode()


def test_a_chat_answers_as_its_prompt_does() -> None:
    demo = LLM("demo", dtype="float64")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    other = [*question, {"role": "assistant", "content": "Paris."}, question[0]]
    params = SamplingParams(temperature=0, max_tokens=24)
    (one,) = demo.chat(question, params)
    assert "The capital of France" in one.text
    both = demo.chat([question, other], params)
    assert both[0].token_ids == one.token_ids
    assert both[1].metrics.prompt_tokens > one.metrics.prompt_tokens
    assert one.reasoning is None


def test_a_turn_that_was_begun_goes_on_as_it_would_have() -> None:
    demo = LLM("demo", dtype="float64")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=24)
    (whole,) = demo.chat(question, params)
    begun = "The capital of"
    assert whole.text.startswith(begun)
    turns = [*question, {"role": "assistant", "content": begun}]
    (rest,) = demo.chat(turns, params, continue_final_message=True)
    assert whole.text.startswith(begun + rest.text) or rest.text.startswith(
        whole.text[len(begun) :]
    )


def test_thoughts_are_no_part_of_an_answer_in_a_chat() -> None:
    demo = LLM("demo", dtype="float64")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    budget = SamplingParams(temperature=0, max_tokens=40, thinking_token_budget=6)
    (one,) = demo.chat(question, budget, thinking=True)
    end = demo.tokenizer.token_id("</think>")
    at = one.token_ids.index(end)
    tail = one.token_ids[at + 1 :]
    said = tail[:-1] if tail and tail[-1] in demo.spec.eos_ids else tail
    assert one.reasoning == demo.tokenizer.decode(one.token_ids[:at])
    assert one.text == demo.tokenizer.decode(said)
    unended = SamplingParams(temperature=0, max_tokens=4)
    (other,) = demo.chat(question, unended, thinking=True)
    assert other.text == "" and other.reasoning == demo.tokenizer.decode(other.token_ids)
