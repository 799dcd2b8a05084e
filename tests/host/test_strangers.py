# SPDX-License-Identifier: Apache-2.0
"""Whatever is said over the line between two engines, a prompt is brought whole or not at all."""

from __future__ import annotations

import fcntl
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from freewheel.spec.handoff import Handoff, Piece, WireSettings
from freewheel.transfer import Fetch, Fetcher, Pair, Post
from freewheel.transfer.fetcher import AT_ONCE
from freewheel.transfer.line import Line
from freewheel.transfer.post import MOST_READERS
from freewheel.transfer.tcp_wire import TcpWire
from freewheel.transfer.threads import Threads
from tests.waiting import PATIENCE, wait_for

SETTINGS = WireSettings(port=0, seconds=PATIENCE)
PIECE = {"slot": 0, "address": 0, "label": 7, "latest": True, "tokens": "aa"}


class Slots:
    """Memory of four slots."""

    slot_bytes = 64

    def __init__(self) -> None:
        self.slots = [bytearray([n] * self.slot_bytes) for n in range(4)]

    def address(self, slot: int) -> int:
        return slot * self.slot_bytes

    def view(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot])

    def stretches(self) -> list[tuple[int, int]]:
        return []


def fetcher(settings: WireSettings = SETTINGS) -> Fetcher:
    return Fetcher(TcpWire(Slots()), "layout", settings, _nothing)


def _nothing() -> None: ...


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text


def named(ranks: Any = (0,), **changed: Any) -> bytes:
    return framed(json.dumps({"pieces": [PIECE | changed], "card": {}, "ranks": ranks}).encode())


def peer(listener: socket.socket, said: bytes) -> None:
    sock, _ = listener.accept()
    with sock, suppress(OSError):
        sock.recv(1 << 16)
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass


def fetched(said: bytes) -> Fetch:
    """From a peer that says this and no more."""
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(fetcher()) as own:
        threading.Thread(target=peer, args=(listener, said), daemon=True).start()
        fetch = own.begin(Handoff("room", ("127.0.0.1", listener.getsockname()[1])), 0)

        def done() -> bool:
            if fetch.pieces is not None:
                fetch.take([Pair(1, 0, 0)])
            return fetch.done

        wait_for("an end of the fetch", done)
    return fetch


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\0\0",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        framed(b"[" * 100_000),
        framed(b'{"pieces": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
        framed(b"\xff\xfe{}"),
        framed(b"null"),
        framed(b'{"pieces": {}}'),
        framed(b'{"pieces": [[]]}'),
        framed(b'{"pieces": [], "card": []}'),
        named(label=1 << 63),
        named(label=-(1 << 200)),
        named(label=True),
        named(slot=-1),
        named(address=1 << 64),
        named(latest=1),
        named(tokens=None),
        named(more=1),
        named(ranks=None),
        named(ranks=[]),
        named(ranks=[0] * 1025),
        named(ranks=[0, True]),
        named(ranks=[-1]),
        named(ranks=[1024]),
        named(ranks=[1 << 80]),
    ],
    ids=lambda said: repr(said[4:44]),
)
def test_garbage_is_a_failure_that_says_so(said: bytes) -> None:
    """Never an error elsewhere, nor a fetch that counts as one that brought everything."""
    fetch = fetched(said)
    assert fetch.failure is not None and fetch.pieces in (None, ())


def test_half_a_block_is_none() -> None:
    fetch = fetched(named() + b"x" * (Slots.slot_bytes - 1))
    assert fetch.pieces == (Piece(0, 0, 7, True, "aa"),)
    assert fetch.failure is not None and "closed" in fetch.failure


def test_a_prompt_behind_many_others_waits_no_longer_than_it_may() -> None:
    """All threads wait for engines that say nothing; those that follow give up in time as well."""
    seconds = 3.0
    own = fetcher(WireSettings(port=0, seconds=seconds))
    with socket.create_server(("127.0.0.1", 0), backlog=512) as silent, closing(own):
        source = ("127.0.0.1", silent.getsockname()[1])
        fetches = [own.begin(Handoff(str(n), source), 0) for n in range(200)]
        begun = time.monotonic()
        wait_for("an end of all", lambda: all(one.done for one in fetches))
        turns = (time.monotonic() - begun) / seconds
    assert turns < 3  # four without it, of which the first may be under way
    assert all(one.failure for one in fetches)


