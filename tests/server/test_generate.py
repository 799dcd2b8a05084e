# SPDX-License-Identifier: Apache-2.0
"""SGLang's own endpoint: its fields, its figures, and tokens of the engine's own."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from tests.server.running import Running

PROMPT = "Emma was"
SHORT: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12}


def ask(server: Running, **body: Any) -> Any:
    found = server.post("/generate", **body)
    assert found.status_code == 200, found.text
    return found.json()


def events(server: Running, **body: Any) -> list[Any]:
    with server.http.stream("POST", "/generate", json=body | {"stream": True}) as found:
        assert found.status_code == 200
        lines = [line.removeprefix("data: ") for line in found.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_an_answer_has_sglangs_fields(server: Running, llm: LLM) -> None:
    (wanted,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))
    found = ask(server, text=PROMPT, sampling_params=SHORT, rid="mine")
    assert set(found) == {"text", "output_ids", "meta_info"}
    assert (found["text"], found["output_ids"]) == (wanted.text, list(wanted.token_ids))
    about = found["meta_info"]
    assert about["id"] == "mine" and about["finish_reason"] == {"type": "length", "length": 12}
    assert about["prompt_tokens"] == len(llm.tokenizer.encode_prompt(PROMPT))
    assert about["completion_tokens"] == 12 and about["e2e_latency"] > 0
    assert sum(about["cached_tokens_details"].values()) == about["cached_tokens"]
    assert about["spec_accept_length"] == 12 / about["spec_verify_ct"]
    assert about["spec_num_correct_drafts"] <= about["spec_num_proposed_drafts"]


def test_ids_are_taken_and_given_back(server: Running, llm: LLM) -> None:
    ids = llm.tokenizer.encode_prompt(PROMPT)
    by_text = ask(server, text=PROMPT, sampling_params=SHORT)
    found = ask(server, input_ids=ids, sampling_params=SHORT, return_prompt_token_ids=True)
    assert found["output_ids"] == by_text["output_ids"] and found["prompt_token_ids"] == ids


@pytest.mark.parametrize("stop", [{"stop": " "}, {"stop_token_ids": None}])
def test_what_ended_an_answer_is_named(server: Running, llm: LLM, stop: Any) -> None:
    free = ask(server, text=PROMPT, sampling_params=SHORT)["output_ids"]
    asked = stop if stop.get("stop") else {"stop_token_ids": [free[3]]}
    found = ask(server, text=PROMPT, sampling_params=SHORT | asked)
    reason = found["meta_info"]["finish_reason"]
    assert reason["type"] == "stop"
    if stop.get("stop"):
        assert reason["matched"] == " " and " " not in found["text"]
        kept = ask(server, text=PROMPT, sampling_params=SHORT | asked | {"no_stop_trim": True})
        assert kept["text"] == found["text"] + " "
    else:
        assert reason["matched"] == free[3] == found["output_ids"][-1]


def test_a_stream_repeats_all_of_the_answer_so_far(server: Running) -> None:
    whole = ask(server, text=PROMPT, sampling_params=SHORT)
    parts = events(server, text=PROMPT, sampling_params=SHORT, return_logprob=True)
    assert parts[-1]["text"] == whole["text"] and "index" not in parts[-1]
    for before, after in pairwise(parts):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    for one in parts:
        about = one["meta_info"]
        scored = [token for _, token, _ in about["output_token_logprobs"]]
        assert scored == one["output_ids"] and len(scored) == about["completion_tokens"]
    assert parts[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


def test_log_probabilities_are_the_engines_own(server: Running, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    (wanted,) = llm.generate(PROMPT, params)
    ids = llm.tokenizer.encode_prompt(PROMPT)
    asked = {"text": PROMPT, "sampling_params": SHORT | {"max_new_tokens": 4}}
    asked |= {"return_logprob": True, "top_logprobs_num": 2}
    about = ask(server, **asked, logprob_start_len=0, return_text_in_logprobs=True)["meta_info"]
    assert about["output_token_logprobs_length"] == 4
    scores: Any = wanted.logprobs
    for (value, token, text), one in zip(about["output_token_logprobs"], scores, strict=True):
        assert (token, text) == (one.token_id, llm.tokenizer.decode([token], False))
        assert value == pytest.approx(one.logprob)
    tops = [[token for _, token, _ in one] for one in about["output_top_logprobs"]]
    assert tops == [[token for token, _ in one.top] for one in scores]
    first, *rest = about["input_token_logprobs"]
    assert first[:2] == [None, ids[0]] and [token for _, token, _ in rest] == ids[1:]
    assert about["input_top_logprobs"][0] is None
    later = ask(server, **asked, logprob_start_len=1)["meta_info"]
    assert later["input_token_logprobs"][0] == [None, ids[1], None]
    assert len(later["input_token_logprobs"]) == len(ids) - 1
    alone = ask(server, **asked)["meta_info"]
    assert alone["input_token_logprobs"] == [] and alone["output_token_logprobs"][0][2] is None


def test_a_prompt_alone_is_scored(server: Running, llm: LLM) -> None:
    found = ask(
        server, text=PROMPT, sampling_params={"max_new_tokens": 0}, return_logprob=True,
        logprob_start_len=0,
    )  # fmt: skip
    assert (found["text"], found["output_ids"]) == ("", [])
    about = found["meta_info"]
    assert about["finish_reason"] == {"type": "length", "length": 0}
    assert len(about["input_token_logprobs"]) == about["prompt_tokens"]
    assert about["output_token_logprobs"] == [] and about["completion_tokens"] == 0


def test_several_prompts_are_answered_each_as_it_asks(server: Running) -> None:
    one = ask(server, text="Emma was", sampling_params=SHORT)
    other = ask(server, text="The sea", sampling_params=SHORT | {"max_new_tokens": 5})
    body = {
        "text": ["Emma was", "The sea"],
        "sampling_params": [SHORT, SHORT | {"max_new_tokens": 5}],
        "return_logprob": [True, False], "rid": ["a", "b"],
    }  # fmt: skip
    found = ask(server, **body)
    assert [each["text"] for each in found] == [one["text"], other["text"]]
    assert [each["meta_info"]["id"] for each in found] == ["a", "b"]
    assert ["output_token_logprobs" in each["meta_info"] for each in found] == [True, False]
    last = {part["index"]: part["text"] for part in events(server, **body)}
    assert last == {0: one["text"], 1: other["text"]}
    assert ask(server, text=["Emma was"], sampling_params=SHORT)[0]["text"] == one["text"]
    numbered = ask(server, text=["a", "b"], sampling_params={"max_new_tokens": 1}, rid="x")
    assert [each["meta_info"]["id"] for each in numbered] == ["x_0", "x_1"]


def test_n_answers_come_as_a_list_and_differ(server: Running) -> None:
    sampling = {"temperature": 1, "max_new_tokens": 12, "n": 3, "sampling_seed": 5}
    found = ask(server, text=PROMPT, sampling_params=sampling)
    assert len({one["text"] for one in found}) == 3
    assert len({one["meta_info"]["id"] for one in found}) == 3


@pytest.mark.parametrize(
    ("form", "good"),
    [
        ({"regex": "(yes|no)"}, lambda text: text in ("yes", "no")),
        ({"json_schema": '{"enum": [1, 2]}'}, lambda text: json.loads(text) in (1, 2)),
        ({"ebnf": 'root ::= "a" | "b"'}, lambda text: text in "ab"),
    ],
    ids=lambda one: next(iter(one), "") if isinstance(one, dict) else "",
)
def test_forms_are_kept(server: Running, form: dict[str, str], good: Any) -> None:
    found = ask(server, text=PROMPT, sampling_params={"max_new_tokens": 60} | form)
    assert good(found["text"]) and found["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "text: give either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "text: give either"),
        ({"input_ids": [1024]}, "input_ids: token id 1024"),
        ({"text": "a", "temperature": 0}, "temperature: is not .*use sampling_params.temperature"),
        ({"text": "a", "prompt": "b"}, "prompt: is not a field"),
        ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob: must be null"),
        ({"text": "a", "image_data": "x"}, "image_data: must be null"),
        ({"text": "a", "custom_logit_processor": "x"}, "custom_logit_processor: must be null"),
        ({"text": "a", "sampling_params": {"max_tokens": 4}},
         "sampling_params.max_tokens: .*use max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 9000}},
         "sampling_params.max_new_tokens: 9000 asked for"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 8}},
         r"sampling_params.min_new_tokens: exceeds max_new_tokens \(8\)"),
        ({"text": "a", "sampling_params": {"regex": "(?=a)b"}}, "sampling_params.regex: "),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}},
         "sampling_params.ebnf: cannot be kept together with regex"),
        ({"text": "a", "sampling_params": {"structural_tag": "{"}},
         "sampling_params.structural_tag: must be JSON"),
        ({"text": "a", "sampling_params": {"structural_tag": '{"type": "text"}'}},
         "sampling_params.structural_tag: must be JSON"),
        ({"text": "a", "sampling_params": {"structural_tag": "[" * 100_000}},
         "sampling_params.structural_tag: must be JSON"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params: has 1 for 2 prompts"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params: n must"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"stop_token_ids": [4000]}]},
         "sampling_params.1.stop_token_ids: token id 4000 is outside"),
        ({"text": "a", "sampling_params": {"logit_bias": {"5": 1, "4000": 1}}},
         "sampling_params.logit_bias: token id 4000 is outside"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid: names two prompts alike"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num: needs return_logprob"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 50}, "logprob_start_len: 50"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "bootstrap_room": 5}, "bootstrap_room: this engine has no role"),
    ],
    ids=lambda one: str(one)[:99],
)  # fmt: skip
def test_what_is_refused_is_named_in_sglangs_words(
    server: Running, body: dict[str, Any], said: str
) -> None:
    found = server.post("/generate", **body)
    assert found.status_code == 400, found.text
    assert re.match(said, found.json()["error"]["message"]), found.text
