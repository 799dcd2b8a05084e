# SPDX-License-Identifier: Apache-2.0
"""A prompt computed by one engine is answered by another as if it had computed it itself."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.engine import TokenEngine
from freewheel.engine.handoffs import MOST_TOLD, Failures
from freewheel.errors import ConfigError, RequestError
from freewheel.spec import Handoff
from freewheel.spec.handoff import KV_PORT
from freewheel.transfer import Fetcher, Post
from freewheel.transfer.libraries import installed
from freewheel.transfer.tcp_wire import TcpWire
from tests.waiting import PATIENCE

SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "context_len": 1024,
    "chunk": 128,
    "max_batch": 2,
    "graph": "eager",
}
ROLE: dict[str, Any] = SMALL | {"host_cache_gb": 0.2, "kv_seconds": 60.0}
PEER: dict[str, Any] = {"kv_peers": ("127.0.0.1",)}
LENGTHS = {"demo": (60, 200, 257, 330), "demo-v4": (300, 515)}
"""The shortest prompt of the demo has no whole block; one of 257 tokens ends behind a block's
last token."""


def prompts(model: str) -> list[list[int]]:
    return [[(7 * n * k + n * n + k) % 1000 for n in range(k)] for k in LENGTHS[model]]


def params(at: int) -> SamplingParams:
    return SamplingParams(temperature=0.8 * (at % 2), seed=at, max_tokens=8)


@cache
def expected(model: str, speculate: int = 3) -> list[tuple[int, ...]]:
    asked = prompts(model)
    llm = LLM(model, **SMALL, speculate=speculate, prefix_cache=False)
    return [o.token_ids for o in llm.generate(asked, [params(n) for n in range(len(asked))])]


class Answers:
    """What an engine has said so far."""

    def __init__(self) -> None:
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.cached: dict[str, int] = {}
        self.ended: dict[str, str] = {}

    def step(self, engine: TokenEngine) -> None:
        for step in engine.step() if engine.busy else ():
            self.tokens[step.id] = self.tokens.get(step.id, ()) + step.tokens
            if step.cached_tokens is not None:
                self.cached[step.id] = step.cached_tokens
            if step.finish is not None:
                self.ended[step.id] = step.finish


def drive(engines: list[TokenEngine], done: Callable[[], bool], answers: Answers) -> None:
    """Step all in turn; `answers` are the last one's."""
    until = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < until, f"ended: {answers.ended}; said: {answers.tokens}"
        for engine in engines[:-1]:
            Answers().step(engine)
        answers.step(engines[-1])


def pair(model: str, wire: str, **more: Any) -> tuple[TokenEngine, TokenEngine]:
    own: dict[str, Any] = ROLE | {"kv_wire": wire} | more
    first = TokenEngine(LLM(model, **own, role="prefill", kv_port=0))
    return first, TokenEngine(LLM(model, **PEER, **own, role="decode"))


@pytest.mark.parametrize(
    ("model", "wire", "speculate"),
    [("demo", "tcp", 3), ("demo", "nixl", 0), ("demo-v4", "nixl", 3), ("demo-v4", "tcp", 0)],
)
def test_an_answer_does_not_show_who_computed_the_prompt(
    model: str, wire: str, speculate: int
) -> None:
    """Cached rows of all groups and of the drafter; the second time nothing is left to fetch."""
    if wire == "nixl" and installed() is None:
        pytest.skip("NIXL is not installed")
    first, second = pair(model, wire, speculate=speculate)
    source = ("127.0.0.1", first.kv_port)
    wanted, answers = expected(model, speculate), Answers()
    for turn in ("a", "b"):
        for at, prompt in enumerate(prompts(model)):
            room = f"{turn}{at}"
            # Either engine may be the first to hear of the prompt.
            second.submit(room, prompt, params(at), handoff=Handoff(room, source))
            first.submit(room, prompt, params(at), handoff=Handoff(room))
    size = 64 if model == "demo" else 256
    drive([first, second], lambda: len(answers.ended) == 2 * len(wanted), answers)
    for at, tokens in enumerate(wanted):
        assert answers.tokens[f"a{at}"] == answers.tokens[f"b{at}"] == tokens
        assert answers.cached[f"a{at}"] == (LENGTHS[model][at] - 1) // size * size
    load = second.load()
    assert load.handoffs is not None and load.tiers is not None
    assert load.handoffs.failed == 0 and load.handoffs.blocks > 0
    assert load.tiers.fetched >= load.handoffs.blocks - load.tiers.slots
    assert load.tiers.damaged == 0
    for copy in second._session.scheduler.copies:
        copy.roster.reservations.check()
    handoffs = first._handoffs
    assert handoffs is not None
    drive([first], lambda: not handoffs._offers, Answers())
    for copy in first._session.scheduler.copies:
        copy.roster.reservations.check()


