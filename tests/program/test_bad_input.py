# SPDX-License-Identifier: Apache-2.0
"""Whatever a caller hands in, the answer is an answer or an error that names the field."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freewheel import LLM, SamplingParams
from freewheel.config import EngineConfig
from freewheel.engine import Survey, plan_gpus, survey
from freewheel.engine.conversation import conversations, messages_of
from freewheel.errors import CheckpointError, ConfigError, RequestError
from tests.program.whitebox import GREEDY, answers, engine


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> LLM:
    return engine(folders["t32"])


NO_PROMPTS: dict[str, Any] = {
    "none": None,
    "bool": True,
    "int": 5,
    "float": 1.5,
    "bytes": b"ab",
    "dict": {1: 2},
    "set": {1, 2},
    "generator": (text for text in ["a"]),
    "array": np.array([1, 2]),
    "tensor": torch.tensor([1, 2]),
    "numpy ids": [np.int64(3)],
    "floats": [1.0, 2.0],
    "bools": [True],
    "nothing": [None],
    "negative": [-1],
    "outside": [264],
    "huge": [2**70],
    "too long": [1] * 1000,
    "too long a text": "a" * 1000,
    "no text": "",
    "no unicode": "a\ud800",
}
NO_LISTS: dict[str, Any] = {
    "id, then text": [1, "a"],
    "text, then id": ["a", 1],
    "ids within ids": [[1, [2]]],
    "lists too deep": [[[1, 2]]],
    "array among texts": ["a", np.array([1])],
    "raw bytes": [b"ab"],
    "no ids": [[]],
    "no text": ["a", ""],
}


@pytest.mark.parametrize("kind", NO_PROMPTS)
def test_what_is_no_prompt_is_refused(llm: LLM, kind: str) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(NO_PROMPTS[kind], GREEDY)
    with pytest.raises(RequestError, match="prompt"):
        llm.stream(NO_PROMPTS[kind], GREEDY)


@pytest.mark.parametrize("kind", NO_LISTS)
def test_no_prompt_of_a_list_is_passed_over(llm: LLM, kind: str) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(NO_LISTS[kind], GREEDY)


def test_a_list_of_prompts_where_one_is_taken_is_told_from_a_bad_one(llm: LLM) -> None:
    for many in (["x", "y"], [[1], [2]], ("x", [1])):
        for one in (llm.stream, llm.selection):
            with pytest.raises(RequestError, match=r"prompt: one is taken.* generate takes many"):
                one(many)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="must hold token ids, got 'y'"):
        llm.stream([1, "y"])  # type: ignore[arg-type]


def test_a_conversation_of_no_turns_is_called_empty() -> None:
    for nothing in ([], (), [[]]):
        with pytest.raises(RequestError, match=r"messages: .*is empty; give at least"):
            conversations_of(nothing)
    for no_list in ("hello", 7, {"role": "user"}):
        with pytest.raises(RequestError, match="messages: must be a list of turns"):
            conversations_of(no_list)


def conversations_of(given: Any) -> list[Any]:
    return [messages_of(turns) for turns in conversations(given)]


def test_every_sequence_of_prompts_or_ids_is_one(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    ids = answers(llm, [[1, 2, 3]])
    for same in ([1, 2, 3], (1, 2, 3), range(1, 4), [(1, 2, 3)], (range(1, 4),)):
        assert answers(llm, same) == ids  # type: ignore[arg-type]
    assert len(llm.generate(("a", [1], (2,)), GREEDY)) == 3


def test_prompts_as_vllm_writes_them_are_taken(llm: LLM) -> None:
    texts, ids = answers(llm, ["abc"]), answers(llm, [[1, 2, 3]])  # type: ignore[list-item]
    for same in ({"prompt": "abc"}, [{"prompt": "abc", "multi_modal_data": None}]):
        assert answers(llm, same) == texts  # type: ignore[arg-type]
    given = {"prompt_token_ids": [1, 2, 3], "cache_salt": "mine"}
    assert answers(llm, [given]) == ids  # type: ignore[list-item]
    assert answers(llm, [given, "abc", [1, 2, 3]]) == [*ids, *texts, *ids]  # type: ignore[list-item]
    assert [chunk.token_ids for chunk in llm.stream(given, GREEDY)]
    llm.check_room({"prompt": "abc"}, GREEDY)


def test_a_prompts_own_salt_is_heeded(llm: LLM) -> None:
    ids = [7] * 40
    llm.generate({"prompt_token_ids": ids, "cache_salt": "one"}, GREEDY)
    for salt, found in (("one", True), ("other", False)):
        (output,) = llm.generate([{"prompt_token_ids": ids, "cache_salt": salt}], GREEDY)
        assert (output.metrics.cached_tokens > 0) == found
    (output,) = llm.generate([{"prompt_token_ids": ids}], GREEDY, cache_salt="one")
    assert output.metrics.cached_tokens > 0


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data: .*text alone"),
        ({"prompt_embeds": 1}, "prompt_embeds: .*text or token ids"),
        ({"encoder_prompt": "a", "decoder_prompt": "b"}, "encoder_prompt: .*no encoder"),
        ({"text": "a"}, "text: is no part of a prompt; use prompt"),
        ({"input_ids": [1]}, "input_ids: .*use prompt_token_ids"),
        ({"promt": "a"}, "promt: .*use prompt"),
        ({"xyz": "a"}, "xyz: .*one of prompt and prompt_token_ids"),
        ({1: 2}, "1: is no part of a prompt"),
        ({}, "prompt: is missing"),
        ({"prompt": None}, "prompt: is missing"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids: stands beside prompt"),
        ({"prompt": [1]}, "prompt: must be text in a mapping, got list"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids: must be a list of ids, got str"),
        ({"prompt_token_ids": [-1]}, "prompt: token id -1"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt: must be text"),
    ],
    ids=str,
)
def test_what_a_prompt_cannot_hold_is_named(llm: LLM, prompt: Any, answer: str) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match=f"^{answer}"):
            call(prompt, GREEDY)
    with pytest.raises(RequestError, match=f"^{answer}"):
        llm.generate(["a", prompt], GREEDY)


def test_two_salts_for_one_prompt_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="cache_salt: the prompt has one, and the call another"):
        llm.generate({"prompt": "a", "cache_salt": "x"}, GREEDY, cache_salt="y")


@pytest.mark.parametrize(
    "params", [{}, [], [None], [GREEDY, GREEDY], SamplingParams, "x", 0, False], ids=range(8)
)
def test_what_are_no_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="params"):
        llm.generate("a", params)
    with pytest.raises(RequestError, match="params"):
        llm.stream("a", params)


BAD_FIELDS: dict[str, list[Any]] = {
    "temperature": [10**400, float("nan"), float("inf"), -1, 1e-4, 101, "1", None, True, [1]],
    "top_p": [0, -0.1, 1.1, float("nan"), "1", None],
    "min_p": [-0.1, 1.1, float("nan"), None],
    "top_k": [-2, 1.0, 2**31, True, None, np.int64(1)],
    "seed": [2**63, -(2**63) - 1, 1.0, "a", True],
    "max_tokens": [0, -1, 4.0, 2**31, "4", True],
    "min_tokens": [-1, 300, None, 1.0],
    "stop": [None, "", 5, ("a", 1), ("",), {"a"}, (s for s in "a"), ("\ud800",), b"a", (b"a",)],
    "stop_token_ids": [None, 3, "abc", (-1,), (1.0,), (True,), {1}, (np.int64(1),), (1,) * 9],
    "ignore_eos": ["no", None, 0],
    "skip_special_tokens": ["yes", None, 1],
    "include_stop_str_in_output": ["x", None, 1],
}


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_sampling_params_of_a_wrong_kind_or_size_are_named(field: str) -> None:
    for value in BAD_FIELDS[field]:
        with pytest.raises(RequestError, match=f"^{field}: ") as raised:
            SamplingParams(**{field: value})
        assert raised.value.field == field


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"prompts": "a", "sampling_params": GREEDY}, "sampling_params: .*generate; use params"),
        ({"prompt": "a"}, "prompt: .*use prompts"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids: .*use prompts"),
        ({"prompts": "a", "use_tqdm": False}, "use_tqdm: .*no bar"),
        ({"prompt": "a", "use_tqdm": 1}, r"^prompt: .*use prompts\nuse_tqdm: .*no bar"),
        ({"prompts": "a", "max_tokens": 3}, r"use params=SamplingParams\(max_tokens="),
    ],
)
def test_an_argument_by_another_engines_name_is_told_ours(
    llm: LLM, given: dict[str, Any], answer: str
) -> None:
    with pytest.raises(RequestError, match=answer):
        llm.generate(**given)
    with pytest.raises(
        RequestError, match=r"sampling_params: is no argument of stream; use params"
    ):
        llm.stream("a", sampling_params=GREEDY)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("regex", "answer"),
    [
        ("(", "position 0"),
        ("ab[", "position 2"),
        ("a{2,1}", "min repeat greater"),
        ("*a", "nothing"),
    ],
)
def test_what_is_wrong_with_an_expression_is_said_and_where(
    llm: LLM, regex: str, answer: str
) -> None:
    with pytest.raises(RequestError, match=f"^regex: is no regular expression: .*{answer}"):
        llm.generate("a", SamplingParams(regex=regex))


def test_the_fields_own_ways_to_say_off_and_one_stop_are_taken() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(stop="end") == SamplingParams(stop=("end",))
    assert replace(SamplingParams(stop="end"), seed=1).stop == ("end",)


def test_lists_of_stops_are_taken_as_they_were() -> None:
    stops = ["a", "b"]
    params = SamplingParams(stop=stops, stop_token_ids=[1, 2])  # type: ignore[arg-type]
    stops.append("c")
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))
    assert hash(params) == hash(SamplingParams(stop=("a", "b"), stop_token_ids=(1, 2)))


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 0.001},
        {"temperature": 100},
        {"top_k": 2**31 - 1},
        {"top_k": 1},
        {"top_p": 1e-300},
        {"min_p": 1.0},
        {"min_p": 1e-300},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"max_tokens": None},
        {"max_tokens": 2**31 - 1},
        {"min_tokens": 2**31 - 1, "max_tokens": None},
        {"stop": tuple(f"s{n}" for n in range(100))},
        {"stop_token_ids": tuple(range(8)), "ignore_eos": True},
    ],
    ids=lambda extreme: next(iter(extreme)),
)
def test_extremes_are_allowed_and_answer_alike_alone_and_in_company(
    llm: LLM, extreme: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {"seed": 5, "max_tokens": 12} | extreme
    params = SamplingParams(**fields)
    alone = answers(llm, [[1, 2, 3]], params)
    assert answers(llm, [[9] * 20, [1, 2, 3], [4]], [GREEDY, params, params])[1:2] == alone
    assert 1 <= len(alone[0]) <= 125


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", None),
        ("model", 3),
        ("guard", "yes"),
        ("chunk", np.int64(16)),
        ("dtype", torch.float32),
        ("context_len", 0),
        ("context_len", 129),
        ("cache_bytes", 1),
        ("prefill_batch", 9),
        ("page_size", 1.0),
    ],
)
def test_options_of_a_wrong_kind_or_size_are_named_before_weights_are_read(
    folders: dict[str, Path], option: str, value: Any
) -> None:
    def progress(done: int, total: int) -> None:
        raise AssertionError("weights are being read")

    with pytest.raises(ConfigError, match=f"^{option}: "):
        LLM(**({"model": str(folders["t32"]), "progress": progress} | {option: value}))


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b", "~nobody-of-this-name/x", "/dev/null"])
def test_a_model_that_is_no_folder_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a shipped model"):
        LLM(name)


def test_a_budget_of_whole_pages_gives_exactly_these_pages(folders: dict[str, Path]) -> None:
    def planned(**options: Any) -> Survey:
        model = str(folders["perm"])
        return survey(EngineConfig(model=model, context_len=16, page_size=4, **options))

    page_bytes = planned().groups[0].page_bytes
    for pages in range(4, 40):
        found = planned(max_batch=10, cache_bytes=pages * page_bytes)
        assert found.sizes.pages == (1 + pages,)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("specualte", "use speculate"),
        ("tensor_parallel_size", "use tp"),
        ("max_model_len", "use context_len"),
        ("mem_fraction_static", "use cache_bytes"),
        ("disable_radix_cache", "use prefix_cache"),
        ("trust_remote_code", "no code of a checkpoint"),
        ("nothing_like_it", "docs/api.md"),
    ],
)
def test_an_option_that_does_not_exist_is_named_with_what_is_meant(name: str, answer: str) -> None:
    options: dict[str, Any] = {name: 3}
    with pytest.raises(ConfigError, match=f"^{name}: is no option; .*{answer}"):
        LLM("demo", **options)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("n", r"give the prompt so many times"),
        ("best_of", "answers are not ranked"),
        ("guided_json", "use json_schema"),
        ("structured_outputs", "fields of their own"),
        ("max_new_tokens", "use max_tokens"),
        ("temprature", "use temperature"),
        ("nothing_like_it", "docs/api.md"),
    ],
)
def test_a_wish_that_does_not_exist_is_named_with_what_is_meant(name: str, answer: str) -> None:
    wish: dict[str, Any] = {name: 2}
    with pytest.raises(RequestError, match=f"^{name}: is no field of SamplingParams; .*{answer}"):
        SamplingParams(**wish)
    with pytest.raises(RequestError, match="by name"):
        SamplingParams(0.7)  # type: ignore[call-arg]
    assert copy(SamplingParams(seed=3)) == replace(SamplingParams(), seed=3)


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ("Hello", "list"),
        ([], "list"),
        ([{"role": "user"}], "turn 0 needs"),
        ([{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}], "turn 1 has role"),
        ([{"role": "user", "content": ["a"]}], "text"),
        ([{"role": "user", "content": "a", "name": "b"}], "'name'"),
        ([[{"role": "user", "content": "a"}], "b"], "list"),
    ],
)
def test_a_conversation_of_another_form_is_refused(messages: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word) as refused:
        for turns in conversations(messages):
            messages_of(turns)
    assert refused.value.field == "messages"


@pytest.mark.parametrize("stop", ["", [""], [3], ("a", "")])
def test_stop_strings_of_another_form_are_refused_in_plain_words(stop: Any) -> None:
    with pytest.raises(RequestError, match=r"^stop: must be a list of non-empty strings"):
        SamplingParams(stop=stop)


def test_a_plan_for_no_card_names_the_cards() -> None:
    with pytest.raises(ConfigError, match=r"^gpus: must be at least 1, got 0"):
        plan_gpus("demo", 0, batches=[1], context=64, speculate=0)


def test_more_tokens_than_the_context_has_room_for_can_be_refused(llm: LLM) -> None:
    """In the server's words. A default is no wish."""
    prompt = [7] * (llm.context_len - 28)
    with pytest.raises(RequestError, match=r"29 asked for.* has room for 28") as refused:
        llm.check_room(prompt, SamplingParams(max_tokens=29))
    assert refused.value.field == "max_tokens"
    for most in (28, None, SamplingParams().max_tokens):
        llm.check_room(prompt, SamplingParams(max_tokens=most))
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, ignore_eos=True))
    assert len(output.token_ids) == 28 and output.finish_reason == "length"