def test_a_few_threads_do_all_work_and_each_has_what_another_waits_for() -> None:
    """As many at once as there may be, whatever they wait for; the rest behind them."""
    threads, doors = Threads(3, "few"), [threading.Event() for _ in range(5)]
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        doors[number].wait(PATIENCE)

    for number in range(5):
        threads.submit(lambda number=number: work(number))
    wait_for("three that began", lambda: len(begun) == 3)
    assert sorted(begun) == [0, 1, 2]
    doors[1].set()
    wait_for("the next one", lambda: begun[3:] == [3])
    for door in doors:
        door.set()
    wait_for("the last one", lambda: begun[4:] == [4])
    threads.close()
    wait_for("an end", lambda: not any(one.name == "few" for one in threading.enumerate()))


def test_work_that_ends_in_an_error_takes_no_thread_from_what_comes_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[type[BaseException] | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))
    threads, done = Threads(2, "unlucky"), threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    for _ in range(7):
        threads.submit(fail)
    wait_for("all errors", lambda: len(told) == 7)
    threads.submit(done.set)
    assert done.wait(PATIENCE) and set(told) == {ZeroDivisionError}
    threads.close()
    wait_for("an end", lambda: not any(one.name == "unlucky" for one in threading.enumerate()))


def test_fetches_that_end_in_errors_of_ones_own_do_not_stop_those_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with closing(fetcher()) as own:
        monkeypatch.setattr(own._asker.__class__, "bring", lambda *given: 1 // 0)
        fetches = [own.bring(("127.0.0.1", 1), "room", (), PATIENCE) for _ in range(2 * AT_ONCE)]
        wait_for("all to end", lambda: all(one.done for one in fetches))
    assert all("this engine's own" in (one.failure or "") for one in fetches)


def test_a_line_of_any_number_says_whether_its_other_end_is_gone() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = 1500
    if hard != resource.RLIM_INFINITY and hard <= number:
        pytest.skip("so many files may not be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, number + 1), hard))
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            low = socket.create_connection(server.getsockname())
            other, _ = server.accept()
            with low, other:
                high = socket.socket(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD, number))
                with closing(Line(high, time.monotonic() + PATIENCE)) as line:
                    assert high.fileno() >= number and not line.gone(0.0)
                    other.close()
                    assert line.gone(PATIENCE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def post() -> Iterator[Post]:
    with closing(Post(TcpWire(Slots()), "layout", SETTINGS, _nothing)) as made:
        yield made


def told(post: Post, room: str) -> dict[str, Any]:
    with socket.create_connection(("127.0.0.1", post.port), timeout=PATIENCE) as sock:
        own = {"room": room, "first": 0, "layout": "layout", "wire": "tcp"}
        sock.sendall(framed(json.dumps(own).encode()))
        size = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "big")
        return json.loads(sock.recv(size, socket.MSG_WAITALL))


def test_a_post_outlives_whoever_knocks(post: Post) -> None:
    """Garbage, too many connections at once, and a process that is out of files."""
    post.offer("room", [Piece(2, 128, 7, True, "aa")])
    for said in (
        b"",
        b"\xff" * 4,
        framed(b"[" * 100_000),
        framed(b"{}"),
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", post.port)) as sock:
            sock.sendall(said)
    with ExitStack() as crowd:
        for _ in range(MOST_READERS + 40):
            crowd.enter_context(socket.create_connection(("127.0.0.1", post.port)))
        assert sum("_attend" in one.name for one in threading.enumerate()) <= MOST_READERS
    post._listener.settimeout(0.001)  # every accept fails, as it does without a free file
    time.sleep(0.2)
    post._listener.settimeout(None)

    def answer() -> dict[str, Any] | None:
        with suppress(OSError, ValueError):  # places are free as soon as the crowd is noticed
            return told(post, "room")
        return None

    assert wait_for("an answer", answer)["pieces"][0]["slot"] == 2


def test_a_reader_whose_time_is_over_is_still_told_why() -> None:
    settings = WireSettings(port=0, seconds=0.1)
    with closing(Post(TcpWire(Slots()), "layout", settings, _nothing)) as post:
        assert told(post, "empty") == {"refused": "no such prompt was computed in time"}