def test_a_prompt_that_nobody_has_is_computed() -> None:
    """Nobody listens there, or somebody does, and has another prompt in the room."""
    first, second = pair("demo", "tcp")
    asked, wanted, answers = prompts("demo")[1], expected("demo")[1], Answers()
    first.submit("other", asked[::-1], params(1), handoff=Handoff("other"))
    drive([first], lambda: first.load().handoffs.offered == 1, Answers())  # pyright: ignore[reportOptionalMemberAccess]
    with not_listening() as nobody:
        ports = {"nobody": nobody, "other": first.kv_port}
        for room, port in ports.items():
            second.submit(room, asked, params(1), handoff=Handoff(room, ("127.0.0.1", port)))
        drive([first, second], lambda: len(answers.ended) == 2, answers)
    assert all(answers.tokens[room] == wanted for room in ports)
    load = second.load().handoffs
    assert load is not None and load.blocks == 0 and load.failed == 1


def test_a_prompt_of_which_nothing_is_said_is_computed() -> None:
    own: dict[str, Any] = ROLE | PEER | {"kv_seconds": 1.0}
    second = TokenEngine(LLM("demo", **own, role="decode"))
    asked, answers = prompts("demo")[1], Answers()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = ("127.0.0.1", silent.getsockname()[1])
        second.submit("silent", asked, params(1), handoff=Handoff("silent", source))
        drive([second], lambda: len(answers.ended) == 1, answers)
    assert answers.tokens["silent"] == expected("demo")[1]
    load = second.load().handoffs
    assert load is not None and load.blocks == 0 and load.failed == 1


