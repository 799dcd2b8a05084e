# SPDX-License-Identifier: Apache-2.0
"""The engine dies or stalls; the server is told to end. More is in `tests/faults`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from freewheel.server.failures import ApiError
from freewheel.server.tickets import Ledger, Ticket
from freewheel.spec import SamplingParams
from tests.server.running import Running
from tests.waiting import PATIENCE, wait_for

LONG = {"prompt": "Emma was", "max_tokens": 7000, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "Emma was", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def frail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose engine these tests kill."""
    log = tmp_path_factory.mktemp("frail") / "log"
    options = ("--max-batch", "2", "--stall-seconds", "10")
    with Running(log, *options) as running:
        running.wait_until_ready()
        yield running


def lines_of(response: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in response.iter_lines() if line)


def check_engine_is_replaced(running: Running, kill: int) -> None:
    """Streams end with an error, `/ready` says so at once, and another engine answers alike."""
    before = running.post("/v1/completions", **SHORT).json()["choices"]
    restarts = running.http.get("/ready").json()["restarts"]
    old = running.engine_pid()
    with running.http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = lines_of(response)
        assert "choices" in json.loads(next(lines))
        os.kill(old, kill)
        *_, last = lines
        error = json.loads(last)["error"]
        assert (error["code"], error["type"]) == ("engine_lost", "server_error")
        ready = running.http.get("/ready")  # unless the next engine is there already
        assert ready.status_code == 503 or ready.json()["restarts"] > restarts
    assert running.http.get("/health").status_code == 200
    refused = running.post("/v1/completions", **SHORT)
    if refused.status_code != 200:  # it is, unless the next engine is there already
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
    running.wait_for_another_engine(old)
    assert running.http.get("/ready").json()["restarts"] == restarts + 1
    assert running.post("/v1/completions", **SHORT).json()["choices"] == before
    running.wait_until_idle()


def test_a_killed_engine_ends_streams_with_an_error_and_is_replaced(frail: Running) -> None:
    check_engine_is_replaced(frail, signal.SIGKILL)


@pytest.mark.slow
def test_an_engine_that_stalls_is_replaced_too(frail: Running) -> None:
    check_engine_is_replaced(frail, signal.SIGSTOP)


@pytest.mark.parametrize("stream", [True, False])
def test_told_twice_it_ends_at_once_and_without_a_traceback(log: Path, stream: bool) -> None:
    """An answer under way is told; the log says in a line what happened."""
    told: list[str] = []
    with Running(log, "--max-batch", "2", "--drain-seconds", "3600") as running:
        running.wait_until_ready()

        def ask() -> None:
            with running.http.stream(
                "POST", "/v1/completions", json=LONG | {"max_tokens": 8000, "stream": stream}
            ) as response:
                told.extend(response.iter_lines())

        asking = threading.Thread(target=ask)
        asking.start()
        running.wait_for(
            "an answer",
            lambda: running.http.get("/v1/loads").json()["loads"][0]["num_running_reqs"],
        )
        running.interrupt()
        running.interrupt()
        running.process.wait(PATIENCE)
        asking.join(PATIENCE)
        assert "the server is ending" in "".join(told)
        assert "Traceback" not in running.log and "told again" in running.log


def test_told_to_end_it_finishes_answers_and_leaves_no_process(log: Path) -> None:
    patient = ("--stall-seconds", "600", "--drain-seconds", "600")
    with Running(log, *patient) as running:
        running.wait_until_ready()
        engine = running.engine_pid()
        asked = LONG | {"max_tokens": 500}
        with running.http.stream("POST", "/v1/completions", json=asked) as response:
            lines = lines_of(response)
            next(lines)
            os.kill(engine, signal.SIGSTOP)  # or the answer could end before all this is seen
            running.process.send_signal(signal.SIGTERM)
            refused = wait_for(
                "refusal of new requests",
                lambda: found if (found := running.http.get("/ready")).status_code == 503 else None,
            )
            assert refused.json()["reason"] == "the server is ending"
            new = running.post("/v1/completions", **SHORT)
            assert (new.status_code, new.json()["error"]["code"]) == (503, "draining")
            os.kill(engine, signal.SIGCONT)
            *_, last, done = lines
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
        assert running.process.wait(PATIENCE) == 0
        assert not Path(f"/proc/{engine}").exists()


def ticket(events: asyncio.Queue, number: int, tokens: int) -> Ticket:
    return Ticket(str(number), [5] * tokens, SamplingParams(), events)


def test_the_queue_is_bounded_by_tokens() -> None:
    ledger, events = Ledger(queue_tokens=100, max_requests=10), asyncio.Queue()
    ledger.admit(5000, 1)  # an empty queue takes one of any size
    ledger.live["0"] = ticket(events, 0, 60)
    ledger.admit(40, 1)
    with pytest.raises(ApiError) as refused:
        ledger.admit(41, 1)
    assert (refused.value.status, refused.value.retry_after) == (429, 1)
    ledger.live["0"].first = 1.0  # its first token is here: it waits no more
    assert ledger.waiting_tokens == 0
    ledger.admit(5000, 1)
    with pytest.raises(ApiError, match="at most 10"):
        ledger.admit(1, 10)


def test_a_request_that_a_canary_ends_is_told_what_was_found(tmp_path: Path) -> None:
    watching = ("--strict", "--canary", "all", "--perturb", "3", "--graph", "eager")
    with Running(tmp_path / "log", "--context-len", "512", *watching) as running:
        running.wait_until_ready()
        found = running.post("/v1/completions", **SHORT | {"max_tokens": 200, "ignore_eos": True})
    assert found.status_code == 500
    error = found.json()["error"]
    assert error["code"] == "engine_error" and "NaN" not in error["message"]
    assert error["message"].endswith("the canary found its pages or tokens damaged")
