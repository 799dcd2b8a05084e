# SPDX-License-Identifier: Apache-2.0
"""A closed engine holds nothing: no memory, no files, no processes; and it says so when asked."""

from __future__ import annotations

import os
import subprocess
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.errors import ClosedError, FreewheelError
from freewheel.runtime.parallel.crew import LocalCrew, assemble, dismiss
from tests.waiting import PATIENCE

SMALL: dict[str, Any] = {"chunk": 16, "context_len": 512, "max_batch": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def small(model: str = "demo", **options: Any) -> LLM:
    return LLM(model, **SMALL, **options)


def memory_of(llm: LLM) -> list[weakref.ref[Any]]:
    """What the engine's tensors stand in, from now on without being held by it."""
    arena, mover = llm.executor.arena, llm.executor.mover
    tensors = [*arena.tensors(), *(mover._memory if mover.slots else ())]
    return [weakref.ref(tensor) for tensor in tensors]


def processes_of(llm: LLM) -> list[subprocess.Popen[Any]]:
    found = [llm._guides._process._process, llm._compiler._process._process]
    renderer = llm._parts.encoding._renderer
    found += [] if renderer is None else [renderer._process]  # type: ignore[list-item]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("model", ["demo", "demo-v4"])
def test_memory_and_processes_are_gone(model: str, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    tiers: dict[str, Any] = {
        "host_cache_gb": 0.002,
        "disk_cache_gb": 0.01,
        "disk_cache_dir": str(tmp_path),
    }
    llm = small(model, **(tiers if model == "demo" else {}))
    llm.chat([{"role": "user", "content": "Hello"}], GREEDY)
    llm.generate("a", SamplingParams(max_tokens=4, regex="[ab]{4}"))
    llm.generate("a", SamplingParams(max_tokens=4, grammar='start: "a" start "b" | "c"'))
    executor, memory, processes = llm.executor, memory_of(llm), processes_of(llm)
    assert len(memory) > 10 and len(processes) == 2 + (model == "demo-v4")
    assert all(one() is not None for one in memory)
    llm.close()
    assert not [one for one in memory if one() is not None]
    assert all(process.poll() is not None for process in processes)
    assert executor.counters.rounds > 0  # whoever holds it holds numbers
    if model == "demo":
        with small(**tiers) as another:  # the folder is free
            assert another.generate("a", GREEDY)


def test_an_end_of_a_with_block_closes_and_closing_again_is_nothing() -> None:
    with small() as llm:
        text = llm.generate("Emma was", GREEDY)[0].text
    assert text
    llm.close()
    llm.close()
    with pytest.raises(ClosedError), llm:
        raise AssertionError("a closed engine is not entered")
    with pytest.raises(ZeroDivisionError), small() as llm:
        raise ZeroDivisionError
    assert llm._open is None


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.generate("a"),
        lambda llm: next(llm.stream("a")),
        lambda llm: llm.chat([{"role": "user", "content": "a"}]),
        lambda llm: llm.selection("a"),
        lambda llm: llm.capture(),
        lambda llm: llm.executor,
        lambda llm: llm.context_len,
    ],
)
def test_use_after_closing_is_a_clear_error(use: Callable[[LLM], Any], closed: LLM) -> None:
    with pytest.raises(ClosedError, match="was closed; make another"):
        use(closed)


def test_its_one_line_says_what_it_is_and_whether_it_is_closed() -> None:
    with small(device="cpu", dtype="float32") as llm:
        assert repr(llm) == "<LLM 'demo' on cpu, float32>"
    assert repr(llm) == "<LLM 'demo' on cpu, float32, closed>"


@pytest.fixture(scope="module")
def closed() -> LLM:
    llm = small(speculate=0)
    llm.close()
    return llm


def test_a_stream_that_is_under_way_ends_with_a_clear_error_and_holds_no_memory() -> None:
    llm = small()
    stream = llm.stream("Emma was", SamplingParams(temperature=0, max_tokens=400))
    next(stream)
    memory = memory_of(llm)
    llm.close()
    assert not [one for one in memory if one() is not None]
    with pytest.raises(ClosedError, match="the engine was closed"):
        next(stream)
    another = small().stream("a", GREEDY)
    next(another)
    another.close()


def test_another_thread_s_stream_ends_with_a_clear_error() -> None:
    went_on, closing, errors = threading.Event(), threading.Event(), list[BaseException]()

    def read(llm: LLM) -> None:
        try:
            for _ in llm.stream("Emma was", SamplingParams(temperature=0, max_tokens=500)):
                went_on.set()
                closing.wait(PATIENCE)  # an answer takes two seconds, which a busy machine may miss
        except BaseException as error:
            errors.append(error)

    for _ in range(3):
        llm = small()
        reader = threading.Thread(target=read, args=(llm,))
        reader.start()
        assert went_on.wait(PATIENCE)
        closing.set()
        llm.close()
        reader.join()
        went_on.clear()
        closing.clear()
    assert [type(error) for error in errors] == [ClosedError] * 3


def test_ranks_end_with_the_last_engine_that_they_serve() -> None:
    dismiss()
    first, second = small(tp=2), small(tp=2)
    expected = first.generate("Emma was", GREEDY)[0].token_ids
    crew = assemble("cpu", 2)
    assert isinstance(crew, LocalCrew)
    (pid,) = crew.pids.values()
    first.close()
    assert second.generate("Emma was", GREEDY)[0].token_ids == expected
    second.close()
    assert not crew._watcher.is_alive()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with small(tp=2) as third:
        assert third.generate("Emma was", GREEDY)[0].token_ids == expected


def test_an_engine_whose_rank_is_lost_can_be_closed() -> None:
    dismiss()
    llm = small(tp=2)
    stream = llm.stream("Emma was", SamplingParams(temperature=0, max_tokens=400))
    next(stream)
    memory = memory_of(llm)
    crew = assemble("cpu", 2)
    assert isinstance(crew, LocalCrew)
    os.kill(crew.pids[1], 9)
    with pytest.raises(FreewheelError):
        for _ in stream:
            pass
    llm.close()
    assert not [one for one in memory if one() is not None]