@contextmanager
def not_listening() -> Iterator[int]:
    """A port at which nobody listens, and nobody else comes to."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        yield own.getsockname()[1]


def test_a_prompt_that_does_not_come_is_told_with_its_peer_and_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = pair("demo", "tcp", kv_seconds=1.0)
    asked, answers = prompts("demo")[1], Answers()
    with not_listening() as nobody, caplog.at_level(logging.WARNING, "freewheel.handoffs"):
        for room, port in {"a": nobody, "b": nobody, "c": first.kv_port}.items():
            second.submit(room, asked, params(1), handoff=Handoff(room, ("127.0.0.1", port)))
        drive([first, second], lambda: len(answers.ended) == 3, answers)
    refused, absent = sorted((r.getMessage() for r in caplog.records), key=lambda t: "room" in t)
    assert f"127.0.0.1:{nobody}" in refused and "refused" in refused
    assert f"127.0.0.1:{first.kv_port}" in absent
    assert " time" in absent and "timed out" not in absent


def test_failures_of_one_kind_are_told_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    failures, peer = Failures(), ("host", 1)
    with caplog.at_level(logging.WARNING, "freewheel.handoffs"):
        for tenths in range(250):
            failures.tell(peer, "gone", tenths / 10)
        failures.tell(peer, "other\nline", 25.0)
        failures.tell(("host", 2), "gone", 25.0)
        for port in range(2000):
            failures.tell(("many", port), "gone", 26.0)
    told = [record.getMessage() for record in caplog.records]
    assert len(told[:-2000]) == 5 and len(failures._told) == MOST_TOLD
    assert "(99 more since the last line)" in told[1] and "other?line" in told[3]


def test_others_go_on_while_a_request_waits_for_its_prompt() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    _, second = pair("demo", "tcp", kv_seconds=3600.0)
    asked, answers = prompts("demo")[1], Answers()
    source = ("127.0.0.1", silent.getsockname()[1])
    second.submit("waits", asked, params(1), handoff=Handoff("waits", source))
    second.submit("goes on", asked, params(1))
    drive([second], lambda: "goes on" in answers.ended, answers)
    assert answers.tokens["goes on"] == expected("demo")[1] and "waits" not in answers.tokens
    second.abort("waits")
    silent.close()  # and its backlog with it: the fetch fails, and nobody is there to be told
    drive([second], lambda: not second.busy, answers)
    assert "waits" not in answers.ended


def test_a_prompt_that_is_asked_for_behind_an_error_is_handed_over() -> None:
    """Before the engine has taken its next step: what the error ended is another matter."""
    first, second = pair("demo", "tcp")
    first._session._start_anew()
    asked, answers = prompts("demo")[1], Answers()
    first.submit("room", asked, params(1), handoff=Handoff("room"))
    there = Handoff("room", ("127.0.0.1", first.kv_port))
    second.submit("room", asked, params(1), handoff=there)
    drive([first, second], lambda: "room" in answers.ended, answers)
    assert answers.tokens["room"] == expected("demo")[1]
    load = second.load().handoffs
    assert load is not None and (load.blocks, load.failed) == (3, 0)


def test_bytes_that_changed_on_their_way_are_not_believed() -> None:
    """A proxy between the engines flips a bit of every slot: all is computed."""
    first, second = pair("demo", "tcp")
    proxy = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=spoil, args=(proxy, first.kv_port), daemon=True).start()
    asked, answers = prompts("demo")[1], Answers()
    first.submit("room", asked, params(1), handoff=Handoff("room"))
    there = Handoff("room", ("127.0.0.1", proxy.getsockname()[1]))
    second.submit("room", asked, params(1), handoff=there)
    drive([first, second], lambda: "room" in answers.ended, answers)
    assert answers.tokens["room"] == expected("demo")[1]
    load = second.load()
    assert load.handoffs is not None and load.tiers is not None
    assert load.handoffs.blocks == 3 and load.tiers.damaged > 0
    assert answers.cached["room"] == 0
    proxy.close()


def spoil(proxy: socket.socket, port: int) -> None:
    """Pass on what is said on one connection; of long stretches, a bit of each 4096 bytes."""
    one, _ = proxy.accept()
    other = socket.create_connection(("127.0.0.1", port))

    def carry(source: socket.socket, to: socket.socket, spoils: bool) -> None:
        while raw := bytearray(source.recv(1 << 16)):
            for at in range(2048, len(raw), 4096) if spoils else ():
                raw[at] ^= 1
            to.sendall(raw)

    threading.Thread(target=carry, args=(one, other, False), daemon=True).start()
    carry(other, one, True)


def test_an_engine_says_what_it_cannot_do() -> None:
    plain = TokenEngine(LLM("demo", **SMALL))
    with pytest.raises(RequestError, match="no role: start it with --role"):
        plain.submit("a", [5, 6], params(0), handoff=Handoff("a"))
    second = TokenEngine(LLM("demo", **ROLE, role="decode"))
    with pytest.raises(RequestError, match="must be told whom to ask"):
        second.submit("a", [5, 6], params(0), handoff=Handoff("a"))
    for source in (("10.0.0.1", KV_PORT), ("localhost", 22)):
        with pytest.raises(RequestError, match=f"{source[1]}, is no peer of .*--kv-peer"):
            second.submit("a", [5, 6], params(0), handoff=Handoff("a", source))
    assert not second.busy


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_with_a_role_answers_nobody_but_servers(role: str) -> None:
    llm = LLM("demo", **ROLE, role=role, kv_port=0)
    for ask in (llm.generate, llm.stream, llm.selection):
        with pytest.raises(RequestError, match="role: only servers take and give prompts"):
            ask([5, 6])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"role": "both"}, "role: must be one of prefill, decode"),
        ({"role": "prefill", "prefix_cache": False}, "role: .* turn prefix_cache on"),
        ({"role": "prefill", "tp": 4, "kv_port": 65533}, "kv_port: .* 3 of them, end beyond"),
        ({"kv_port": 9}, "are for engines with a role"),
        ({"role": "prefill", "kv_port": 70000}, "kv_port: must be between"),
        ({"role": "prefill", "kv_wire": "pigeon"}, "kv_wire: must be one of auto, nixl, tcp"),
        ({"role": "prefill", "kv_seconds": 0}, "kv_seconds: must be between"),
        ({"role": "prefill", "kv_peers": "host"}, "kv_peers: must be a tuple"),
        ({"role": "decode", "kv_peers": ("host:0",)}, "kv_peers: must be hosts or host:port"),
        ({"role": "decode", "kv_key_file": ""}, "kv_key_file: must be the path"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", device="cpu", **options)


def test_two_prefill_engines_cannot_listen_at_one_place() -> None:
    first = TokenEngine(LLM("demo", **ROLE, role="prefill", kv_port=0))
    with pytest.raises(ConfigError, match=r"kv_port: cannot listen on .*--kv-port"):
        TokenEngine(LLM("demo", **ROLE, role="prefill", kv_port=first.kv_port))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_closed_engine_has_closed_its_wire_behind_those_who_use_it(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    for kind in (Post, Fetcher, TcpWire):
        monkeypatch.setattr(kind, "close", lambda _, name=kind.__name__: closed.append(name))
    llm = LLM("demo", **ROLE, role=role, kv_wire="tcp", kv_port=0)
    engine = TokenEngine(llm)
    if role == "prefill":
        with pytest.raises(ConfigError, match="kv_port"):
            TokenEngine(LLM("demo", **ROLE, role=role, kv_wire="tcp", kv_port=engine.kv_port))
        assert closed == ["TcpWire"]  # of the one that could not be made
        closed.clear()
    llm.close()
    assert closed == ["Post" if role == "prefill" else "Fetcher", "TcpWire"]


def keyed(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("wire", ["tcp", "nixl"])
def test_engines_with_one_key_hand_over_and_those_without_it_get_nothing(
    wire: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All get their answers, since what does not come is computed; no log has the key."""
    if wire == "nixl" and installed() is None:
        pytest.skip("NIXL is not installed")
    secret, other = "0f" * 16, "1e" * 16
    own: dict[str, Any] = ROLE | PEER | {"kv_wire": wire}
    files = {
        "same": keyed(tmp_path / "a", secret),
        "space around it": keyed(tmp_path / "b", f" {secret}\n"),
        "another": keyed(tmp_path / "c", other),
        "none": None,
    }
    given: dict[str, dict[str, Any]] = {n: {"kv_key_file": path} for n, path in files.items()}
    first = TokenEngine(LLM("demo", **own, **given["same"], role="prefill", kv_port=0))
    asked, wanted = prompts("demo")[1], expected("demo")[1]
    for name in files:
        first.submit(name, asked, params(1), handoff=Handoff(name))
    drive([first], lambda: first.load().handoffs.offered == len(files), Answers())  # pyright: ignore[reportOptionalMemberAccess]
    blocks: dict[str, int] = {}
    with caplog.at_level(logging.DEBUG):
        for name in reversed(files):
            second = TokenEngine(LLM("demo", **own, **given[name], role="decode"))
            answers, source = Answers(), ("127.0.0.1", first.kv_port)
            second.submit(name, asked, params(1), handoff=Handoff(name, source))
            drive([first, second], lambda answers=answers: bool(answers.ended), answers)
            assert answers.tokens[name] == wanted
            load = second.load().handoffs
            assert load is not None
            blocks[name] = load.blocks
            if name in ("none", "another"):
                assert "key" in load.failure
    assert blocks == {"none": 0, "another": 0, "space around it": 3, "same": 3}
    assert secret not in caplog.text and other not in caplog.text
    assert secret not in repr(first._llm.config)


