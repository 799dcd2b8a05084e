# SPDX-License-Identifier: Apache-2.0
"""The form of an answer over HTTP: kept, or refused in the client's words, and never in the way."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.running import Running
from tests.waiting import PATIENCE, children, command_of, wait_for

SCHEMA: Any = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["yes", "size"],
}
ASKED: Any = {"model": "demo", "messages": [{"role": "user", "content": "How large is Paris?"}]}
PROMPT: Any = {"prompt": "Emma was", "max_tokens": 40, "temperature": 1.0, "seed": 3}
SLOW = "(a|b){1,2900}c{1,2900}"
"""Takes seconds to compile."""
COMPILER = b"freewheel.structured.worker"


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def check(text: str) -> Any:
    found = json.loads(text)
    assert list(found) == ["yes", "size"]
    assert isinstance(found["yes"], bool) and found["size"] in ("small", "large")
    return found


def test_tags_in_an_answer_are_whole(server: Running) -> None:
    """The first letter of an answer opens one, so that the model cannot pass by them."""
    tag = {"begin": "e", "schema": {"enum": [7]}, "end": "]"}
    wanted = {"type": "structural_tag", "structures": [tag], "triggers": ["e"]}
    for seed in range(3):
        asked = ASKED | {"temperature": 1, "seed": seed, "max_tokens": 60}
        body = server.post("/v1/chat/completions", **asked, response_format=wanted).json()
        text = body["choices"][0]["message"]["content"]
        whole = re.fullmatch(r"(?s:(?:[^e]|e7\])*)(?:e|e7)?", text)
        assert whole and "e7]" in text, text


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_answers_in_the_schema_asked_for(client: openai.OpenAI, stream: bool) -> None:
    wanted: Any = {
        "type": "json_schema",
        "json_schema": {"name": "size", "schema": SCHEMA, "strict": True},
    }
    found: Any = client.chat.completions.create(**ASKED, response_format=wanted, stream=stream)
    if stream:
        chunks = list(found)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        text, finish = found.choices[0].message.content, found.choices[0].finish_reason
    check(text)
    assert finish == "stop"


def test_a_response_has_its_format(client: openai.OpenAI) -> None:
    wanted: Any = {"format": {"type": "json_schema", "name": "size", "schema": SCHEMA}}
    found = client.responses.create(model="demo", input="How large is Paris?", text=wanted)
    check(found.output_text)
    assert found.text is not None and found.text.format is not None
    assert found.text.format.type == "json_schema"


def test_a_completion_has_vllms_forms(server: Running) -> None:
    digits = re.compile("[0-9]{3}-[xyz]+!")
    forms: Any = [
        ({"json": SCHEMA}, check),
        ({"json": json.dumps(SCHEMA)}, check),
        ({"regex": digits.pattern}, digits.fullmatch),
        ({"choice": ["Paris", "London"]}, ["Paris", "London"].index),
    ]
    for form, kept in forms:
        found = server.post("/v1/completions", **PROMPT, structured_outputs=form)
        assert found.status_code == 200, found.text
        choice = found.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert kept(choice["text"]) is not None


def test_thoughts_come_before_the_form(server: Running) -> None:
    body = ASKED | {
        "chat_template_kwargs": {"thinking": True},
        "thinking_token_budget": 6,
        "structured_outputs": {"choice": ["Paris", "London"]},
    }
    found = server.post("/v1/chat/completions", **body).json()
    message = found["choices"][0]["message"]
    assert message["content"] in ("Paris", "London")
    assert message["reasoning_content"]
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 7


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_schema_that_is_not_kept_exactly_is_refused_in_the_clients_words(
    server: Running, path: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number", "not": {"const": 1}}}}
    chat = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    text = {"text": {"format": {"type": "json_schema", "schema": schema}}}
    body = ASKED | chat if path.startswith("chat") else {"input": "x"} | text
    error = server.post(f"/v1/{path}", **body).json()["error"]
    name = "response_format" if path.startswith("chat") else "text.format"
    assert error["param"] == name and error["message"].startswith(name)
    assert "not" in error["message"]
    assert server.post("/v1/completions", **PROMPT).status_code == 200


def test_others_go_on_while_a_form_is_compiled(server: Running) -> None:
    """For which the process that compiles is stopped until rounds enough have been seen."""
    assert server.post("/v1/completions", **PROMPT, structured_outputs={"regex": "x"}).is_success
    (compiler,) = (pid for pid in children(server.engine_pid()) if COMPILER in command_of(pid))
    body = PROMPT | {"max_tokens": 7000, "ignore_eos": True, "stream": True}
    asked = PROMPT | {"structured_outputs": {"regex": "xyz[ab]{3}"}}

    def seen() -> int:
        return server.http.get("/debug/rounds").json()["number"]

    with (
        ThreadPoolExecutor(1) as pool,
        server.http.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        with stopped(compiler):
            waiting = pool.submit(server.post, "/v1/completions", **asked)
            server.wait_for("two requests", lambda: total(server) == 2)
            before = seen()
            server.wait_for("rounds of others", lambda: seen() > before + 40)
            assert not waiting.done()
        assert waiting.result(PATIENCE).json()["choices"][0]["text"].startswith("xyz")
    server.wait_until_idle()


def total(server: Running) -> int:
    return server.http.get("/v1/loads").json()["loads"][0]["num_total_reqs"]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_whoever_leaves_while_a_form_is_compiled_is_forgotten(server: Running) -> None:
    slow = {"regex": SLOW.replace("c", "d")}
    with pytest.raises(Exception, match="timed out"):
        server.http.post("/v1/completions", json=PROMPT | {"structured_outputs": slow}, timeout=0.2)
    assert server.post("/v1/completions", **PROMPT).status_code == 200
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_nothing_left_to_choose_is_an_error(server: Running, stream: bool) -> None:
    body = PROMPT | {"structured_outputs": {"choice": ["Paris"]}, "allowed_token_ids": [5]}
    found = server.post("/v1/completions", **body, stream=stream)
    assert found.status_code == 500
    error = found.json()["error"]
    assert (error["code"], error["type"]) == ("engine_error", "server_error")
    assert server.post("/v1/completions", **PROMPT).status_code == 200


def test_a_form_that_takes_too_long_is_refused_and_nothing_else(log: Path) -> None:
    """Patterns that never end: CVE-2025-48942 and others."""
    with Running(log, "--grammar-seconds", "0.3", "--no-prefix-cache") as running:
        running.wait_until_ready()
        for _ in range(2):
            found = running.post("/v1/completions", **PROMPT, structured_outputs={"regex": SLOW})
            assert found.status_code == 400
            error = found.json()["error"]
            assert error["param"] == "structured_outputs.regex"
            assert "structured_outputs.regex: was not compiled in 0.3 s" in error["message"]
        found = running.post("/v1/completions", **PROMPT)
        assert found.status_code == 200
        assert found.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert running.http.get("/ready").json()["restarts"] == 0


def test_the_metrics_say_where_forms_are_kept(server: Running) -> None:
    def counts() -> list[float]:
        lines = server.http.get("/metrics").text.splitlines()
        start = "freewheel:structured_requests_total{"
        found = {line.split('form="')[1]: line for line in lines if line.startswith(start)}
        return [float(found[key].split()[-1]) for key in sorted(found)]

    before = counts()
    forms: Any = ({"choice": ["a", "b"]}, {"choice": ["c"]}, {"json_object": True})
    for form in forms:
        server.post("/v1/completions", **PROMPT, structured_outputs=form)
    server.wait_until_idle()
    wait_for("counted", lambda: counts() == [before[0] + 2, before[1] + 1])
