# SPDX-License-Identifier: Apache-2.0
"""Fields beyond the temperature: what the engine does with them, it does over HTTP."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import openai
import pytest

from freewheel import LLM, SamplingParams
from freewheel.server.wire import Submit, decode_order, encode
from tests.server.running import Running

PROMPT = "Emma was"
LONG = "It was a truth universally known that nobody in the village had seen her. " * 12
WISHES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"bad_words": ["very", "much"]},
    {"allowed_token_ids": list(range(300, 400))},
]


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("wish", WISHES)
def test_a_wish_over_http_is_the_engines(server: Running, llm: LLM, wish: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=24, **wish)
    expected = llm.generate(PROMPT, params)[0].text
    body = {"prompt": PROMPT, "temperature": 0.7, "seed": 4, "max_tokens": 24}
    found = server.post("/v1/completions", **body, **wish).json()["choices"][0]["text"]
    assert found == expected != server.post("/v1/completions", **body).json()["choices"][0]["text"]


def test_a_biased_token_is_all_that_is_said(client: openai.OpenAI, llm: LLM) -> None:
    (token,) = llm.tokenizer.encode_text("e")
    found = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": PROMPT}],
        logit_bias={str(token): 100},
        max_tokens=5,
    )
    assert found.choices[0].message.content == "eeeee"


def test_thinking_ends_with_its_budget(server: Running) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 40,
        "temperature": 0,
        "chat_template_kwargs": {"thinking": True},
    }
    found = server.post("/v1/chat/completions", **body, thinking_token_budget=4).json()
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 5


def test_usage_counts_cached_tokens_and_a_salt_hides_them(client: openai.OpenAI) -> None:
    def cached(salt: str) -> int:
        body: Any = {"model": "demo", "prompt": LONG, "max_tokens": 2}
        found = client.completions.create(**body, extra_body={"cache_salt": salt})
        assert found.usage is not None and found.usage.prompt_tokens_details is not None
        tokens = found.usage.prompt_tokens_details.cached_tokens
        assert tokens is not None and tokens < found.usage.prompt_tokens
        return tokens

    assert cached("mine") == 0
    again = cached("mine")
    assert again > 0
    assert cached("yours") == 0
    assert cached("mine") == again


def test_every_endpoint_tells_of_cached_tokens(client: openai.OpenAI, server: Running) -> None:
    turns: Any = [{"role": "user", "content": LONG}]
    first = client.chat.completions.create(model="demo", messages=turns, max_tokens=1)
    chat = client.chat.completions.create(model="demo", messages=turns, max_tokens=1)
    assert first.usage is not None and chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    cached = chat.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached > 0
    answer = client.responses.create(model="demo", input=turns, max_output_tokens=1)
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == cached
    usage = server.post("/v1/messages", messages=turns, max_tokens=1).json()["usage"]
    assert usage["cache_read_input_tokens"] == cached
    assert usage["input_tokens"] + cached == chat.usage.prompt_tokens


def test_every_parameter_survives_the_way_to_the_engine() -> None:
    params = SamplingParams(
        presence_penalty=0.5,
        logit_bias={7: 1.5, 9: -2.0},
        bad_words=("no",),
        allowed_token_ids=(7, 8),
        logprobs=2,
        prompt_logprobs=0,
        json_schema={"type": "integer"},
        thinking_token_budget=3,
        stop=("x",),
    )
    order = decode_order(encode(Submit("1", [5], params, "salt")))
    assert isinstance(order, Submit) and order.cache_salt == "salt"
    for field in fields(SamplingParams):
        assert vars(order.params)[field.name] == vars(params)[field.name], field.name
    for one in (SamplingParams(regex="a+"), SamplingParams(choice=("a", "b"))):
        order = decode_order(encode(Submit("1", [5], one)))
        assert isinstance(order, Submit) and order.params.structure == one.structure


def test_anthropics_budget_ends_thinking_too(server: Running) -> None:
    turns = [{"role": "user", "content": PROMPT}]
    body: dict[str, Any] = {"messages": turns, "max_tokens": 40, "temperature": 0}
    thinking: dict[str, Any] = {"type": "enabled", "budget_tokens": 4}
    found = server.post("/v1/messages", **body, thinking=thinking).json()["content"]
    free = server.post("/v1/messages", **body, thinking={"type": "adaptive"}).json()["content"]
    assert [block["type"] for block in found] == ["thinking", "text"]
    assert free[0]["thinking"].startswith(found[0]["thinking"])
    assert len(found[0]["thinking"]) < len(free[0]["thinking"])
    for bad in ({"type": "enabled"}, {"type": "adaptive", "budget_tokens": 4}):
        assert server.post("/v1/messages", **body, thinking=bad).status_code == 400


def test_metrics_count_cached_tokens(server: Running) -> None:
    def hits() -> float:
        name = 'freewheel:prefix_cache_hits_total{model_name="demo"} '
        (line,) = (x for x in server.http.get("/metrics").text.splitlines() if x.startswith(name))
        return float(line.removeprefix(name))

    body: dict[str, Any] = {"prompt": LONG, "max_tokens": 1, "cache_salt": "counted"}
    server.post("/v1/completions", **body)
    before = hits()
    usage = server.post("/v1/completions", **body).json()["usage"]
    assert hits() - before == usage["prompt_tokens_details"]["cached_tokens"] > 0