def test_an_engine_with_a_key_takes_nothing_from_one_without(tmp_path: Path) -> None:
    """Somebody else may have come to listen where a prefill engine did."""
    first = TokenEngine(LLM("demo", **ROLE, role="prefill", kv_port=0, kv_wire="tcp"))
    key = keyed(tmp_path / "key", "0f" * 16)
    own: dict[str, Any] = ROLE | PEER | {"kv_key_file": key, "kv_wire": "tcp"}
    second = TokenEngine(LLM("demo", **own, role="decode"))
    answers, source = Answers(), ("127.0.0.1", first.kv_port)
    for engine, handoff in ((first, Handoff("room")), (second, Handoff("room", source))):
        engine.submit("room", prompts("demo")[1], params(1), handoff=handoff)
    drive([first, second], lambda: "room" in answers.ended, answers)
    load = second.load().handoffs
    assert load is not None and load.blocks == 0 and "has no key" in load.failure
    assert answers.tokens["room"] == expected("demo")[1]


@pytest.mark.parametrize(("text", "message"), [("short", "16 to 4096 bytes"), (None, "cannot be")])
def test_a_key_that_is_none_is_refused_without_showing_it(
    text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"kv_key_file: .*{message}") as caught:
        TokenEngine(LLM("demo", **ROLE, role="decode", kv_key_file=str(path)))
    assert "short" not in str(caught.value)
