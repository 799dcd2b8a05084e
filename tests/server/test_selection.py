# SPDX-License-Identifier: Apache-2.0
"""POST /debug/selection answers what the engine would, and behaves like any request."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import pytest

from freewheel import LLM
from freewheel.server.serving import Serving
from tests.server.running import Running

ASKED = {"prompt": "Emma was", "temperature": 0, "max_tokens": 24, "ignore_eos": True}


def streamed(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    extra = {"stream": True, "return_pieces": True, "return_token_ids": True}
    with server.http.stream("POST", path, json=body | extra) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [json.loads(line) for line in lines[:-1]]


def test_every_token_of_an_answer_is_shown_with_what_it_was_chosen_from(
    server: Running, llm: LLM
) -> None:
    """As the page asks: the prompt's ids and the answer's, up to the token of a piece."""
    first, *rest = streamed(server, "/v1/completions", ASKED)
    choices = [chunk["choices"][0] for chunk in (first, *rest)]
    prompt = choices[0]["prompt_token_ids"]
    answer = [token for choice in choices for token in choice["token_ids"]]
    pieces = [piece for choice in choices for piece in choice["pieces"]]
    assert prompt == llm.tokenizer.encode_prompt("Emma was")
    assert [place for _, _, place in pieces] == sorted({place for _, _, place in pieces})
    for text, _, place in pieces[::5]:
        before = [*prompt, *answer[:place]]
        found = server.post("/debug/selection", prompt=before, return_token_strs=True).json()
        wanted = llm.selection(before)
        assert [tuple(one["picks"]) for one in found["layers"]] == list(wanted.picks)
        assert tuple(one["layer"] for one in found["layers"]) == wanted.of.layers
        about = asdict(wanted.of)
        assert all(found[name] == about[name] for name in ("ratio", "span", "window"))
        assert found["position"] == len(before)
        assert found["token_id"] == answer[place]  # temperature 0
        assert llm.tokenizer.decode([answer[place]], False).endswith(text[-1])
        assert "".join(found["token_strs"]) == llm.tokenizer.decode(before, False)


def test_a_streamed_chat_tells_the_ids_of_its_prompt_once(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    first, *rest = streamed(server, "/v1/chat/completions", body)
    whole = server.post("/v1/chat/completions", **body, return_token_ids=True).json()
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in rest)


def test_asking_is_a_request_that_leaves_nothing_behind(server: Running) -> None:
    alone = server.post("/v1/completions", **ASKED).json()["choices"][0]["text"]
    with server.http.stream("POST", "/v1/completions", json=ASKED | {"stream": True}) as response:
        lines = response.iter_lines()
        heard = [next(lines)]
        for length in (3, 20, 70, 200):
            asked = server.post("/debug/selection", prompt=[5] * length)
            assert asked.json()["position"] == length
        heard += [line for line in lines if line]
    chunks = [json.loads(line[6:]) for line in heard if line and line != "data: [DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone
    server.wait_until_idle()
    assert server.http.get("/debug/rounds").json()["load"]["host_reads"] == 0
    for pool in server.pages().values():
        assert pool["owned"] == pool["quarantined"] == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({}, "prompt"),
        ({"prompt": [1 << 20]}, "prompt"),
        ({"prompt": [5] * 9000}, "prompt"),
        ({"prompt": [5], "layers": [0]}, "layers"),
        ({"prompt": [5], "priority": "high"}, "priority"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name(
    server: Running, body: dict[str, Any], param: str
) -> None:
    refused = server.http.post("/debug/selection", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert server.post("/debug/selection", prompt="Emma", model="other").status_code == 404


def test_nobody_waits_while_a_long_prompts_tokens_become_texts() -> None:
    seen: list[int] = []

    class Listening:
        def decode(self, ids: Sequence[int], skip: bool) -> str:
            seen.append(threading.get_ident())
            return f"{ids[0]}{skip}"

    async def texts(count: int) -> list[str]:
        serving = cast(Serving, SimpleNamespace(tokenizer=Listening()))
        return await Serving.token_texts(serving, range(count))

    assert asyncio.run(texts(3)) == ["0False", "1False", "2False"]
    seen.clear()
    assert len(asyncio.run(texts(100_000))) == 100_000
    assert threading.get_ident() not in seen
