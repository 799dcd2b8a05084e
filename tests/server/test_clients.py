# SPDX-License-Identifier: Apache-2.0
"""The clients that people have: OpenAI's and Anthropic's own."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from freewheel import LLM, SamplingParams
from freewheel.chat import Ask, Message, open_chat
from freewheel.config import find_model
from tests.server.running import Running

QUESTION = "What is the capital of France?"
GREEDY: Any = {"temperature": 0}
ASKED: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def claude(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def answer(llm: LLM) -> str:
    """What the engine itself says to the question, in 24 tokens at most."""
    return _answer(llm, thinking=False)


def _answer(llm: LLM, thinking: bool) -> str:
    chat = open_chat(find_model("demo"), llm.spec.family, llm.tokenizer)
    ids = chat.prompt([Message("user", QUESTION)], Ask(thinking=thinking)).ids
    return llm.generate(ids, SamplingParams(temperature=0, max_tokens=24))[0].text


def test_a_completion_equals_the_engines(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24, stop=(" the",))
    expected = llm.generate("Emma was", params)[0]
    found = client.completions.create(
        model="demo", prompt="Emma was", temperature=0.8, seed=5, max_tokens=24, stop=[" the"]
    )
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == expected.finish_reason
    assert found.usage is not None
    assert found.usage.completion_tokens == len(expected.token_ids)
    assert found.usage.prompt_tokens == expected.metrics.prompt_tokens


def test_a_streamed_completion_joins_to_the_whole_one(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": "Emma was", "temperature": 0, "max_tokens": 30}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1


def test_several_prompts_with_several_choices_keep_their_order(
    client: openai.OpenAI, llm: LLM
) -> None:
    found = client.completions.create(
        model="demo",
        prompt=["Emma was", "In the beginning"],
        n=2,
        temperature=1.0,
        seed=11,
        max_tokens=8,
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    expected = [
        llm.generate(prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=8))[0].text
        for prompt in ("Emma was", "In the beginning")
        for seed in (11, 12)
    ]
    assert [choice.text for choice in found.choices] == expected
    assert found.usage is not None and found.usage.completion_tokens == 32


def test_token_ids_are_a_prompt_and_come_back(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode_prompt("Emma was")
    expected = llm.generate(ids, SamplingParams(temperature=0, max_tokens=6))[0]
    found = client.completions.create(
        model="demo",
        prompt=ids,
        temperature=0,
        max_tokens=6,
        extra_body={"return_token_ids": True},
    )
    choice = found.choices[0].model_dump()
    assert tuple(choice["token_ids"]) == expected.token_ids
    assert choice["prompt_token_ids"] == ids


def test_echo_puts_the_prompt_first(client: openai.OpenAI) -> None:
    alone = client.completions.create(model="demo", prompt="Emma was", echo=True, max_tokens=0)
    assert alone.choices[0].text == "Emma was"
    assert alone.usage is not None and alone.usage.completion_tokens == 0
    asked: Any = {"model": "demo", "prompt": "Emma was", "temperature": 0, "max_tokens": 4}
    plain = client.completions.create(**asked).choices[0].text
    chunks = client.completions.create(**asked, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Emma was" + plain


def test_a_chat_answers_as_the_engine_does(client: openai.OpenAI, answer: str) -> None:
    found = client.chat.completions.create(
        model="demo", messages=ASKED, temperature=0, max_completion_tokens=24
    )
    message = found.choices[0].message
    assert message.content == answer
    assert message.role == "assistant"
    again: Any = [*ASKED, message.model_dump(), {"role": "user", "content": "And of Spain?"}]
    more = client.chat.completions.create(model="demo", messages=again, max_tokens=4)
    assert more.choices[0].finish_reason in ("stop", "length")


def test_a_streamed_chat_ends_with_its_usage(client: openai.OpenAI, answer: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=ASKED,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *deltas, last = chunks
    assert deltas[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == answer
    assert last.choices == [] and last.usage is not None
    assert all(chunk.usage is None for chunk in deltas)
    details = last.usage.completion_tokens_details
    assert details is not None and details.accepted_prediction_tokens is not None
    assert 0 < details.accepted_prediction_tokens < last.usage.completion_tokens


def test_thoughts_have_a_field_of_their_own(client: openai.OpenAI, llm: LLM) -> None:
    asked: Any = {
        "model": "demo",
        "messages": ASKED,
        "temperature": 0,
        "max_tokens": 24,
        "extra_body": {"chat_template_kwargs": {"thinking": True}},
    }
    message = client.chat.completions.create(**asked).choices[0].message
    thoughts = message.model_dump().get("reasoning_content", "")
    streamed = [c.choices[0].delta for c in client.chat.completions.create(**asked, stream=True)]
    assert "".join(d.model_dump().get("reasoning_content") or "" for d in streamed) == thoughts
    assert "".join(d.content or "" for d in streamed) == message.content
    marked = _answer(llm, thinking=True)
    assert thoughts and marked.startswith(thoughts)
    assert marked.removeprefix(thoughts).removeprefix("</think>") == message.content


def test_responses_answer_without_a_memory(client: openai.OpenAI, answer: str) -> None:
    found = client.responses.create(
        model="demo", input=QUESTION, temperature=0, max_output_tokens=24, store=False
    )
    assert found.output_text == answer
    assert found.status in ("completed", "incomplete")
    with client.responses.stream(
        model="demo", input=ASKED, temperature=0, max_output_tokens=24
    ) as stream:
        deltas = [one.delta for one in stream if one.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == answer == final.output_text
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="demo", input="x", previous_response_id="resp_1")


def test_anthropics_messages_answer_alike(claude: anthropic.Anthropic, answer: str) -> None:
    asked: Any = {"model": "demo", "max_tokens": 24, "messages": ASKED, "extra_body": GREEDY}
    found = claude.messages.create(**asked)
    assert found.content[0].text == answer
    assert found.stop_reason in ("end_turn", "max_tokens")
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == answer
        final = stream.get_final_message()
    assert final.usage.output_tokens == found.usage.output_tokens
    assert final.stop_reason == found.stop_reason
    counted = claude.messages.count_tokens(model="demo", messages=ASKED)
    cached = found.usage.cache_read_input_tokens
    assert cached is not None and counted.input_tokens == found.usage.input_tokens + cached


def test_anthropics_stop_sequence_is_named(claude: anthropic.Anthropic, answer: str) -> None:
    stop = answer.split()[1]
    found = claude.messages.create(
        model="demo", max_tokens=24, messages=ASKED, stop_sequences=[stop], extra_body=GREEDY
    )
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    (block,) = found.content
    assert block.type == "text" and block.text == answer.partition(stop)[0]


def test_anthropics_errors_are_its_own(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="model"):
        claude.messages.create(model="other", max_tokens=4, messages=ASKED)
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        claude.messages.create(
            model="demo",
            max_tokens=4,
            messages=ASKED,
            tools=[{"name": "f x", "input_schema": {"type": "object"}}],
        )


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"extra_body": {"logits_processors": ["x"]}}, "logits_processors"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "chat_template_kwargs"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    client: openai.OpenAI, extra: dict, field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="demo", messages=ASKED, **extra)
    assert (refused.value.param or "").split(".")[0] == field
    assert field in refused.value.message


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "demo" == client.models.retrieve("demo").id
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="x")


def test_what_the_server_cannot_do_is_501(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.embeddings.create(model="demo", input="x")
    assert refused.value.status_code == 501


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_is_refused_before_a_stream_begins(
    client: openai.OpenAI, server: Running, stream: bool
) -> None:
    context = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="demo", prompt=[5] * context, max_tokens=1, stream=stream)
    assert refused.value.code == "context_length_exceeded"
    assert str(context) in refused.value.message
    fits = client.completions.create(model="demo", prompt=[5] * 8, max_tokens=1)
    assert fits.usage is not None and fits.usage.completion_tokens == 1


def test_text_goes_to_tokens_and_back(server: Running, llm: LLM) -> None:
    found = server.post("/tokenize", prompt="Emma was clever").json()
    assert found["tokens"] == llm.tokenizer.encode_prompt("Emma was clever")
    assert found["count"] == len(found["tokens"])
    plain = server.post("/tokenize", prompt="<｜User｜>", add_special_tokens=False).json()
    assert len(plain["tokens"]) > 1, "a control token that a user spells is only text"
    back = server.post("/detokenize", tokens=plain["tokens"]).json()
    assert back["prompt"] == "<｜User｜>"
