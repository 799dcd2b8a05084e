# SPDX-License-Identifier: Apache-2.0
"""A prompt changes engines of several ranks: the answer does not show which of them had it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from freewheel import LLM
from freewheel.engine import TokenEngine
from freewheel.engine.handoffs import Handoffs, layout_of
from freewheel.errors import RankError
from freewheel.runtime.parallel import crew as crew_module
from freewheel.runtime.parallel.crew import LocalCrew, assemble, dismiss
from freewheel.spec import Handoff
from freewheel.spec.errand import (
    Bring,
    Errand,
    Oblivion,
    Offer,
    Opening,
    Trip,
    Withdrawal,
    errand_in,
    text_of,
)
from freewheel.spec.handoff import WireSettings
from freewheel.transfer.asking import Asker
from freewheel.transfer.line import Line
from freewheel.transfer.tcp_wire import TcpWire
from freewheel.transfer.wire import Pair
from tests.program.test_handoffs import (
    LENGTHS,
    PEER,
    ROLE,
    Answers,
    drive,
    expected,
    params,
    prompts,
)
from tests.waiting import PATIENCE, wait_for

Mesh = dict[str, Any]
ONE: Mesh = {}
TP: Mesh = {"tp": 2, "check_ranks": True}
DP: Mesh = {"dp": 2, "ep": True}


_LEFT: list[TokenEngine] = []
"""Engines of the test before: their ranks stay for the next one, if it has the same mesh."""


@pytest.fixture(scope="module", autouse=True)
def crew() -> object:
    dismiss()  # another file's, of another mesh
    yield
    leave()
    dismiss()


def built(*asked: tuple[str, Mesh, dict[str, Any]]) -> list[TokenEngine]:
    """Engines of these models, meshes and options."""
    shapes = {(mesh.get("tp", 1), mesh.get("dp", 1)) for _, mesh, _ in asked} - {(1, 1)}
    if any(crew.shape not in shapes for crew in crew_module._CREWS):
        leave()
        dismiss()
    made = [TokenEngine(LLM(model, **mesh, **own)) for model, mesh, own in asked]
    leave()
    return made


def leave() -> None:
    """Close what the test before has left."""
    while _LEFT:
        _LEFT.pop()._llm.close()


def pair(
    model: str, first: Mesh, second: Mesh, speculate: int = 3, **more: Any
) -> tuple[TokenEngine, TokenEngine]:
    """One of each role. Where both have ranks, the same processes serve both."""
    own: dict[str, Any] = ROLE | {"speculate": speculate, "kv_wire": "tcp"} | more
    one, other = built(
        (model, first, own | {"role": "prefill", "kv_port": 0}),
        (model, second, own | PEER | {"role": "decode"}),
    )
    return one, other


def handoffs(engine: TokenEngine) -> Handoffs:
    assert engine._handoffs is not None
    return engine._handoffs


def ask(first: TokenEngine, second: TokenEngine, room: str, prompt: list[int], at: int) -> None:
    second.submit(room, prompt, params(at), handoff=Handoff(room, ("127.0.0.1", first.kv_port)))
    first.submit(room, prompt, params(at), handoff=Handoff(room))


def check(*engines: TokenEngine) -> None:
    """No slot and no page was lost."""
    for engine in engines:
        for copy in engine._session.scheduler.copies:
            copy.roster.reservations.check()
        _LEFT.append(engine)


@pytest.mark.parametrize(
    ("model", "first", "second", "speculate"),
    [
        ("demo", TP, ONE, 3),
        ("demo-v4", ONE, TP, 3),
        ("demo", TP, TP, 0),
        ("demo-v4", DP, ONE, 3),
        ("demo", ONE, DP, 3),
        ("demo-v4", DP, DP, 0),
    ],
    ids=["tp2-1", "v4-1-tp2", "tp2-tp2", "v4-dp2-1", "1-dp2", "v4-dp2-dp2"],
)
def test_an_answer_does_not_show_which_ranks_computed_the_prompt(
    model: str, first: Mesh, second: Mesh, speculate: int
) -> None:
    """All whole blocks come, to every rank of the copy that answers, from that which computed."""
    engines, wanted, answers = (
        pair(model, first, second, speculate),
        expected(model, speculate),
        Answers(),
    )
    for at, prompt in enumerate(prompts(model)):
        ask(*engines, f"{at}", prompt, at)
    drive([*engines], lambda: len(answers.ended) == len(wanted), answers)
    size = 64 if model == "demo" else 256
    for at, tokens in enumerate(wanted):
        assert answers.tokens[f"{at}"] == tokens
        assert answers.cached[f"{at}"] == (LENGTHS[model][at] - 1) // size * size
    load = engines[1].load()
    assert load.handoffs is not None and load.tiers is not None
    assert load.handoffs.failed == 0 and load.handoffs.blocks > 0 and load.tiers.damaged == 0
    drive([engines[0]], lambda: not handoffs(engines[0])._offers, Answers())
    found = engines[0].load().handoffs
    assert found is not None and found.read == len(wanted) and not found.dropped
    if second is DP:
        used = [len(c.roster.reservations.moves.tier) for c in copies(engines[1])]  # pyright: ignore[reportOptionalMemberAccess]
        assert all(used)
    check(*engines)


def copies(engine: TokenEngine) -> Sequence[Any]:
    return engine._session.scheduler.copies


class Slots:
    """Memory of a reader that is no engine."""

    def __init__(self, slot_bytes: int, count: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots = [bytearray(slot_bytes) for _ in range(count)]

    def address(self, slot: int) -> int:
        return slot

    def view(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot])

    def stretches(self) -> list[tuple[int, int]]:
        return []


@pytest.mark.parametrize("model", ["demo", "demo-v4"])
def test_the_ranks_of_a_copy_hold_a_prompt_s_blocks_byte_for_byte_alike(model: str) -> None:
    """Latents, index keys, V4's raw rows and entries, and the drafter's, in float32."""
    own: dict[str, Any] = {"dtype": "float32", "kv_wire": "tcp", "kv_port": 0, "role": "prefill"}
    (first,) = built((model, TP, ROLE | own))
    first.submit("room", prompts(model)[1], params(0), handoff=Handoff("room"))
    drive([first], lambda: first.load().handoffs.offered == 1, Answers())  # pyright: ignore[reportOptionalMemberAccess]
    held = [kept.slot for kept in handoffs(first)._offers["room"].held]
    assert len(held) > 1
    found: list[list[bytes]] = []
    for port in handoffs(first)._ports:
        memory = Slots(first._llm.executor.mover.slot_bytes, len(held))
        asker = Asker(TcpWire(memory), layout_of(first._llm.built), None)
        pairs = [Pair(n, slot, 0) for n, slot in enumerate(held)]
        asker.bring(("127.0.0.1", port), "room", pairs, time.monotonic() + PATIENCE)
        found.append([bytes(slot) for slot in memory.slots])
    assert found[0] == found[1] and any(found[0][0])
    check(first)


def spoil_what_one_rank_reads(first: TokenEngine, cut: bool) -> None:
    """Of the lines that ranks of another engine open to a prefill engine of one, the second gets
    other bytes than the first; or none, where it is `cut`."""
    post, number, lock = handoffs(first)._post, iter(range(1 << 20)), threading.Lock()
    assert post is not None
    serve = post._serve

    def serve_one(line: Line, found: Any, room: str, at: int, part: str | None) -> None:
        if part is not None:
            with lock:
                second = next(number) % 2 == 1
            if second and cut:
                return
            if second:
                return spoiled(line, found, room, at, part)
        serve(line, found, room, at, part)

    def spoiled(line: Line, found: Any, room: str, at: int, part: str) -> None:
        send = line.send

        def send_other(raw: memoryview) -> None:
            changed = bytearray(raw)
            if len(changed) > 4096:
                changed[2048] ^= 1
            send(memoryview(changed) if len(changed) > 4096 else raw)

        line.send = send_other  # type: ignore[method-assign]
        serve(line, found, room, at, part)

    post._serve = serve_one  # type: ignore[method-assign]


@pytest.mark.parametrize("cut", [False, True], ids=["damaged", "cut"])
def test_what_one_rank_alone_did_not_get_whole_is_computed_anew_on_all(
    cut: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engines, answers = pair("demo", ONE, TP), Answers()
    spoil_what_one_rank_reads(engines[0], cut)
    with caplog.at_level(logging.WARNING, "freewheel.handoffs"):
        for at in (1, 3):
            ask(*engines, f"{at}", prompts("demo")[at], at)
        drive([*engines], lambda: len(answers.ended) == 2, answers)
    for at in (1, 3):
        assert answers.tokens[f"{at}"] == expected("demo")[at] and answers.cached[f"{at}"] == 0
    load = engines[1].load()
    assert load.handoffs is not None and load.tiers is not None
    assert load.handoffs.failed == 2 * cut and bool(load.tiers.damaged) != cut
    assert ("rank " in load.handoffs.failure and "closed" in caplog.text) == cut
    check(*engines)


def test_what_ranks_bring_behind_an_error_is_not_taken_for_what_came_since() -> None:
    """Slots were given away with the rounds that were lost, and their readers are late: they write
    over what another prompt has brought by then."""
    (first, second), answers = pair("demo", ONE, TP), Answers()
    post, doors, over = handoffs(first)._post, {"a": threading.Event()}, list[str]()
    doors["b"], begun = threading.Event(), list[str]()
    assert post is not None
    serve = post._serve

    def serve_late(line: Line, found: Any, room: str, at: int, part: str | None) -> None:
        if part is not None:
            begun.append(room)
            assert doors[room].wait(PATIENCE)
        serve(line, found, room, at, part)
        over.extend([room] if part is not None else [])

    post._serve = serve_late  # type: ignore[method-assign]
    asked = prompts("demo")
    ask(first, second, "a", asked[1], 1)
    drive([first, second], lambda: begun == ["a", "a"], answers)
    second._session._start_anew()
    second.abort("a")
    ask(first, second, "b", asked[3], 3)
    drive([first, second], lambda: begun[2:] == ["b", "b"], answers)
    for room, count in (("b", 2), ("a", 4)):
        doors[room].set()
        wait_for(f"all that is brought of {room}", lambda count=count: len(over) == count)
    drive([first, second], lambda: "b" in answers.ended, answers)
    assert answers.tokens["b"] == expected("demo")[3]
    load = second.load()
    assert load.handoffs is not None and load.tiers is not None
    assert load.handoffs.blocks == 5 and load.tiers.damaged > 0
    check(first, second)


def test_a_rank_lost_while_it_fetches_ends_its_engine_and_another_reads_the_prompt() -> None:
    """It stands still before it can hear of its errand, and is then killed."""
    first, second = pair("demo", ONE, TP)
    crew = assemble("cpu", 2)
    assert isinstance(crew, LocalCrew)
    asked, answers = prompts("demo")[3], Answers()
    first.submit("a", asked, params(3), handoff=Handoff("a"))
    first.submit("b", asked, params(3), handoff=Handoff("b"))
    drive([first], lambda: first.load().handoffs.offered == 2, Answers())  # pyright: ignore[reportOptionalMemberAccess]
    os.kill(crew.pids[1], signal.SIGSTOP)
    killer = threading.Timer(0.5, os.kill, (crew.pids[1], signal.SIGKILL))
    killer.start()
    source = ("127.0.0.1", first.kv_port)
    second.submit("a", asked, params(3), handoff=Handoff("a", source))
    with pytest.raises(RankError):
        drive([first, second], lambda: bool(answers.ended), answers)
    killer.join()
    wait_for("the loss", crew.why_now)
    (again,) = built(("demo", TP, ROLE | PEER | {"kv_wire": "tcp", "role": "decode"}))
    again.submit("b", asked, params(3), handoff=Handoff("b", source))
    drive([first, again], lambda: "b" in answers.ended, answers)
    assert answers.tokens["b"] == expected("demo")[3]
    load = again.load().handoffs
    assert load is not None and load.blocks == 5 and not load.failed
    check(first, again)


def test_a_rank_lost_while_it_is_read_leaves_its_prompt_to_be_computed() -> None:
    """The one that has it: rank 0 of that engine is there, and says where the prompt is."""
    first, second = pair("demo", DP, ONE)
    crew = assemble("cpu", 1, 2)
    assert isinstance(crew, LocalCrew)
    asked, answers = prompts("demo"), Answers()
    for at in (1, 3):
        first.submit(f"{at}", asked[at], params(at), handoff=Handoff(f"{at}"))
    drive([first], lambda: first.load().handoffs.offered == 2, Answers())  # pyright: ignore[reportOptionalMemberAccess]
    offers = handoffs(first)._offers
    (lost,) = (int(room) for room, offer in offers.items() if offer.copy == 1)
    os.kill(crew.pids[1], signal.SIGSTOP)  # it takes a connection, and says nothing
    source = ("127.0.0.1", first.kv_port)
    for at in (1, 3):
        second.submit(f"{at}", asked[at], params(at), handoff=Handoff(f"{at}", source))
    drive([second], lambda: f"{4 - lost}" in answers.ended, answers)
    assert f"{lost}" not in answers.ended
    os.kill(crew.pids[1], signal.SIGKILL)
    drive([second], lambda: len(answers.ended) == 2, answers)
    for at in (1, 3):
        assert answers.tokens[f"{at}"] == expected("demo")[at]
    assert (answers.cached[f"{lost}"], answers.cached[f"{4 - lost}"] > 0) == (0, True)
    check(second)


def test_ranks_listen_one_port_behind_the_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        free = one.getsockname()[1]
    own: dict[str, Any] = {"kv_wire": "tcp", "role": "prefill", "kv_port": free}
    (first,) = built(("demo", TP, ROLE | own))
    assert handoffs(first)._ports == (free, free + 1) and handoffs(first)._ranks_of(0) == [0, 1]
    check(first)


@pytest.mark.parametrize(
    "errand",
    [
        Opening("decode", "ab", WireSettings(peers=("host:9", "other"), key_file="/a/key")),
        Offer(1, "room", (3, 5)),
        Withdrawal(0, "room"),
        Bring(7, 1, "room", "host", (9, 10), (Trip(1, 2, -(1 << 62)), Trip(3, 4, 5)), 1.5),
        Oblivion(),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_rank_0_says_is_what_others_hear(errand: Errand) -> None:
    assert errand_in(text_of(errand)) == errand
