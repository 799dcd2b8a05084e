# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities over HTTP: the engine's own numbers, in OpenAI's shapes."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from freewheel import LLM, Output, SamplingParams
from freewheel.server.scores import Offsets, Spelling
from tests.server.running import Running

PROMPT = "Emma was"
ASKED: Any = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> Output:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=3)
    return llm.generate(PROMPT, params)[0]


def names(llm: LLM, ids: Any) -> list[str]:
    return [llm.tokenizer.decode([token], skip_special_tokens=False) for token in ids]


def test_a_completions_log_probabilities_are_the_engines(
    client: openai.OpenAI, llm: LLM, expected: Output
) -> None:
    choice = client.completions.create(**ASKED, logprobs=3).choices[0]
    found = choice.logprobs
    assert found is not None and expected.logprobs is not None
    assert found.tokens == names(llm, expected.token_ids)
    assert found.token_logprobs == [one.logprob for one in expected.logprobs]
    assert found.top_logprobs is not None and found.text_offset is not None
    for top, one in zip(found.top_logprobs, expected.logprobs, strict=True):
        assert list(top.values())[:3] == [value for _, value in one.top]
        assert names(llm, [one.token_id])[0] in top
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert choice.text.startswith(token, offset)


def test_echo_gives_the_prompts_log_probabilities_too(
    client: openai.OpenAI, llm: LLM, expected: Output
) -> None:
    whole = client.completions.create(**ASKED, logprobs=3, echo=True).choices[0]
    alone = client.completions.create(**ASKED | {"max_tokens": 0}, logprobs=3, echo=True)
    assert alone.usage is not None and alone.usage.completion_tokens == 0
    ids = llm.tokenizer.encode_prompt(PROMPT)
    prompt = expected.prompt_logprobs
    assert prompt is not None and prompt[0] is None
    for choice, behind in ((whole, 12), (alone.choices[0], 0)):
        found = choice.logprobs
        assert found is not None and found.token_logprobs is not None
        assert found.tokens is not None and found.text_offset is not None
        assert len(found.tokens) == len(ids) + behind
        assert found.tokens[: len(ids)] == names(llm, ids)
        scores = [None if one is None else one.logprob for one in prompt]
        assert found.token_logprobs[: len(ids)] == scores
        for token, offset in list(zip(found.tokens, found.text_offset, strict=True))[1:]:
            assert choice.text.startswith(token, offset)
    assert alone.choices[0].text == PROMPT


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_log_probabilities_join_to_the_whole_ones(
    client: openai.OpenAI, echo: bool
) -> None:
    whole = client.completions.create(**ASKED, logprobs=2, echo=echo).choices[0].logprobs
    assert whole is not None
    joined: dict[str, list[Any]] = {key: [] for key in whole.model_dump()}
    for chunk in client.completions.create(**ASKED, logprobs=2, echo=echo, stream=True):
        part = chunk.choices[0].logprobs
        assert part is not None
        for key, values in part.model_dump().items():
            joined[key] += values
    assert joined == whole.model_dump()


def test_a_chats_log_probabilities_spell_its_text(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
    }
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    said = [one for one in content if not one.token.startswith("<")]
    text = b"".join(bytes(one.bytes or []) for one in said).decode()
    assert text == choice.message.content
    for one in content:
        assert len(one.top_logprobs) == 2
        assert one.top_logprobs[0].logprob >= one.logprob >= -9999.0
        assert one.logprob == pytest.approx(one.top_logprobs[0].logprob)  # greedy
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        part = chunk.choices[0].logprobs
        streamed += [] if part is None or part.content is None else part.content
    assert streamed == content
    without = client.chat.completions.create(**asked | {"logprobs": False, "top_logprobs": None})
    assert without.choices[0].logprobs is None


def test_prompt_log_probabilities_have_vllms_shape(server: Running, expected: Output) -> None:
    found = server.post("/v1/completions", **ASKED, prompt_logprobs=1).json()["choices"][0]
    assert found["logprobs"] is None
    assert expected.prompt_logprobs is not None
    first, *rest = found["prompt_logprobs"]
    assert first is None
    for entry, one in zip(rest, expected.prompt_logprobs[1:], strict=True):
        assert one is not None
        assert entry[str(one.token_id)]["logprob"] == one.logprob
        assert entry[str(one.top[0][0])]["rank"] == 1


def test_a_stop_string_cuts_log_probabilities_with_its_tokens(client: openai.OpenAI) -> None:
    plain = client.completions.create(**ASKED).choices[0].text
    stop = plain.split()[2]
    found = client.completions.create(**ASKED, logprobs=1, stop=[stop])
    scores = found.choices[0].logprobs
    assert found.usage is not None and scores is not None and scores.tokens is not None
    assert len(scores.tokens) == found.usage.completion_tokens < 12


def test_parts_of_a_character_begin_where_it_begins(llm: LLM) -> None:
    spelling = Spelling(llm.tokenizer, llm.spec.vocab_size)
    ids = llm.tokenizer.encode_text("a\U0001f600b")
    assert len(ids) >= 4, "the smiley takes several tokens"
    offsets = Offsets(spelling, 0, names=False)
    assert [offsets.next(token) for token in ids] == [0, *[1] * (len(ids) - 2), 2]
    assert spelling.name(ids[1]).startswith("bytes:\\x")
    assert b"".join(map(spelling.whole, ids)).decode() == "a\U0001f600b"
