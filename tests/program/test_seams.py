# SPDX-License-Identifier: Apache-2.0
"""Every feature beside every other: under random schedules, each answer is a cold engine's."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from freewheel import SamplingParams
from freewheel.host import TextStream
from tests.fixtures import closed_form, compressed
from tests.program.test_schedules import CONTEXT, VOCABULARY, Schedule
from tests.program.whitebox import engine

THINK, END_THINK = 261, 262
ROWS = {"kv_lora_rank": 128, "qk_rope_head_dim": 8, "index_head_dim": 128}
KEYS = {"head_dim": 136, "qk_rope_head_dim": 8, "index_head_dim": 128}
TREE = {
    "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}}},
    "$ref": "#/$defs/n",
}
WISHES: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True},
    {"json_schema": TREE},
    {"grammar": 'start: "a" start "b" | "c"', "logprobs": 1},
    {"json_object": True},
    {"grammar": 'start: "x" /[0-9]/', "grammar_trigger": 50, "logit_bias": {50: 5.0}},
    {"regex": "[a-f]{3,6}"},
    {"regex": "[g-k]{2,5}x"},
    {"regex": "(ab|cd)+e", "thinking_token_budget": 2, "logit_bias": {END_THINK: 3.0}},
    {"json_schema": TREE, "thinking_token_budget": 5},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "bad_words": ("a", "bc")},
    {"prompt_logprobs": 1, "logprobs": 2, "ignore_eos": True},
)


class Mixed(Schedule):
    """Requests that ask for all that there is to ask for."""

    def arrive(self) -> None:
        rng = self.rng
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))]
        if self.live and rng.random() < 0.6:
            twin = rng.choice(self.live).request
            whole = [*twin.prompt, *twin.output]
            prompt = [*whole[: rng.randint(1, len(whole))], *prompt][: CONTEXT - 8]
        wish = rng.choice(WISHES)
        prompt = [token for token in prompt if token not in (THINK, END_THINK)] or [5]
        if "thinking_token_budget" in wish:
            prompt.insert(rng.randrange(len(prompt) + 1), THINK)
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(2**31),
            max_tokens=rng.choice([1, 6, 30, None]),
            **wish,
        )
        whose = {"priority": rng.choice([0, 0, -1, 4]), "tenant": rng.choice("ab")}
        request = self.llm._request(prompt, params, rng.choice(["", "", "salt"]), **whose)
        decode = partial(self.llm.tokenizer.decode, skip_special_tokens=True)
        self.live.append(self.llm._session.add(request, TextStream(decode)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(24))
def test_features_side_by_side_change_no_answer(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("llguidance")
    rng = random.Random(seed)
    folder = (
        compressed.write_t4(tmp_path / "t4", **KEYS)
        if seed % 3 == 2
        else (closed_form.write_t32, closed_form.write_tg)[seed % 3](tmp_path / "t", **ROWS)
    )
    stored = {"kv_cache_dtype": rng.choice(["auto", "fp8"]), "context_len": CONTEXT}
    llm = engine(
        folder,
        speculate=rng.choice([0, 1, 3, 7, "auto"]),
        run_ahead=seed % 4,
        max_batch=rng.choice([2, 4]),
        max_grammars=rng.choice([1, 2, 8]),
        drafter=rng.choice(["auto", "lookup"]),
        **stored,
    )
    cold = engine(
        folder, speculate=0, run_ahead=0, max_batch=1, prefill_batch=1, prefix_cache=False, **stored
    )
    for _ in range(2):
        schedule = Mixed(llm, rng)
        schedule.run()
        schedule.check(cold)
