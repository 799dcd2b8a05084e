# SPDX-License-Identifier: Apache-2.0
"""A failed engine's requests can be given to another, which then says the same."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from freewheel import LLM
from freewheel.config import EngineConfig
from freewheel.engine import Load, PoolLoad, TokenEngine
from freewheel.errors import ConfigError
from freewheel.server import journal, wire
from freewheel.server.journal import Dump, Entry, Journal, read_dump, write_dump
from freewheel.server.replay import replay
from freewheel.spec import SamplingParams
from freewheel.structured import GuideDesk
from tests.server.running import Running
from tests.waiting import PATIENCE, wait_for

LONG = {"max_tokens": 7000, "ignore_eos": True, "stream": True, "return_token_ids": True}
PLAIN: dict[str, Any] = {"dtype": "float64", "max_batch": 2, "graph": "eager"}
PLAIN |= {"grammar_seconds": PATIENCE}
POOL = PoolLoad("rows", 1, 1, 0, 0, 0)
LOAD = Load(0, 0, 0, POOL, (), 0, 0, 0, None, 0)


def order(number: int, prompt: int = 3, tokens: int = 8) -> wire.Submit:
    return wire.Submit(
        f"{number}", [300 + number] * prompt, SamplingParams(max_tokens=tokens, temperature=0)
    )


def progress(turn: int, *steps: wire.Step, **obeyed: dict[str, int]) -> wire.Progress:
    return wire.Progress(list(steps), [], LOAD, turn, **obeyed)


kept_open = functools.cache(LLM)


def opened(model: str, **options: Any) -> LLM:
    """An engine that has had others' requests before; without a prefix cache it does not show."""
    llm = kept_open(model, **options)
    llm._session.close(list(llm._session._live))
    return llm


def made(
    config: EngineConfig, orders: list[tuple[int, wire.Submit]], turns: int, least: int = 0
) -> Dump:
    """What a real engine says, written down as the HTTP process would.

    `least`: tokens of each answer, for which there are more turns if need be.
    """
    kept, engine = Journal(), TokenEngine(opened(**vars(config)))
    for turn in itertools.count():
        few = any(len(entry.tokens) < least for entry in kept.entries.values())
        if turn >= turns and not (few and engine.busy):
            break
        begun: dict[str, int] = {}
        for when, one in orders:
            if when == turn:
                kept.submitted(one)
                engine.submit(one.id, one.prompt, one.params)
                begun[one.id] = turn
        steps = engine.step() if engine.busy else []
        told = [wire.Step(step.id, list(step.tokens), finish=step.finish) for step in steps]
        kept.heard(wire.Progress(told, engine.rounds(), LOAD, turn + 1, begun))
    return kept.dump(config, "cpu", "a test")


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_another_engine_says_the_same_in_the_same_turns(run_ahead: int, tmp_path: Path) -> None:
    config = EngineConfig(model="demo", prefix_cache=False, run_ahead=run_ahead, **PLAIN)
    seeded = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)
    orders = [(0, order(0, 40, 30)), (2, order(1)), (3, wire.Submit("s", [301, 302], seeded))]
    dump = read_dump(write_dump(made(config, orders, 9), tmp_path))
    found = replay(dump, {"graph": "tape"})
    assert not found.differing
    assert found.same_tokens == sum(len(entry.tokens) for entry in dump.entries) > 10


def test_a_token_that_differs_is_told_with_its_place() -> None:
    config = EngineConfig(model="demo", prefix_cache=False, **PLAIN)
    dump = made(config, [(0, order(0, 5, 20))], 8)
    told = dump.entries[0].tokens
    right, told[2] = told[2], 7
    found = replay(dump, {}, opened)
    assert found.differing == {"0": (2, 7, right)} and found.same_tokens == 2


def test_an_aborted_request_is_aborted_again() -> None:
    config = EngineConfig(model="demo", prefix_cache=False, **PLAIN)
    dump = made(config, [(0, order(0, 5, 4000)), (0, order(1, 5, 6))], 6)
    dump.entries[0].aborted = 3
    found = replay(dump, {}, opened, to_end=True)
    assert found.turns < 100 and len(found.tokens["1"]) == 6


