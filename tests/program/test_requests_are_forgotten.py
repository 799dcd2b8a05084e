# SPDX-License-Identifier: Apache-2.0
"""When no request is left, nothing on the host remembers one, however it ended.

Everything that can be reached from the scheduler, its depth policy and its alarm is looked through
for requests and for names of requests: a table that is new is looked through like the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.engine.session import Session
from freewheel.host import Request
from tests.program.test_closed_form import engine

BOUNDED = {
    "Scheduler._just_ended": "until the next letter, for a stop string that comes with it",
    "DecodeSeats._latest": "of the last decoding round, whose seats the next one shares",
    "_Load.rows": "of the last round of a load, to see whether the next has the same",
}
"""Attributes that may hold ended requests, or their names: no more than one batch of them."""


def inside(thing: Any) -> Iterator[tuple[str, Any]]:
    """Parts of what belongs to the host, and of containers."""
    if isinstance(thing, Mapping):
        for key, value in thing.items():
            yield "key", key
            yield f"[{key!r}]", value
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        for value in thing:
            yield "[]", value
    elif type(thing).__module__.startswith("freewheel.host"):
        names = [name for one in type(thing).__mro__ for name in vars(one).get("__slots__", ())]
        held = {
            name: getattr(thing, name, None) for name in [*names, *getattr(thing, "__dict__", ())]
        }
        for name, value in held.items():
            if f"{type(thing).__name__}.{name}" not in BOUNDED:
                yield f".{name}", value


def remembered(*roots: Any) -> list[str]:
    """Where a request, or the name of one, can be reached from."""
    found, seen = list[str](), set[int]()
    waiting = [(type(root).__name__, root) for root in roots]
    while waiting:
        where, thing = waiting.pop()
        if isinstance(thing, Request) or (isinstance(thing, str) and thing.startswith("request-")):
            found.append(where)
        elif not isinstance(thing, str | bytes) and id(thing) not in seen:
            seen.add(id(thing))
            waiting += [(where + name, one) for name, one in inside(thing)]
    return found


def streams_of(llm: LLM) -> list[Any]:
    """One for each wish, none begun."""
    params = [SamplingParams(max_tokens=60, **wish) for wish in WISHES]
    return [llm.stream([9, 8, n], one) for n, one in enumerate(params)]


def forgotten(llm: LLM) -> list[str]:
    return remembered(llm._session.scheduler, llm._parts.policy, llm.alarm)


WISHES: list[dict[str, Any]] = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1.0, "seed": 3, "presence_penalty": 1.0, "logprobs": 1, "ignore_eos": True},
    {"temperature": 0, "regex": "[a-f]{5,9}"},
    {"temperature": 0, "grammar": 'start: "x" start "y" | "z"'},
    {"temperature": 0, "stop": ("e",)},
]


@pytest.fixture(scope="module", params=[{"host_cache_gb": 0.01}, {"dp": 2}], ids=str)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    pytest.importorskip("llguidance")
    small = {"chunk": 16, "context_len": 256, "max_batch": 3, "cache_bytes": 8 << 20}
    with LLM("demo", speculate="auto", graph="eager", **small, **request.param) as made:
        yield made


def test_after_answers_were_finished(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=10, **wish) for wish in WISHES]
    llm.generate([[5, 6, 7, 300 + n] for n in range(len(params))], params, priority=[0, 1, 0, 2, 1])
    assert forgotten(llm) == []


def test_after_streams_were_closed_early(llm: LLM) -> None:
    streams = streams_of(llm)
    for stream in streams:
        next(stream)
    assert forgotten(llm)
    for stream in streams:
        stream.close()
    assert forgotten(llm) == []


@pytest.mark.parametrize("fails", ["launch", "collect"])
def test_after_an_error_ended_a_round(
    llm: LLM, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = streams_of(llm)
    for stream in streams[:3]:
        for _ in range(3):
            next(stream)
    real = getattr(llm.executor, fails)

    def broken(*given: Any) -> Any:
        monkeypatch.setattr(llm.executor, fails, real)
        raise ZeroDivisionError

    monkeypatch.setattr(llm.executor, fails, broken)
    with pytest.raises(ZeroDivisionError):
        llm.generate([4, 5], SamplingParams(max_tokens=20, ignore_eos=True))
    for stream in streams:
        stream.close()
    assert forgotten(llm) == []
    assert llm.generate([1, 2], SamplingParams(max_tokens=4, temperature=0))[0].token_ids


def test_the_search_finds_a_request_that_is_under_way(llm: LLM, folders: dict[str, Path]) -> None:
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    for _ in range(4):
        next(stream)
    assert any("_live" in where for where in forgotten(llm))
    stream.close()
    assert forgotten(llm) == []


def test_a_session_that_ends_forgets_as_well(folders: dict[str, Path]) -> None:
    made = engine(folders["t32"], speculate="auto")
    session, policy = made._session, made._parts.policy
    assert isinstance(session, Session)
    next(made.stream([1, 2], SamplingParams(max_tokens=30, temperature=0)))
    made.close()
    assert remembered(session._scheduler, policy) == []
