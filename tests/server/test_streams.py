# SPDX-License-Identifier: Apache-2.0
"""Many streams at once, and clients that leave: nothing is lost, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import pytest

from freewheel import LLM, SamplingParams
from tests.server.running import Running
from tests.waiting import PATIENCE

OPENINGS = ("Emma was", "In the beginning", "It is a truth", "Once upon a time", "The river")


def body(index: int, tokens: int) -> dict:
    return {
        "prompt": f"{OPENINGS[index % len(OPENINGS)]} {index}",
        "seed": index,
        "temperature": 0.8,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def expected_ids(llm: LLM, count: int, tokens: int) -> list[tuple[int, ...]]:
    params = [
        SamplingParams(seed=i, temperature=0.8, max_tokens=tokens, ignore_eos=True)
        for i in range(count)
    ]
    prompts = [str(body(i, tokens)["prompt"]) for i in range(count)]
    return [output.token_ids for output in llm.generate(prompts, params)]


async def read(client: httpx.AsyncClient, index: int, tokens: int) -> tuple[int, ...]:
    """The token ids of one stream; each chunk must be whole, and the end must be said."""
    ids: list[int] = []
    finishes: list[str] = []
    lines: list[str] = []
    async with client.stream("POST", "/v1/completions", json=body(index, tokens)) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                assert line.startswith("data: ")
                lines.append(line.removeprefix("data: "))
    for line in lines[:-1]:
        (choice,) = json.loads(line)["choices"]
        ids += choice["token_ids"]
        if choice["finish_reason"]:
            finishes.append(choice["finish_reason"])
    assert lines[-1] == "[DONE]"
    assert finishes == ["length"]
    return tuple(ids)


async def leave(client: httpx.AsyncClient, index: int, chance: random.Random) -> None:
    """Begin a stream and close the connection after some of it, or before any."""
    try:
        async with asyncio.timeout(chance.uniform(0.0, 1.0)):
            wanted, seen = chance.randrange(4000), 0
            request = body(index, 2000) | {"stream": chance.random() < 0.8}
            async with client.stream("POST", "/v1/completions", json=request) as response:
                async for data in response.aiter_raw():
                    seen += len(data)
                    if seen > wanted:
                        return
    except TimeoutError:
        return


def client_of(server: Running) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        base_url=server.url, timeout=2 * PATIENCE, limits=limits, trust_env=False
    )


def test_many_streams_at_once_lose_nothing(server: Running, llm: LLM) -> None:
    count, tokens = 16, 12

    async def run() -> list[tuple[int, ...]]:
        async with client_of(server) as client:
            return await asyncio.gather(*(read(client, i, tokens) for i in range(count)))

    assert asyncio.run(run()) == expected_ids(llm, count, tokens)
    server.wait_until_idle()


def test_clients_that_leave_change_nothing_for_those_who_stay(server: Running, llm: LLM) -> None:
    stay, tokens, leavers = 4, 20, 20

    async def run() -> list[tuple[int, ...]]:
        chance = random.Random(3)
        async with client_of(server) as client, client_of(server) as other:
            leaving = [leave(other, 100 + i, chance) for i in range(leavers)]
            staying = [read(client, i, tokens) for i in range(stay)]
            found = await asyncio.gather(*staying, *leaving)
            return [one for one in found if one is not None]

    assert asyncio.run(run()) == expected_ids(llm, stay, tokens)
    server.wait_until_idle()


@pytest.mark.slow
def test_many_streams_and_hundreds_of_leavers_hold(server: Running, llm: LLM) -> None:
    count, tokens, turns, leavers = 64, 48, 3, 100
    expected = expected_ids(llm, count, tokens)

    async def run() -> None:
        chance = random.Random(4)
        async with client_of(server) as client, client_of(server) as other:
            for _ in range(turns):
                leaving = [leave(other, 100 + i, chance) for i in range(leavers)]
                staying = [read(client, i, tokens) for i in range(count)]
                found = await asyncio.gather(*staying, *leaving)
                assert [one for one in found if one is not None] == expected

    asyncio.run(run())
    server.wait_until_idle()
    assert server.http.get("/ready").json()["restarts"] == 0


def test_a_stop_string_frees_the_row(server: Running, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True, stop=(" and",))
    expected = llm.generate("Emma was", params)[0]
    found = server.post(
        "/v1/completions",
        prompt="Emma was",
        temperature=0,
        max_tokens=2000,
        ignore_eos=True,
        stop=" and",
    ).json()
    assert found["choices"][0]["text"] == expected.text
    assert found["choices"][0]["stop_reason"] == " and"
    assert found["usage"]["completion_tokens"] == len(expected.token_ids)
    server.wait_until_idle()


def test_the_metrics_count_what_was_served(server: Running) -> None:
    def counters() -> dict[str, float]:
        lines = [line for line in server.http.get("/metrics").text.splitlines() if line[0] != "#"]
        return {line.partition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    label = '{model_name="demo"}'
    server.wait_until_idle()
    before = counters()
    usage = server.post("/v1/completions", prompt="Emma was", max_tokens=12, temperature=0)
    spent = usage.json()["usage"]
    server.wait_until_idle()
    after = counters()

    def rise(name: str) -> float:
        return after[f"freewheel:{name}"] - before.get(f"freewheel:{name}", 0.0)

    assert rise(f"generation_tokens_total{label}") == spent["completion_tokens"] == 12
    assert rise(f"prompt_tokens_total{label}") == spent["prompt_tokens"]
    accepted = spent["completion_tokens_details"]["accepted_prediction_tokens"]
    assert rise(f"spec_decode_num_accepted_tokens_total{label}") == accepted
    assert rise(f"time_to_first_token_seconds_count{label}") == 1
    assert rise(f"inter_token_latency_seconds_count{label}") >= 1
    assert after[f"freewheel:host_reads_total{label}"] == 0, "a round read a device value"
    assert rise(f"late_compiles_total{label}") == 0