TREE = {
    "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}}},
    "$ref": "#/$defs/n",
}
HELD: dict[str, dict[str, Any]] = {
    "host": {"json_schema": TREE},
    "table": {"regex": "[a-f]{8,20}"},
    "trigger": {"grammar": 'start: "x" /[0-9]{9}/', "grammar_trigger": 300,
                "logit_bias": {300: 9.0}},
    "thought": {"json_schema": TREE, "thinking_token_budget": 3},
    "calls": {"json_object": True, "frequency_penalty": 0.5, "logprobs": 2},
    "scored": {"prompt_logprobs": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", HELD)
def test_answers_of_every_form_are_replayed_whatever_keeps_turns_from_being_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks come when they come, and `auto` chooses depths by the clock: tokens stay the same."""
    config = EngineConfig(model="demo", prefix_cache=False, **PLAIN)
    held = SamplingParams(max_tokens=24, temperature=1.0, seed=3, **HELD[kind])
    orders = [(0, wire.Submit("h", [5, 6, 7], held)), (1, order(1, 4, 30))]
    dump = made(config, orders, 30, least=5)  # masks come when they come
    dump.turns = 9  # the engine failed long before it could say all of this
    assert len(dump.entries[0].tokens) > 4
    make = GuideDesk.guide
    monkeypatch.setattr(GuideDesk, "guide", lambda *a: LateGuide(make(*a), 3))
    for changed in ({"speculate": 0}, {"speculate": "auto", "run_ahead": 0}):
        found = replay(dump, changed, opened)
        assert not found.differing and not found.refused
        assert found.same_tokens == sum(len(entry.tokens) for entry in dump.entries)


class LateGuide:
    """Another guide's masks, some looks later."""

    def __init__(self, guide: Any, late: int) -> None:
        self._guide, self._late, self._looks = guide, late, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._guide, name)

    def follow(self, answer: Sequence[int]) -> None:
        self._looks = 0
        self._guide.follow(answer)

    def mask(self) -> bytes | None:
        self._looks += 1
        return self._guide.mask() if self._looks > self._late else None


def test_rounds_of_the_same_turns_are_the_same_rounds() -> None:
    config = EngineConfig(model="demo", prefix_cache=False, **PLAIN)
    dump = made(config, [(0, order(0, 40, 20)), (2, order(1, 9, 12))], 12)
    assert replay(dump, {}, opened).same_rounds == len(dump.rounds) > 6
    assert replay(dump, {"speculate": 0}, opened).same_rounds < len(dump.rounds)


def test_a_request_whose_grammar_was_never_compiled_is_replayed_as_far_as_it_came() -> None:
    """One left meanwhile, one would have been refused, one was compiled when the engine died."""
    config = EngineConfig(model="demo", prefix_cache=False, **PLAIN)
    dump = made(config, [(0, order(0, 5, 20))], 8)
    for name, regex in {"left": "[ab]{9}", "bad": "(", "good": "[ab]{9}"}.items():
        submit = wire.Submit(name, [5, 6], SamplingParams(max_tokens=12, seed=1, regex=regex))
        dump.entries.append(Entry(submit, aborted=3 if name == "left" else None))
    found = replay(dump, {}, opened, to_end=True)
    assert not found.differing
    assert set(found.tokens) == {"0", "good"} and set(found.refused) == {"bad"}


def test_a_journal_begins_anew_when_the_engine_has_nothing_to_do() -> None:
    kept = Journal()
    kept.submitted(order(0))
    kept.heard(progress(3, wire.Step("0", [1, 2], finish="length"), begun={"0": 1}))
    assert kept.entries["0"].tokens == [1, 2] and not kept.live
    kept.heard(progress(5))
    kept.submitted(order(1))
    assert set(kept.entries) == {"1"}
    kept.heard(progress(7, begun={"1": 6}))
    dump = kept.dump(EngineConfig(model="demo"), "cpu", "")
    assert dump.turns == 2 and dump.entries[0].begun == 1 and dump.whole


def test_a_refused_request_is_not_replayed() -> None:
    kept = Journal()
    kept.submitted(order(0))
    kept.refused("0")
    assert not kept.entries


def test_a_full_journal_leaves_out_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST_TOKENS", 100)
    kept = Journal()
    kept.submitted(order(0, 30))
    kept.submitted(order(1, 30))
    kept.heard(progress(1, wire.Step("1", [1], finish="stop")))
    kept.submitted(order(2, 60))
    assert set(kept.entries) == {"0", "2"} and not kept.whole


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1}'])
def test_a_file_that_is_no_dump_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "dump.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="dump:"):
        read_dump(path)
    with pytest.raises(ConfigError, match="dump:"):
        read_dump(tmp_path / "none")


def test_a_dump_of_another_format_is_refused(tmp_path: Path) -> None:
    dump = Journal().dump(EngineConfig(model="demo"), "cpu", "")
    path = tmp_path / "dump.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(dump, format=9)))
    with pytest.raises(ConfigError, match="format 9"):
        read_dump(path)


@pytest.mark.slow
def test_a_killed_servers_requests_are_replayed_by_the_command(log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    options = ("--dtype", "float64", "--dump-dir", str(folder), "--max-batch", "4")
    with Running(log, *options) as server:
        server.wait_until_ready()
        assert server.post("/v1/completions", prompt="Before.", max_tokens=3).status_code == 200
        with ExitStack() as stack:
            for prompt in ("Emma was", "It was a"):
                body = LONG | {"prompt": prompt}
                response = stack.enter_context(
                    server.http.stream("POST", "/v1/completions", json=body)
                )
                lines = (line for line in response.iter_lines() if line)
                for _ in range(5):
                    next(lines)
            os.kill(server.engine_pid(), signal.SIGKILL)
            (path,) = server.wait_for("the dump", lambda: list(folder.iterdir()))
            wait_for("the whole dump", lambda: path.read_bytes().endswith(b"}"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    dump = read_dump(path)
    assert len(dump.entries) == 2 and "code -9" in dump.why
    command = [sys.executable, "-m", "freewheel", "replay", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same_tokens"] == sum(len(entry.tokens) for entry in dump.entries) >= 10


def test_no_folder_for_dumps_is_told_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "freewheel", "serve", "--dump-dir", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: --dump-dir:")
