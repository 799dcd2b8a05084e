# SPDX-License-Identifier: Apache-2.0
"""Where requests may send a decode engine, and messages that only those with the key can make."""

from __future__ import annotations

import socket
import time

import pytest

from freewheel.errors import ConfigError
from freewheel.spec.handoff import KV_PORT, WireSettings
from freewheel.transfer.keys import Key
from freewheel.transfer.line import Line, WireError
from tests.waiting import PATIENCE


@pytest.mark.parametrize(
    ("peers", "allowed", "refused"),
    [
        ((), {("127.0.0.1", KV_PORT), ("::1", KV_PORT)}, {("localhost", 22), ("host", KV_PORT)}),
        (("localhost:9001",), {("127.0.0.1", 9001), ("::1", 9001)}, {("localhost", 9002)}),
        (("host",), {("host", 1), ("HOST", 2)}, {("host.other", 1), ("localhost", 1)}),
        (("host:5",), {("host", 5)}, {("host", 6), ("other", 5)}),
        (("[fd00::1]:5",), {("fd00::1", 5)}, {("fd00::1", 6), ("fd00::2", 5)}),
        (("fd00::1",), {("fd00::1", 5), ("fd00::1", 6)}, {("fd00::2", 5)}),
    ],
)
def test_an_engine_goes_only_where_it_was_told(
    peers: tuple[str, ...], allowed: set[tuple[str, int]], refused: set[tuple[str, int]]
) -> None:
    settings = WireSettings(peers=peers)
    assert all(settings.may_fetch_from(*one) for one in allowed)
    assert not any(settings.may_fetch_from(*one) for one in refused)


@pytest.mark.parametrize(
    "peer",
    [
        *("", ":5", "host:", "host:0", "host:65536", "host:x", "http://host:5", "a b", "[]:5"),
        *("host:5:6", "[::1", "::1]", "[::1]x:5", "[[::1]]:5", "host]:5"),
    ],
)
def test_what_is_no_peer_is_refused(peer: str) -> None:
    with pytest.raises(ConfigError, match="kv_peers: must be hosts or host:port"):
        WireSettings(peers=(peer,))


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def test_a_repeated_a_changed_and_a_mirrored_message_are_not_heard() -> None:
    for wrong in ("repeated", "changed", "mirrored", "unsealed"):
        one, other = connected()
        reader, post = (
            Line(one, time.monotonic() + PATIENCE),
            Line(other, time.monotonic() + PATIENCE),
        )
        reader.seal(b"session", "reader", "post")
        post.seal(b"session", "post", "reader")
        reader.say({"room": "a"})
        raw = other.recv(1 << 12, socket.MSG_PEEK)
        assert post.hear() == {"room": "a"}
        if wrong == "mirrored":
            other.sendall(raw)
            listener = reader
        else:
            spoilt = bytearray(raw)
            spoilt[10] ^= wrong == "changed"
            plain = len(raw) - 36
            cut = plain.to_bytes(4, "big") + raw[4 : 4 + plain]
            one.sendall(cut if wrong == "unsealed" else spoilt)
            listener = post
        with pytest.raises(WireError, match="does not have the key"):
            listener.hear()
        one.close()
        other.close()


def test_a_proof_that_is_no_code_is_another_key() -> None:
    ours, theirs = connected()
    with ours, theirs:
        reader, post = (Line(one, time.monotonic() + PATIENCE) for one in (ours, theirs))
        post.say({"number": "0" * 32, "proof": "\ud800"})
        with pytest.raises(WireError, match="another key"):
            Key(b"0123456789abcdef").meet(reader)


def test_a_key_does_not_show_itself() -> None:
    key = Key(b"0123456789abcdef")
    assert "0123" not in repr(key) and "0123" not in f"{key}"
